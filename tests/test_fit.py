"""Fitting on a manifest: one read, the same bytes for any order and thread, and refusals that say why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from segcal import cases
from segcal.calibrators import CALIBRATORS
from segcal.errors import DataError, ManifestError, MismatchError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.fitting import methods
from segcal.fitting.exact import KKT_PROMISE
from segcal.fitting.polish import MAX_PASSES
from segcal.fitting.run import fit, fit_many
from segcal.manifest import Manifest, Split
from segcal.regions import RegionCalibrator
from segcal.settings import PipelineSettings
from tests.fit_data import CLASSES, SHAPE_2D, write_ensemble

SPLIT = {"calibration": [0, 1, 2, 3], "validation": [4, 5]}
VOXELWISE = [name for name, cls in CALIBRATORS.items() if not cls.spatial]
FIXED: dict[str, Any] = {"lambda_": 1e-3, "mu": 1e-3}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_ensemble(tmp_path_factory.mktemp("small"), split=SPLIT, prediction={"mirroring": False})


@pytest.fixture(scope="module")
def fitted(manifest: Manifest) -> dict[str, FittedCalibrator]:
    """Every voxel-wise method, three trials each."""
    return fit_many(manifest, VOXELWISE, trials=3)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the member files in the order they are read."""
    seen: list[str] = []
    original = cases.read_member

    def counted(path: Path, **how: Any) -> Any:
        seen.append(f"{path.parent.name}/{path.name}")
        return original(path, **how)

    monkeypatch.setattr(cases, "read_member", counted)
    return seen


def names(calibration: int = 4, validation: int = 2) -> list[str]:
    return sorted(f"member_{m}/case_{k:02d}.npz" for k in range(calibration + validation) for m in range(2))


def content_without_manifest_hash(calibrator: FittedCalibrator) -> bytes:
    """The file without the one field that is meant to tell manifests apart."""
    info = calibrator.info.model_copy(update={"manifest_sha256": None})
    return FittedCalibrator(calibrator.calibrator, info).content


def test_calibration_lowers_the_nll_in_the_order_of_freedom(fitted: dict[str, FittedCalibrator]) -> None:
    nll = {name: calibrator.info.fit_nll for name, calibrator in fitted.items()}
    assert all(nll[name] < nll["identity"] - 0.05 for name in VOXELWISE if name != "identity")
    assert nll["cms_ap"] <= nll["ts"] + 1e-3
    assert all(calibrator.info.validation_nll is not None for calibrator in fitted.values())


def test_info_says_how_the_calibrator_was_made(manifest: Manifest, fitted: dict[str, FittedCalibrator]) -> None:
    for name, calibrator in fitted.items():
        info, method = calibrator.info, CALIBRATORS[name]
        assert (info.method, info.solver, info.classes, info.pooling, info.kind) == (
            name, "exact", CLASSES, "logits", "logits",
        )  # fmt: skip
        assert (info.translation_invariant, info.preserves) == (method.translation_invariant, method.preserves)
        assert info.manifest_sha256 == manifest.sha256
        assert info.prediction == {"mirroring": False}
        penalised = getattr(method, "penalised", False)
        assert (info.lambda_ is not None, info.mu is not None) == (penalised, penalised)
        assert set(info.versions) >= {"segcal", "torch", "numpy"}


def test_info_holds_no_nan_and_the_statistics_of_every_case(fitted: dict[str, FittedCalibrator]) -> None:
    for calibrator in fitted.values():
        text = calibrator.info.to_json()
        assert "NaN" not in text
        assert "Infinity" not in text
        statistics = json.loads(text)["reference_statistics"]
        assert set(statistics) == {"free_energy_mean", "free_energy_std", "confidence_mean"}
        assert all(len(values) == 4 and all(map(math.isfinite, values)) for values in statistics.values())


