"""`--method auto`: the right method on data whose true map is known, the stated rule, and a reason that can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

import segcal.cases as cases
from segcal.calibrators import CALIBRATORS
from segcal.cases import load_case
from segcal.choosing import (
    FLIPPING,
    NEAR_TIE,
    PRESERVING,
    Candidate,
    candidate_methods,
    choose_calibrator,
    reason,
    simplest_of_the_best,
)
from segcal.errors import UsageError
from segcal.evaluation.run import evaluate
from segcal.evaluation.summary import BootstrapSettings
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest, Split
from segcal.settings import Choices, LogRange, PipelineSettings, SearchSpace
from segcal_cli.main import app
from tests.apply_data import CPU, make_fitted, write_member

Truth = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""(n, C) logits to (n, C) logits of the distribution the labels are drawn from."""
Choice = tuple[FittedCalibrator, tuple[Candidate, ...]]

SHAPE = (2, 40, 40)
FAST = SearchSpace(patience=Choices(choices=(3,)), learning_rate=LogRange(low=0.02, high=0.02))
QUICK: dict[str, Any] = {
    "settings": {"lts_ti": PipelineSettings(method="lts_ti", trials=1, max_patches=120, space=FAST)},
    "lambda_": 1e-4,
    "mu": 1e-4,
    "device": "cpu",
}


