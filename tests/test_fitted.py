"""Calibrator files: they load as they were saved, or are refused with a reason of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_safetensors

from segcal.calibrator_info import FORMAT, CalibratorInfo
from segcal.calibrators.temperature import TemperatureScaling
from segcal.errors import FileFormatError, MismatchError, MissingFileError, OutputError, ParameterError
from segcal.fitted import MAX_FILE_BYTES, FittedCalibrator, load_calibrator
from segcal.manifest import Manifest
from segcal.regions import RegionCalibrator
from segcal.types import Box, Kind, Pooling
from tests.apply_data import CLASSES, drawn_case, make_fitted, random_logits

GOLDEN = Path(__file__).parent / "golden"

DESIGNED = [
    "format",
    "method",
    "solver",
    "classes",
    "pooling",
    "kind",
    "translation_invariant",
    "preserves",
    "lambda",
    "mu",
    "fit_nll",
    "validation_nll",
    "manifest_sha256",
    "n_members",
    "prediction",
    "reference_statistics",
    "versions",
    "seed",
    "warnings",
]


def manifest_of(
    *, classes: tuple[str, ...] | None = CLASSES, kind: Kind = "logits", n_members: int = 2, **keys: Any
) -> Manifest:
    """A manifest in memory; nothing of it is opened."""
    content: dict[str, Any] = {
        "version": 1,
        "name": "data",
        "kind": kind,
        "cases": [{"id": "a", "members": [f"m{k}/a.npz" for k in range(n_members)]}],
        **keys,
    }
    if classes is not None:
        content["classes"] = list(classes)
    return Manifest.from_content(content, "manifest.yaml")


@pytest.fixture
def cms_ap() -> FittedCalibrator:
    rng = np.random.default_rng(0)
    return make_fitted("cms_ap", {"A": rng.exponential(1, (3, 2, 2)), "beta": rng.exponential(1, (3, 2))})


# Golden files: a calibrator of format 1 and probabilities that were computed from its formula by plain loops.


def test_a_file_of_format_1_still_gives_the_stored_probabilities() -> None:
    calibrator = load_calibrator(GOLDEN / "cms_ap_v1.safetensors")
    stored = np.load(GOLDEN / "cms_ap_v1.npz")
    found = calibrator.probabilities(stored["logits"].astype(np.float64), class_axis=0)
    np.testing.assert_allclose(found, stored["probabilities"], rtol=0, atol=1e-12)
    as_float32 = calibrator.probabilities(stored["logits"], class_axis=0)
    assert as_float32.dtype == np.float32
    np.testing.assert_allclose(as_float32, stored["probabilities"], rtol=0, atol=2e-6)
    assert (as_float32.argmax(0) == stored["logits"].argmax(0)).all()


def test_a_file_of_format_1_keeps_its_metadata() -> None:
    info = load_calibrator(GOLDEN / "cms_ap_v1.safetensors").info
    assert (info.format, info.method, info.preserves) == ("segcal-calibrator-1", "cms_ap", "argmax")
    assert (info.lambda_, info.mu, info.fit_nll, info.validation_nll) == (1e-3, 5e-4, 0.041, 0.043)
    assert info.prediction == {"mirroring": False, "step_size": 0.5, "folds": [0, 1, 2, 3, 4]}
    assert info.reference_statistics["free_energy_mean"] == (7.5, 8.25)


def test_metadata_is_one_sorted_json_object_without_a_date(cms_ap: FittedCalibrator) -> None:
    text = cms_ap.info.to_json()
    values = json.loads(text)
    assert text == json.dumps(values, sort_keys=True, separators=(",", ":"))
    assert set(values) >= set(DESIGNED)
    assert not any(word in name for name in values for word in ("date", "time", "host", "path"))


def test_saving_twice_gives_the_same_bytes(cms_ap: FittedCalibrator, tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    cms_ap.save(first)
    load_calibrator(first).save(second)
    assert first.read_bytes() == second.read_bytes() == cms_ap.content
    assert load_calibrator(second).sha256 == cms_ap.sha256
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_a_file_that_cannot_be_written_is_an_error_of_ours(cms_ap: FittedCalibrator, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(OutputError, match="file"):
        cms_ap.save(blocked / "a.safetensors")
    assert list(tmp_path.iterdir()) == [blocked]


# What load_calibrator refuses.


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such calibrator file"):
        load_calibrator(tmp_path / "nothing.safetensors")
    with pytest.raises(MissingFileError, match="no such calibrator file"):
        load_calibrator(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a calibrator at all\n", b"\x00" * 64, b"PK\x03\x04" * 20])
def test_a_file_that_is_not_safetensors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"a\.safetensors: not a calibrator file, or .* before the manifest"):
        load_calibrator(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2, 0.5, 0.9, 0.999])
def test_a_truncated_file(cms_ap: FittedCalibrator, share: float, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(cms_ap.content[: int(share * len(cms_ap.content))])
    with pytest.raises(FileFormatError, match="not a calibrator file, or truncated"):
        load_calibrator(path)


def test_a_file_with_a_byte_too_many(cms_ap: FittedCalibrator, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(cms_ap.content + b"\0")
    with pytest.raises(FileFormatError, match=r"a\.safetensors: not a calibrator file"):
        load_calibrator(path)


def test_a_huge_file_is_not_even_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse: takes no room on disk
    with pytest.raises(FileFormatError, match="1,073,741,825 bytes is far too large"):
        load_calibrator(path)


def test_a_safetensors_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    for metadata in (None, {"format": "pt"}):
        path.write_bytes(save_safetensors({"weight": torch.zeros(3)}, metadata=metadata))
        with pytest.raises(FileFormatError, match=r"not a calibrator.*metadata lacks `segcal`.*segcal fit"):
            load_calibrator(path)


def with_metadata(path: Path, text: str, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    own = {"temperature": torch.tensor([1.5], dtype=torch.float64)} if tensors is None else tensors
    path.write_bytes(save_safetensors(own, metadata={"segcal": text}))
    return path


def changed(**changes: object) -> str:
    """Metadata of a temperature with some fields replaced; None takes a field away."""
    values = {**json.loads(make_fitted("ts").info.to_json()), **changes}
    return json.dumps({name: value for name, value in values.items() if value is not ...})


@pytest.mark.parametrize("version", ["segcal-calibrator-2", "segcal-calibrator-0", 1, None, ...])
def test_an_unknown_format_version(version: object, tmp_path: Path) -> None:
    path = with_metadata(tmp_path / "a.safetensors", changed(format=version))
    with pytest.raises(FileFormatError, match=f"a.safetensors: calibrator format .* unknown here.*{FORMAT}.*fit again"):
        load_calibrator(path)


@pytest.mark.parametrize("text", ["", "{", "not json", "[" * 100_000, "9" * 5000])
def test_metadata_that_is_not_json(text: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"a\.safetensors: the calibrator's metadata is not readable as JSON"):
        load_calibrator(with_metadata(tmp_path / "a.safetensors", text))


@pytest.mark.parametrize("text", ["[]", "3", '"segcal-calibrator-1"'])
def test_metadata_that_is_no_object(text: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="format None is unknown"):
        load_calibrator(with_metadata(tmp_path / "a.safetensors", text))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pooling": "votes"}, "pooling"),
        ({"kind": ...}, "kind"),
        ({"preserves": "everything"}, "preserves"),
        ({"classes": "abc"}, "classes"),
        ({"seed": "zero"}, "seed"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_metadata_with_a_wrong_field(changes: dict[str, object], field: str, tmp_path: Path) -> None:
    path = with_metadata(tmp_path / "a.safetensors", changed(**changes))
    with pytest.raises(FileFormatError, match=f"a.safetensors: metadata field `{field}"):
        load_calibrator(path)


def test_a_method_of_the_future(tmp_path: Path) -> None:
    path = with_metadata(tmp_path / "a.safetensors", changed(method="magic"))
    with pytest.raises(FileFormatError, match="method `magic` is unknown here; known are identity, ts"):
        load_calibrator(path)


def test_parameters_that_do_not_belong_to_the_method(tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, torch.Tensor]]] = [
        ("`temperature` is missing", {"T": torch.ones(1)}),
        ("`temperature` has shape", {"temperature": torch.ones(2)}),
        ("temperature must be positive", {"temperature": torch.tensor([-1.0])}),
        ("not finite", {"temperature": torch.tensor([torch.nan])}),
    ]
    for message, tensors in wrong:
        with pytest.raises(FileFormatError, match=message):
            load_calibrator(with_metadata(tmp_path / "a.safetensors", changed(), tensors))


def test_parameters_that_single_precision_cannot_multiply(tmp_path: Path) -> None:
    tensors = make_fitted("cms_ap").calibrator.tensors()  # type: ignore[union-attr]
    tensors = {"A": tensors["A"] * 1e308, "beta": tensors["beta"]}
    path = with_metadata(tmp_path / "a.safetensors", make_fitted("cms_ap").info.to_json(), tensors)
    with pytest.raises(FileFormatError, match=r"`A` holds values up to 1e\+308, expected at most 1e\+30"):
        load_calibrator(path)


@pytest.mark.parametrize(
    ("field", "value"), [("fit_nll", "1e999"), ("reference_statistics", '{"free_energy_mean": [NaN]}')]
)
def test_metadata_with_a_number_that_is_not_finite(field: str, value: str, tmp_path: Path) -> None:
    path = with_metadata(tmp_path / "a.safetensors", changed(**{field: "PLACE"}).replace('"PLACE"', value))
    with pytest.raises(FileFormatError, match=r"a\.safetensors: the metadata hold a number that is not finite"):
        load_calibrator(path)


@pytest.mark.parametrize(
    ("method", "field", "declared", "really"),
    [
        ("cms_ap", "preserves", None, "'argmax'"),
        ("cms_ap", "preserves", "order", "'argmax'"),
        ("dc", "preserves", "argmax", "None"),
        ("ms", "translation_invariant", True, "False"),
        ("dc", "translation_invariant", False, "True"),
    ],
)
def test_metadata_that_promise_what_the_method_does_not(
    method: str, field: str, declared: object, really: str, tmp_path: Path
) -> None:
    fitted = make_fitted(method)
    altered = FittedCalibrator(fitted.calibrator, fitted.info.model_copy(update={field: declared}))
    altered.save(tmp_path / "a.safetensors")
    with pytest.raises(FileFormatError, match=rf"metadata field `{field}` is {declared!r}, but {method}.* is {really}"):
        load_calibrator(tmp_path / "a.safetensors")


def test_parameters_for_another_number_of_classes(tmp_path: Path) -> None:
    tensors = make_fitted("dc", classes=("a", "b", "c", "d")).calibrator.tensors()  # type: ignore[union-attr]
    text = make_fitted("dc", classes=("a", "b", "c")).info.to_json()
    with pytest.raises(FileFormatError, match="parameters for 4 classes, but the metadata names 3"):
        load_calibrator(with_metadata(tmp_path / "a.safetensors", text, tensors))


# What belongs together.


def test_the_data_it_was_fitted_for_are_accepted_without_a_word(cms_ap: FittedCalibrator) -> None:
    assert cms_ap.check_compatible(manifest_of(), "logits") == []


def test_another_number_of_classes(cms_ap: FittedCalibrator) -> None:
    with pytest.raises(
        MismatchError, match=r"number of classes differs.*3 \(background.*names 2 \(background, liver\)"
    ):
        cms_ap.check_compatible(manifest_of(classes=("background", "liver")), "logits")


def test_other_names_of_classes(cms_ap: FittedCalibrator) -> None:
    for names in (("background", "tumour", "liver"), ("background", "Liver", "tumour")):
        with pytest.raises(MismatchError, match=r"names of classes differ.*background, liver, tumour.*rename"):
            cms_ap.check_compatible(manifest_of(classes=names), "logits")


def test_regions_instead_of_classes(cms_ap: FittedCalibrator) -> None:
    regions = [{"name": name, "labels": [k + 1]} for k, name in enumerate(CLASSES)]
    manifest = manifest_of(classes=None, regions=regions, regions_class_order=[1, 2, 3])
    with pytest.raises(MismatchError, match=r"fitted for classes, the manifest names regions"):
        cms_ap.check_compatible(manifest, "logits")
    with pytest.raises(MismatchError, match=r"fitted for regions, the manifest names classes"):
        make_fitted("ts", regions=True).check_compatible(manifest_of(), "logits")


@pytest.mark.parametrize("pooling", ["logits", "probabilities"])
def test_another_pooling(pooling: Pooling) -> None:
    other: Pooling = "probabilities" if pooling == "logits" else "logits"
    fitted = make_fitted("cms_ap", pooling=pooling)
    with pytest.raises(MismatchError, match=rf"pooling differs.*fitted on pooled {pooling}.*--pooling {other}"):
        fitted.check_compatible(manifest_of(), other)
    assert fitted.check_compatible(manifest_of(), pooling) == []


def test_one_member_needs_no_pooling() -> None:
    """The two poolings of one member differ by a shift only, which an invariant calibrator does not see."""
    assert make_fitted("cms_ap").check_compatible(manifest_of(n_members=1), "probabilities") == []
    with pytest.raises(MismatchError, match="pooling differs"):
        make_fitted("ms").check_compatible(manifest_of(n_members=1), "probabilities")


@pytest.mark.parametrize("method", ["vs", "ms", "lts"])
def test_a_shift_that_pooling_took_away_in_the_fit_is_not_given_to_a_map_that_sees_it(method: str) -> None:
    fitted = make_fitted(method, pooling="probabilities")
    assert fitted.info.translation_invariant
    with pytest.raises(MismatchError, match=rf"pooling differs.*{method}.*Pool by probabilities"):
        fitted.check_compatible(manifest_of(n_members=1), "logits")


def test_log_odds_of_one_member_have_no_shift_to_see() -> None:
    regions = [{"name": name, "labels": [k + 1]} for k, name in enumerate(CLASSES)]
    manifest = manifest_of(n_members=1, classes=None, regions=regions, regions_class_order=[1, 2, 3])
    assert make_fitted("vs", regions=True, pooling="probabilities").check_compatible(manifest, "logits") == []


@pytest.mark.parametrize("method", ["vs", "ms", "lts"])
def test_a_shift_sensitive_method_on_the_other_kind(method: str) -> None:
    fitted, other = make_fitted(method), manifest_of(kind="probabilities")
    with pytest.raises(MismatchError, match=rf"kind differs: {method}.*not translation-invariant.*--force"):
        fitted.check_compatible(other, "logits")
    (warning,) = fitted.check_compatible(other, "logits", force=True)
    assert "because of --force" in warning
    assert make_fitted(method, pooling="probabilities").check_compatible(other, "probabilities") == []


def test_an_invariant_method_on_the_other_kind_is_welcome(cms_ap: FittedCalibrator) -> None:
    assert cms_ap.check_compatible(manifest_of(kind="probabilities"), "logits") == []


def test_force_does_not_mend_what_is_wrong(cms_ap: FittedCalibrator) -> None:
    for manifest, pooling in ((manifest_of(), "probabilities"), (manifest_of(classes=("a", "b", "c")), "logits")):
        with pytest.raises(MismatchError):
            cms_ap.check_compatible(manifest, pooling, force=True)  # type: ignore[arg-type]


def test_another_way_of_predicting_is_warned_about(cms_ap: FittedCalibrator) -> None:
    info = cms_ap.info.model_copy(update={"prediction": {"mirroring": False, "step_size": 0.5, "folds": [0, 1]}})
    fitted = FittedCalibrator(cms_ap.calibrator, info)
    same = {"mirroring": False, "step_size": 0.5, "folds": [0, 1]}
    assert fitted.check_compatible(manifest_of(prediction=same), "logits") == []
    warnings = fitted.check_compatible(manifest_of(prediction={**same, "mirroring": True, "step_size": 0.9}), "logits")
    assert [text.split(" differs")[0] for text in warnings] == ["prediction.mirroring", "prediction.step_size"]
    assert "fitted with 0.5, applied with 0.9" in warnings[1]
    assert fitted.check_compatible(manifest_of(), "logits") == []  # nothing known, nothing to compare


def test_a_calibrator_of_single_models_may_be_applied_to_each_member(cms_ap: FittedCalibrator) -> None:
    def fitted_on(n_members: int | None, pooling: Pooling = "logits") -> FittedCalibrator:
        info = cms_ap.info.model_copy(update={"n_members": n_members, "pooling": pooling})
        return FittedCalibrator(cms_ap.calibrator, info)

    for pooling in ("logits", "probabilities"):
        assert fitted_on(1, pooling).check_compatible(manifest_of(), "members-probabilities") == []  # type: ignore[arg-type]
    for n_members in (3, None):
        warnings = fitted_on(n_members).check_compatible(manifest_of(), "members-probabilities")
        assert ["applied to each member alone" in text for text in warnings] == [True]
        with pytest.raises(MismatchError, match=r"pooling differs.*single models"):
            fitted_on(n_members, "probabilities").check_compatible(manifest_of(), "members-probabilities")


@pytest.mark.parametrize(("key", "value"), [("mirroring", True), ("step_size", 0.9), ("folds", [0, 1, 2])])
def test_every_way_of_predicting_is_compared_by_itself(key: str, value: object, cms_ap: FittedCalibrator) -> None:
    same = {"mirroring": False, "step_size": 0.5, "folds": [0, 1]}
    fitted = FittedCalibrator(cms_ap.calibrator, cms_ap.info.model_copy(update={"prediction": same}))
    for pooling in ("logits", "members-probabilities"):
        warnings = fitted.check_compatible(manifest_of(prediction={**same, key: value}), pooling)  # type: ignore[arg-type]
        assert [text for text in warnings if text.startswith("prediction.")] == [
            f"prediction.{key} differs: fitted with {same[key]}, applied with {value}; calibration may not carry over"
        ]


# Region models.


@pytest.fixture
def regional() -> FittedCalibrator:
    channels = (TemperatureScaling(2.0), TemperatureScaling(0.5), TemperatureScaling(1.0))
    info = make_fitted("ts", regions=True).info
    return FittedCalibrator(RegionCalibrator(channels), info)


def test_regions_survive_the_file(regional: FittedCalibrator, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    regional.save(path)
    loaded = load_calibrator(path)
    assert loaded.calibrator == regional.calibrator
    assert loaded.info == regional.info
    assert loaded.content == regional.content


def test_regions_are_calibrated_one_by_one(regional: FittedCalibrator) -> None:
    log_odds = random_logits(0)
    expected = np.stack([1 / (1 + np.exp(-log_odds[k] / t)) for k, t in enumerate((2.0, 0.5, 1.0))])
    found = regional.probabilities(log_odds, class_axis=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    moved = regional.probabilities(torch.tensor(log_odds).movedim(0, -1), class_axis=-1)
    assert isinstance(moved, torch.Tensor)
    np.testing.assert_array_equal(moved.movedim(-1, 0).numpy(), found)
    deployed = (log_odds > 0) ^ (np.abs(log_odds) < 1e-2)
    assert ((regional.probabilities(log_odds, class_axis=0, decision=deployed) > 0.5) == deployed).all()


@pytest.mark.parametrize("crop", [None, ((1, 6), (0, 9), (2, 10))])
def test_both_probabilities_of_a_region_are_those_of_the_map(regional: FittedCalibrator, crop: Box | None) -> None:
    case = drawn_case(crop)
    log_odds = 10 * case.logits  # some p round to 1
    case = replace(case, logits=log_odds, decision=log_odds > 0)
    outside, inside = regional.region_pairs(case).unbind(1)
    assert torch.equal(inside, regional.volume_probs(case))
    assert torch.equal(inside > outside, inside > 0.5)
    exact = torch.sigmoid(-log_odds.double() / torch.tensor([2.0, 0.5, 1.0])[:, None, None, None])
    if case.inside is not None:
        exact[:, ~case.inside] = 1.0
    assert float(inside.max()) == 1.0
    torch.testing.assert_close(outside.double(), exact, rtol=1e-5, atol=1e-30)


def test_wrong_input_of_regions_is_refused(regional: FittedCalibrator) -> None:
    log_odds = random_logits(0)
    with pytest.raises(ParameterError, match=r"regions background, liver, tumour; expected log-odds"):
        regional.probabilities(log_odds, class_axis=1)
    with pytest.raises(ParameterError, match="floating point"):
        regional.probabilities(log_odds.astype(np.int64), class_axis=0)
    with pytest.raises(ParameterError, match=r"one truth value per region and voxel.*\(3, 4, 5, 6\); got \(4, 5, 6\)"):
        regional.probabilities(log_odds, class_axis=0, decision=log_odds.argmax(0))


def test_info_refuses_unknown_fields_and_is_frozen() -> None:
    info = make_fitted("ts").info
    with pytest.raises(ValueError, match="frozen"):
        info.seed = 3
    with pytest.raises(ValueError, match="extra"):
        CalibratorInfo.model_validate({**info.model_dump(), "surprise": 1})


def test_another_number_of_members_is_a_warning(cms_ap: FittedCalibrator) -> None:
    here = manifest_of()
    for fitted_on, n_warnings in ((None, 0), (here.n_members, 0), (here.n_members + 2, 1)):
        info = cms_ap.info.model_copy(update={"n_members": fitted_on})
        warnings = FittedCalibrator(cms_ap.calibrator, info).check_compatible(here, "logits")
        assert len(warnings) == n_warnings
    assert "number of members differs" in warnings[0]