def test_statistics_are_those_of_the_pooled_logits_in_the_order_of_the_ids(
    manifest: Manifest, fitted: dict[str, FittedCalibrator]
) -> None:
    statistics = fitted["ts"].info.reference_statistics
    for k in range(4):
        members = [np.load(manifest.root / path)["logits"].astype(np.float64) for path in manifest.cases[k].members]
        z = np.mean(members, axis=0)
        energy = np.log(np.exp(z).sum(0))
        confidence = np.exp(z.max(0) - energy)
        assert statistics["free_energy_mean"][k] == pytest.approx(energy.mean(), rel=1e-6)
        assert statistics["free_energy_std"][k] == pytest.approx(energy.std(), rel=1e-5)
        assert statistics["confidence_mean"][k] == pytest.approx(confidence.mean(), rel=1e-6)


def test_fit_nll_is_the_mean_over_all_voxels(manifest: Manifest, fitted: dict[str, FittedCalibrator]) -> None:
    """The data fit into the sample, so the estimate is exact."""
    for name, calibrator in fitted.items():
        total, count = 0.0, 0
        for case in manifest.cases[:4]:
            data = cases.load_case(manifest, case, pooling="logits", device=torch.device("cpu"), with_labels=True)
            assert data.labels is not None
            probs = calibrator.probabilities(data.logits.double(), class_axis=0, decision=data.decision)
            total -= float(probs.gather(0, data.labels[None]).log().sum())
            count += data.labels.numel()
        assert calibrator.info.fit_nll == pytest.approx(total / count, rel=1e-6), name


def test_several_methods_cost_one_read(manifest: Manifest, reads: list[str]) -> None:
    fit_many(manifest, ["ts", "ets", "dc", "cms_ap"], trials=2)
    assert sorted(reads) == names()


def test_methods_and_local_methods_share_the_read(manifest: Manifest, reads: list[str]) -> None:
    settings = {"lts_ti": PipelineSettings(method="lts_ti", max_patches=40)}
    found = fit_many(manifest, ["ts", "lts_ti"], settings=settings, trials=1)
    assert sorted(reads) == names()
    assert found["lts_ti"].info.solver == "adam"
    assert found["lts_ti"].info.alpha is not None
    assert found["lts_ti"].info.lambda_ is None


def test_polishing_data_that_fit_into_the_sample_only_measures(manifest: Manifest, reads: list[str]) -> None:
    polished = fit_many(manifest, ["ts", "dc"], polished=True, **FIXED)
    assert sorted(reads) == sorted(names() + names(validation=0))
    plain = fit(manifest, method="dc", **FIXED)
    assert polished["dc"].info.fit_nll == pytest.approx(plain.info.fit_nll, rel=1e-9)


@pytest.mark.parametrize("pooling", ["logits", "probabilities"])
def test_one_by_one_or_together_gives_the_same_bytes(manifest: Manifest, pooling: Any) -> None:
    some = ["ts", "ets", "vs", "ms_c", "cms_op"]
    together = fit_many(manifest, some, trials=2, pooling=pooling)
    for name in some:
        assert fit(manifest, method=name, trials=2, pooling=pooling).content == together[name].content


def test_forced_fits_warn_about_themselves_only(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, kind="probabilities", split=SPLIT)
    together = fit_many(manifest, ["ms", "ts", "vs"], force=True, **FIXED)
    for name in ("ms", "ts", "vs"):
        assert fit(manifest, method=name, force=True, **FIXED).content == together[name].content
        assert any("because of --force" in text for text in together[name].info.warnings) == (name != "ts")


def test_the_order_of_cases_changes_nothing(manifest: Manifest, tmp_path: Path) -> None:
    shuffled_split = {"calibration": [2, 0, 3, 1], "validation": [5, 4]}
    shuffled = write_ensemble(tmp_path, order=[3, 5, 0, 4, 1, 2], split=shuffled_split, prediction={"mirroring": False})
    for method in ("cms_ap", "ets"):
        first, second = (fit(data, method=method, trials=3) for data in (manifest, shuffled))
        assert content_without_manifest_hash(first) == content_without_manifest_hash(second)