def tempered(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits / 2


def by_class(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Margins scaled by which class they belong to: cms_ap says it exactly, a temperature or ranks cannot."""
    return logits.max(1, keepdims=True) - (logits.max(1, keepdims=True) - logits) * np.array([0.25, 0.7, 1.8])


def biased(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """A class the network misses: only a method that changes decisions can repair it."""
    return logits + np.array([0.0, 4.0, 0.0])


def write_data(root: Path, truth: Truth, *, n_cases: int = 9, n_validation: int = 3, seed: int = 0) -> Manifest:
    """One member of independent voxels with three classes, labels drawn from `truth`, one given split."""
    rng = np.random.default_rng(seed)
    entries = []
    for k in range(n_cases):
        logits = rng.normal(0, 2.5, (3, *SHAPE)).astype(np.float32)
        rows = truth(logits.reshape(3, -1).T.astype(np.float64))
        labels = (rows + rng.gumbel(size=rows.shape)).argmax(1).reshape(SHAPE)
        entries.append(write_case(root, f"case_{k}", logits, labels))
    ids = [entry["id"] for entry in entries]
    n_calibration = n_cases - n_validation
    split = {"calibration": ids[:n_calibration], "validation": ids[n_calibration:]}
    content = {"version": 1, "name": "drawn", "kind": "logits", "classes": ["a", "b", "c"], "cases": entries}
    return Manifest.from_content(content | {"splits": [split]}, root / "manifest.yaml").save(root / "manifest.yaml")


def write_case(root: Path, name: str, logits: NDArray[np.float32], labels: NDArray[np.int64]) -> dict[str, Any]:
    write_member(root / f"member_0/{name}.npz", logits)
    (root / "labels").mkdir(exist_ok=True)
    write_nifti(root / f"labels/{name}.nii.gz", labels.astype(np.uint8), affine=np.eye(4))
    return {"id": name, "members": [f"member_0/{name}.npz"], "label": f"labels/{name}.nii.gz"}


@pytest.fixture(scope="module")
def pure_temperature(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_data(tmp_path_factory.mktemp("tempered"), tempered)


@pytest.fixture(scope="module")
def choice_of_temperature(pure_temperature: Manifest) -> Choice:
    return choose_calibrator(pure_temperature, **QUICK)


def made_up(method: str, value: float, n_parameters: int) -> Candidate:
    return Candidate(method, value, n_parameters, make_fitted(method))


def test_a_pure_temperature_is_answered_by_temperature_scaling(choice_of_temperature: Choice) -> None:
    chosen, candidates = choice_of_temperature

    assert chosen.info.method == "ts"
    assert float(chosen.calibrator.tensors()["temperature"]) == pytest.approx(2.0, rel=0.03)  # type: ignore[union-attr]
    # Simplicity decided: ets contains ts and comes out as good.
    best = min(one.value for one in candidates)
    assert {"ts", "ets"} <= {one.method for one in candidates if one.value <= best * (1 + NEAR_TIE)}
    assert [one.method for one in candidates] == list(PRESERVING)


def test_nll_is_measured_on_all_validation_voxels_for_every_candidate(
    pure_temperature: Manifest, choice_of_temperature: Choice
) -> None:
    _, candidates = choice_of_temperature
    for one in candidates:
        total, n_voxels = 0.0, 0
        for case_id in pure_temperature.splits[0].validation:
            case = load_case(
                pure_temperature, pure_temperature.case(case_id), pooling="logits", device=CPU, with_labels=True
            )
            assert case.labels is not None
            probs = one.fitted.volume_probs(case).double()
            total -= float(probs.gather(0, case.labels.unsqueeze(0)).log().sum())
            n_voxels += case.labels.numel()
        assert one.value == pytest.approx(total / n_voxels, rel=1e-9), one.method
    # The patches lts_ti was validated on are few here, and its own estimate is off by more than the methods differ.
    local = candidates[-1]
    assert local.method == "lts_ti"
    assert abs(local.fitted.info.validation_nll / local.value - 1) > NEAR_TIE  # type: ignore[operator]


def test_the_choice_is_recorded_and_the_reason_names_every_candidate(
    choice_of_temperature: Choice, tmp_path: Path
) -> None:
    chosen, candidates = choice_of_temperature
    chosen.save(tmp_path / "auto.safetensors")

    choice = load_calibrator(tmp_path / "auto.safetensors").info.choice
    assert choice is not None
    assert (choice["criterion"], choice["constraint"], choice["near_tie"]) == ("nll", "decision-preserving", NEAR_TIE)
    assert {name: one["value"] for name, one in choice["candidates"].items()} == {c.method: c.value for c in candidates}
    assert choice["candidates"]["ets"]["parameters"] == CALIBRATORS["ets"].parameter_counts(3)[1]
    for one in candidates:
        assert f"{one.method} {one.value:.6g}" in choice["reason"]
    assert choice["reason"].startswith("Of the methods that keep the segmentation, ts ")
    # The parameters are those of fitting the method by name; only the record differs.
    plain = next(one.fitted for one in candidates if one.method == "ts")
    assert plain.info.choice is None
    assert plain.info.model_copy(update={"choice": choice}) == chosen.info


def test_margins_scaled_by_class_are_answered_by_the_argmax_cone(tmp_path: Path) -> None:
    chosen, candidates = choose_calibrator(write_data(tmp_path, by_class), **QUICK)

    assert chosen.info.method == "cms_ap"
    assert "cms_ap has the lowest validation NLL" in chosen.info.choice["reason"]  # type: ignore[index]
    values = {one.method: one.value for one in candidates}
    assert all(values["cms_ap"] < 0.99 * value for name, value in values.items() if name != "cms_ap")


def test_methods_that_flip_are_chosen_only_when_allowed(tmp_path: Path) -> None:
    manifest = write_data(tmp_path, biased)

    kept, kept_candidates = choose_calibrator(manifest, **QUICK)
    free, free_candidates = choose_calibrator(manifest, allow_flips=True, **QUICK)

    assert kept.info.preserves is not None
    assert all(one.preserves for one in kept_candidates)
    assert free.info.method in FLIPPING
    assert free.info.preserves is None
    assert free.info.choice["constraint"] == "none"  # type: ignore[index]
    assert {one.method for one in free_candidates} == {*PRESERVING, *FLIPPING}
    # What keeping the decision costs here is in the table: the constraint, not the fit, made the difference.
    best_kept = min(one.value for one in kept_candidates)
    assert min(one.value for one in free_candidates) < 0.9 * best_kept


def test_boundary_error_is_that_of_an_explicit_evaluation(
    pure_temperature: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    original = cases.read_member

    def counted(path: Path, **options: Any) -> object:
        reads[path.stem] += 1
        return original(path, **options)

    monkeypatch.setattr(cases, "read_member", counted)
    chosen, candidates = choose_calibrator(pure_temperature, criterion="ba_ece", **QUICK)
    validation = pure_temperature.splits[0].validation
    # Once for all fits; the validation cases once more for all candidates.
    assert reads == Counter(
        {case: 2 if case in validation else 1 for case in (*pure_temperature.splits[0].calibration, *validation)}
    )

    named = {one.method: one.fitted for one in candidates}
    found = evaluate(
        pure_temperature, named, cases=validation, bootstrap=BootstrapSettings(n_replicates=10), device="cpu"
    )
    explicit = {p["name"]: p["metrics"]["ba_ece"]["mean"] for p in found.summary["pipelines"]}
    for one in candidates:
        assert one.value == pytest.approx(explicit[one.method], rel=1e-12)
        assert one.value != one.fitted.info.validation_nll
    assert len({one.value for one in candidates}) > 1
    assert chosen.info.method == simplest_of_the_best(candidates).method
    assert chosen.info.choice["criterion"] == "ba_ece"  # type: ignore[index]
    assert "validation BA-ECE" in chosen.info.choice["reason"]  # type: ignore[index]


def test_regions_are_binary_so_the_two_cones_are_one_candidate(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    entries = []
    for k in range(4):
        log_odds = rng.normal(0, 3, (2, *SHAPE)).astype(np.float32)
        inside = rng.logistic(size=(2, *SHAPE)) < log_odds / 2
        # Two disjoint regions cannot be drawn independently: label 1 is region one alone, 2 both, 3 region two alone.
        labels = np.select([inside[0] & inside[1], inside[0], inside[1]], [2, 1, 3], 0)
        entries.append(write_case(tmp_path, f"case_{k}", log_odds, labels))
    content = {
        "version": 1,
        "name": "regions",
        "kind": "logits",
        "regions": [{"name": "one", "labels": [1, 2]}, {"name": "two", "labels": [2, 3]}],
        "regions_class_order": [1, 3],
        "cases": entries,
        "splits": [{"calibration": ["case_0", "case_1"], "validation": ["case_2", "case_3"]}],
    }
    manifest = Manifest.from_content(content, tmp_path / "manifest.yaml")

    assert "cms_op" not in candidate_methods(manifest, allow_flips=True)
    chosen, candidates = choose_calibrator(manifest, **QUICK)
    assert chosen.info.method == "ts"
    assert {one.method: one.n_parameters for one in candidates}["ts"] == 2
    assert [one.method for one in candidates] == ["ts", "ets", "cms_ap", "lts_ti"]


def test_a_near_tie_goes_to_fewer_parameters_and_a_clear_lead_does_not() -> None:
    ts, cms = made_up("ts", 1.0009, 1), made_up("cms_ap", 1.0, 18)
    assert simplest_of_the_best([ts, cms]) is ts
    assert simplest_of_the_best([replace(ts, value=1.0011), cms]) is cms
    # As many parameters: the lower value; the same value too: the one listed first.
    op = made_up("cms_op", 1.0005, 18)
    assert simplest_of_the_best([op, cms]) is cms
    assert simplest_of_the_best([replace(op, value=1.0), cms]).method == "cms_op"


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 500)), min_size=1, max_size=8))
def test_what_is_chosen_is_never_more_than_the_tolerance_above_the_best(drawn: list[tuple[float, int]]) -> None:
    candidates = [made_up("ts", value, n_parameters) for value, n_parameters in drawn]
    chosen = simplest_of_the_best(candidates)
    best = min(candidates, key=lambda one: one.value)
    assert chosen.value <= best.value * (1 + NEAR_TIE)
    assert chosen.n_parameters <= best.n_parameters


def test_the_reason_tells_a_near_tie_from_the_best() -> None:
    ts, cms = made_up("ts", 1.0005, 1), made_up("cms_ap", 1.0, 18)
    assert reason(ts, [ts, cms], "nll", allow_flips=False) == (
        "Of the methods that keep the segmentation, ts is within 0.1 % of the lowest validation NLL (0.05 % above "
        "cms_ap) with fewer parameters (1 against 18): ts 1.0005, cms_ap 1."
    )
    assert reason(cms, [cms], "ba_ece", allow_flips=True) == (
        "Of the methods, cms_ap has the lowest validation BA-ECE: cms_ap 1."
    )


def test_without_validation_cases_there_is_nothing_to_choose_by(pure_temperature: Manifest) -> None:
    only = Split(calibration=pure_temperature.splits[0].calibration)
    with pytest.raises(UsageError, match="`auto` chooses by validation cases, but the split has none"):
        choose_calibrator(pure_temperature, split=only, **QUICK)


def test_one_labelled_case_cannot_be_divided(pure_temperature: Manifest) -> None:
    content = pure_temperature.model_dump(mode="json", exclude_none=True)
    content = {**content, "cases": content["cases"][:1], "splits": []}
    manifest = Manifest.from_content(content, pure_temperature.path)
    with pytest.raises(UsageError, match="of 1 labelled subject none is to spare"):
        choose_calibrator(manifest, **QUICK)


def segcal(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_the_candidates_and_the_reason(tmp_path: Path) -> None:
    write_data(tmp_path, tempered, n_cases=3, n_validation=1)
    out = tmp_path / "auto.safetensors"
    command = ("fit", tmp_path / "manifest.yaml", "--method", "auto", "--out", out, "--device", "cpu")

    result = segcal(*command, "--trials", 1, "--lambda", "1e-3", "--mu", "1e-3", "--criterion", "ba_ece")

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    table = [line.split() for line in lines[1 : 1 + len(PRESERVING)]]
    assert [row[0] for row in table] == list(PRESERVING)
    info = load_calibrator(out).info
    assert [row[0] for row in table if row[-1] == "chosen"] == [info.method]
    assert info.choice is not None
    assert info.choice["criterion"] == "ba_ece"
    assert info.choice["reason"] in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "auto", "--method", "ts"), "leave out ts"),
        (("--method", "auto", "--config", "cms_ap"), "leave out cms_ap"),
        (("--method", "ts", "--criterion", "nll"), "--criterion only means something with --method auto"),
        (("--method", "ts", "--allow-flips"), "--allow-flips only means something with --method auto"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = segcal("fit", tmp_path / "manifest.yaml", *arguments, "--out", tmp_path / "x.safetensors")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