def test_the_seed_decides_and_repeats(tmp_path: Path) -> None:
    settings = {"dc": PipelineSettings(method="dc", rows=1000)}
    manifest = write_ensemble(tmp_path, n_cases=4, shape=(8, 44, 44), split={"calibration": [0, 1], "validation": [2]})
    first, again, other = (
        fit(manifest, method="dc", settings=settings, seed=seed, **FIXED).content for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("pooling", ["logits", "probabilities"])
def test_the_number_of_threads_changes_no_byte(tmp_path: Path, pooling: Any) -> None:
    """Cases above 32,768 voxels: torch splits the sums of larger arrays among its threads."""
    manifest = write_ensemble(tmp_path, n_cases=2, shape=(13, 47, 61), split={"calibration": [0], "validation": [1]})
    before, contents = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            found = fit_many(manifest, ["ts", "cms_ap"], pooling=pooling, full=True, **FIXED)
            contents.append({name: calibrator.content for name, calibrator in found.items()})
            assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)
    assert contents[0] == contents[1]


def test_full_reaches_the_optimum_that_a_sample_that_holds_everything_reaches(tmp_path: Path, reads: list[str]) -> None:
    manifest = write_ensemble(tmp_path, n_cases=3, shape=(8, 50, 50), split={"calibration": [0, 1], "validation": [2]})
    small = {name: PipelineSettings(method=name, rows=1000) for name in ("dc", "cms_op", "ets")}
    exact = fit_many(manifest, list(small), **FIXED)
    reads.clear()
    full = fit_many(manifest, list(small), settings=small, full=True, **FIXED)
    assert 3 < reads.count("member_0/case_00.npz") <= MAX_PASSES + 2
    assert reads.count("member_0/case_02.npz") == 1
    reads.clear()
    polished = fit_many(manifest, list(small), settings=small, polished=True, **FIXED)
    assert reads.count("member_0/case_00.npz") == 3  # one to condense, one to correct, one to measure
    for name, calibrator in full.items():
        assert polished[name].info.fit_nll == pytest.approx(exact[name].info.fit_nll, rel=2e-5), name
        assert calibrator.info.fit_nll == pytest.approx(exact[name].info.fit_nll, rel=1e-6), name
        assert not any(f"above {KKT_PROMISE:g}" in text for text in calibrator.info.warnings)


def test_the_condensed_fit_is_within_a_thousandth_of_the_full_one(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=3, shape=(8, 50, 50), split={"calibration": [0, 1], "validation": [2]})
    for name in ("ts", "dc", "cms_ap"):
        small = {name: PipelineSettings(method=name, rows=1000)}
        condensed = fit(manifest, method=name, settings=small, **FIXED)
        exact = fit(manifest, method=name, **FIXED)
        assert condensed.info.fit_nll == pytest.approx(exact.info.fit_nll, rel=3e-3)
        assert condensed.content != exact.content


def test_a_split_is_drawn_from_the_seed_when_none_is_given(tmp_path: Path, reads: list[str]) -> None:
    manifest = write_ensemble(tmp_path)
    first, again, other = (fit(manifest, method="dc", trials=2, seed=seed) for seed in (0, 0, 3))
    assert first.content == again.content
    assert first.info.validation_nll is not None
    assert first.info.validation_nll != other.info.validation_nll
    assert sorted(reads) == sorted(names() * 3)  # all six cases, each once a fit


def test_a_split_may_be_given_by_number_or_by_hand(manifest: Manifest) -> None:
    by_hand = Split(calibration=("case_05",), validation=("case_00",))
    found = fit(manifest, method="ts", split=by_hand)
    assert len(found.info.reference_statistics["confidence_mean"]) == 1
    default, numbered = (fit(manifest, method="ts", split=split) for split in (None, 0))
    assert default.content == numbered.content
    with pytest.raises(UsageError, match="not 1"):
        fit(manifest, method="ts", split=1)


def test_one_case_is_enough_when_nothing_is_tuned(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=1)
    found = fit(manifest, method="ts")
    assert found.info.validation_nll is None
    assert any("fitted on 1 case only" in text for text in found.info.warnings)
    with pytest.raises(ManifestError, match="at least one for calibration and one for validation"):
        fit(manifest, method="dc")


def test_tuning_without_validation_cases_is_refused_with_the_way_out(manifest: Manifest) -> None:
    split = Split(calibration=("case_00", "case_01"))
    with pytest.raises(UsageError, match=r"dc: lambda, mu must be tuned.*--lambda and --mu"):
        fit(manifest, method="dc", split=split)
    with pytest.raises(UsageError, match="mu must be tuned"):
        fit(manifest, method="dc", split=split, lambda_=1e-3)
    for method in ("ts", "ets", "vs", "identity"):
        assert fit(manifest, method=method, split=split).info.validation_nll is None
    assert fit(manifest, method="dc", split=split, **FIXED).info.lambda_ == 1e-3
    with pytest.raises(UsageError, match=r"lts_ti.*validation cases"):
        fit(manifest, method="lts_ti", split=split)
    with pytest.raises(UsageError, match=r"adam.*validation"):
        fit(manifest, method="ts", split=split, solver="adam")


def test_an_empty_calibration_set_is_refused(manifest: Manifest) -> None:
    with pytest.raises(DataError, match="no calibration case"):
        fit(manifest, method="ts", split=Split(validation=("case_00",)))


def test_an_unknown_method_is_refused_before_anything_is_read(manifest: Manifest, reads: list[str]) -> None:
    with pytest.raises(UsageError, match="unknown method `platt`; known are identity, ts"):
        fit_many(manifest, ["ts", "platt"])
    assert reads == []


@pytest.mark.parametrize("method", ["vs", "ms", "lts"])
def test_shift_sensitive_methods_are_refused_on_probabilities(tmp_path: Path, method: str, reads: list[str]) -> None:
    manifest = write_ensemble(tmp_path, n_cases=3, kind="probabilities")
    with pytest.raises(MismatchError, match=f"{method}: not translation-invariant.*probabilities.*--force"):
        fit(manifest, method=method, **FIXED)
    assert reads == []
    if method != "lts":
        forced = fit(manifest, method=method, force=True, **FIXED)
        assert not forced.info.translation_invariant
        assert any("because of --force" in text for text in forced.info.warnings)
    else:
        with pytest.raises(MismatchError):
            fit_many(manifest, ["ts", method])


def test_on_pooled_probabilities_every_method_is_translation_invariant(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=4, kind="probabilities")
    found = fit(manifest, method="ms", pooling="probabilities", **FIXED)
    assert found.info.translation_invariant
    assert found.info.pooling == "probabilities"
    assert not any("--force" in text for text in found.info.warnings)


def test_ms_of_pooled_probabilities_is_dc(manifest: Manifest) -> None:
    """log p is its own canonical form, so matrix scaling of it is Dirichlet calibration (METHODS 1)."""
    found = fit_many(manifest, ["ms", "dc"], pooling="probabilities", **FIXED)
    assert found["ms"].info.fit_nll == pytest.approx(found["dc"].info.fit_nll, rel=1e-6)


def test_logits_or_their_probabilities_give_the_same_invariant_calibrator(manifest: Manifest, tmp_path: Path) -> None:
    probabilities = write_ensemble(tmp_path, kind="probabilities", split=SPLIT, prediction={"mirroring": False})
    for pooling in ("logits", "probabilities"):
        found = [fit(data, method="cms_ap", pooling=pooling, **FIXED) for data in (manifest, probabilities)]
        assert found[0].info.fit_nll == pytest.approx(found[1].info.fit_nll, rel=1e-5)


def test_stored_zeros_are_counted_in_the_warnings(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=3, kind="probabilities")
    path = manifest.root / manifest.cases[0].members[0]
    values = np.load(path)["probabilities"]
    values[:, 0, 0, :5] = np.array([1.0, 0.0, 0.0])[:, None]
    np.savez_compressed(path, probabilities=values)
    found = fit(manifest, method="ts", split=Split(calibration=("case_00",)))
    assert any("10 stored probabilities of 0" in text for text in found.info.warnings)


def test_two_dimensional_data(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, shape=SHAPE_2D, n_cases=4)
    found = fit_many(manifest, ["ts", "cms_op"], **FIXED)
    assert found["cms_op"].info.fit_nll < found["ts"].info.fit_nll + 1e-3


@pytest.mark.parametrize(("option", "masked"), [("ignored", (slice(None), slice(0, 3))), ("crop", (..., slice(0, 4)))])
def test_ignored_voxels_and_those_outside_the_crop_have_no_say(tmp_path: Path, option: str, masked: Any) -> None:
    """Whatever stands there may be turned into anything without changing the fit."""
    split = {"calibration": [0, 1], "validation": [2]}
    (tmp_path / "a").mkdir()
    manifest = write_ensemble(tmp_path / "a", n_cases=3, split=split, **{option: True})
    first = fit_many(manifest, ["ts", "cms_ap"], **FIXED)
    for case in manifest.cases:
        for member in case.members:
            arrays = dict(np.load(manifest.root / member))
            arrays["logits"][:, *(masked if masked[0] is not ... else (slice(None), slice(None), masked[1]))] = 7.0
            np.savez_compressed(manifest.root / member, **arrays)
    second = fit_many(manifest, ["ts", "cms_ap"], **FIXED)
    for name in first:
        for key, value in first[name].calibrator.tensors().items():
            assert torch.equal(second[name].calibrator.tensors()[key], value)
        assert first[name].info.fit_nll == second[name].info.fit_nll


def test_data_without_a_single_counted_voxel_are_an_error(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=2, shape=(2, 6, 8), ignored=True)
    for member in manifest.cases[0].members:  # predicted only where the label is ignored
        logits = np.load(manifest.root / member)["logits"]
        np.savez_compressed(manifest.root / member, logits=logits, crop=[[0, 2], [0, 3], [0, 8]])
    with pytest.raises(DataError, match=r"calibration cases.*every voxel is ignored or outside the crop"):
        fit(manifest, method="ts", split=Split(calibration=("case_00",)))


def test_starved_classes_are_named(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=3, absent=2)
    found = fit_many(manifest, ["ts", "cms_ap"], split=Split(calibration=("case_00", "case_01")), **FIXED)
    for calibrator in found.values():
        assert any("class `tumour` has no labelled voxel" in text for text in calibrator.info.warnings)
        assert any("fitted on 2 cases only" in text for text in calibrator.info.warnings)


def test_a_class_that_is_never_predicted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "AdamSettings", partial(methods.AdamSettings, max_epochs=3))
    manifest = write_ensemble(tmp_path, n_cases=2, shape=(1, 12, 14))
    for case in manifest.cases:
        for member in case.members:
            values = np.load(manifest.root / member)["logits"]
            values[2] -= 100
            np.savez_compressed(manifest.root / member, logits=values)
    split = Split(calibration=("case_00",), validation=("case_01",))
    for solver in ("exact", "adam"):
        found = fit(manifest, method="cms_ap", split=split, solver=solver, trials=1, **FIXED)
        assert any("`tumour` saw no voxel and stays at identity" in text for text in found.info.warnings)


def test_the_adam_solver_comes_close_and_never_below(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=4, shape=(1, 12, 14))
    exact = fit(manifest, method="dc", **FIXED)
    adam = fit(manifest, method="dc", solver="adam", trials=2, **FIXED)
    assert adam.info.solver == "adam"
    assert exact.info.fit_nll - 1e-3 <= adam.info.fit_nll <= exact.info.fit_nll + 0.05
    assert adam.content == fit(manifest, method="dc", solver="adam", trials=2, **FIXED).content


def test_regions_get_one_binary_calibrator_each(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, regions=True, split=SPLIT)
    found = fit_many(manifest, ["ts", "cms_ap", "vs"], trials=2)
    for name, calibrator in found.items():
        assert isinstance(calibrator.calibrator, RegionCalibrator)
        assert [type(channel).name for channel in calibrator.calibrator.channels] == [name] * 2
        assert calibrator.info.regions
        assert calibrator.info.classes == ("organ", "lesion")
        assert calibrator.info.translation_invariant
    case = cases.load_case(manifest, manifest.cases[0], pooling="logits", device=torch.device("cpu"), with_labels=False)
    for name in ("ts", "cms_ap"):
        assert torch.equal(found[name].volume_probs(case) > 0.5, case.decision)


def test_each_region_is_fitted_on_its_own(tmp_path: Path) -> None:
    """The calibrator of a region is that of the binary problem posed as two classes."""
    manifest = write_ensemble(tmp_path, regions=True, n_cases=3, split={"calibration": [0, 1], "validation": [2]})
    found = fit(manifest, method="ts").calibrator
    assert isinstance(found, RegionCalibrator)
    for index in range(2):
        z, y = [], []
        for case in manifest.cases[:2]:
            data = cases.load_case(manifest, case, pooling="logits", device=torch.device("cpu"), with_labels=True)
            assert data.region_labels is not None
            z.append(data.logits[index].reshape(-1).double())
            y.append(data.region_labels[index].reshape(-1))
        odds, inside = torch.cat(z), torch.cat(y)
        temperature = float(found.channels[index].tensors()["temperature"][0])
        sign = torch.where(inside, 1.0, -1.0)
        below, at, above = (
            float(torch.nn.functional.softplus(-sign * odds / (factor * temperature)).mean())
            for factor in (0.99, 1.0, 1.01)
        )
        assert at < min(below, above)


def test_trials_are_kept_in_the_storage_file(manifest: Manifest, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    storage = tmp_path / "trials.log"

    def run(progress: Callable[[str, int, int], None] | None = None) -> bytes:
        return fit(manifest, method="ms_c", trials=3, storage=storage, progress=progress).content

    def tell(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    first = run(tell)
    assert [(done, total) for stage, done, total in told if stage == "tuning ms_c"] == [(1, 3), (2, 3), (3, 3)]
    assert ("calibration cases", 4, 4) in told
    told.clear()
    assert run(tell) == first
    assert not any(stage.startswith("tuning") for stage, _, _ in told)


def test_lambda_is_not_tuned_for_two_classes(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, regions=True, n_cases=4)
    found = fit(manifest, method="dc", trials=2)
    assert found.info.lambda_ == 0.0


def test_methods_that_want_different_samples_are_not_fitted_from_one(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path)
    settings = {"ts": PipelineSettings(method="ts", rows=5000), "dc": PipelineSettings(method="dc", rows=6000)}
    with pytest.raises(UsageError, match=r"differ in `rows` \(ts 5000, dc 6000\)"):
        fit_many(manifest, ["ts", "dc"], settings=settings, device="cpu")


@pytest.mark.parametrize(
    ("methods", "how", "way_out"),
    [
        (["ts", "dc"], {"full": True, "solver": "adam"}, r"ts \(solver adam\), dc .*Leave out --full, or"),
        (["ts"], {"polished": True, "solver": "adam"}, r"Leave out --polish, or fit with --solver exact\.$"),
        (["lts", "lts_ti"], {"full": True}, r"Leave out --full\.$"),
        (["identity"], {"polished": True}, r"Leave out --polish\.$"),
    ],
)
def test_reading_all_voxels_for_nothing_is_refused_before_anything_is_read(
    manifest: Manifest, methods: list[str], how: dict[str, Any], way_out: str, reads: list[str]
) -> None:
    with pytest.raises(UsageError, match=way_out):
        fit_many(manifest, methods, **how, **FIXED)
    assert reads == []


def test_ets_has_one_solver_whatever_is_asked_for(manifest: Manifest) -> None:
    asked, plain = (fit(manifest, method="ets", solver=solver, full=True) for solver in ("adam", None))
    assert asked.info.solver == "exact"
    assert asked.content == plain.content


def test_adam_says_that_full_means_nothing_to_it(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "AdamSettings", partial(methods.AdamSettings, max_epochs=20))
    both = fit_many(manifest, ["ts", "ets"], solver="adam", trials=1, full=True)
    said = {name: any("adam solver always stops" in text for text in f.info.warnings) for name, f in both.items()}
    assert said == {"ts": True, "ets": False}


def test_a_local_method_says_that_full_means_nothing_to_it(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path)
    both = fit_many(manifest, ["ts", "lts_ti"], trials=1, full=True, device="cpu")
    said = {name: any("always fitted on patches" in text for text in f.info.warnings) for name, f in both.items()}
    assert said == {"ts": False, "lts_ti": True}
