"""QA of a batch: from folders and manifests to flags, tables and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from segcal.apply import apply_calibrator
from segcal.applying.stored import MapFormat, StorageType
from segcal.errors import FileFormatError, MismatchError, MissingFileError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.metrics.base import Undefined
from segcal.qa import QaResult, QaSettings, run_qa
from segcal.qa.boundary import NO_BOUNDARY, boundary_zone, mean_in_zone
from segcal.qa.case import QaCase, QaMaps, measure
from segcal.qa.outlyingness import NO_LOGITS
from tests.apply_data import CLASSES, CPU, STORAGE, make_fitted, rotated, temperature, write_manifest, write_member
from tests.fit_data import write_ensemble
from tests.qa.batches import REGION_KEYS, blob, labelled, remembering

QUIET = QaSettings(
    min_expected_dsc=None,
    min_class_expected_dsc=None,
    max_volume_gap=None,
    missed_class_voxels=None,
    min_boundary_confidence=None,
    max_disagreement=None,
    min_member_dice=None,
    max_volume_variation=None,
    max_outlyingness=None,
    max_pictures=0,
)
SURE = {"good": [blob(0), blob(1)], "poor": [blob(2, sharp=0.1, noise=1.0), blob(3, sharp=0.1, noise=1.0)]}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path, SURE, affine=rotated())


def applied(manifest: Manifest, fitted: FittedCalibrator, name: str = "applied", **how: Any) -> Path:
    out = manifest.root / name
    apply_calibrator(fitted, manifest, out, device=CPU, **how)
    return out


def look(source: Path | Manifest, **how: Any) -> QaResult:
    """The shipped thresholds, without drawing."""
    return run_qa(source, settings=QaSettings(max_pictures=0), **how)


def case_of(result: QaResult, case_id: str) -> QaCase:
    return next(each.case for each in result.cases if each.case.case_id == case_id)


@pytest.mark.parametrize(("format", "dtype"), STORAGE)
def test_a_folder_gives_the_numbers_of_its_manifest(manifest: Manifest, format: MapFormat, dtype: StorageType) -> None:
    fitted = temperature(1.5)
    folder = applied(manifest, fitted, format=format, dtype=dtype)
    from_folder = look(folder, calibrator=fitted)
    from_manifest = look(manifest, calibrator=fitted)
    tolerance = {"float32": 1e-6, "float16": 2e-3, "uint16": 2e-3}[dtype]
    for case_id in SURE:
        one, other = case_of(from_folder, case_id), case_of(from_manifest, case_id)
        assert one.expected_dsc == pytest.approx(other.expected_dsc, abs=tolerance)
        assert one.boundary_confidence == pytest.approx(other.boundary_confidence, abs=tolerance)
        assert [c.sums.hard for c in one.classes] == [c.sums.hard for c in other.classes]
        assert [c.name for c in one.classes] == [c.name for c in other.classes] == list(CLASSES[1:])
        assert one.voxel_ml == pytest.approx(0.8 * 1.1 * 2.5 / 1000, rel=1e-5)
        assert isinstance(one.member_dice, Undefined)
        assert set(one.outlyingness.values()) == {NO_LOGITS}
        assert not isinstance(other.member_dice, Undefined)


def test_numbers_of_a_case_are_those_computed_by_hand(manifest: Manifest) -> None:
    found = case_of(look(manifest, calibrator=temperature(2.0)), "poor")
    pooled = np.mean([values.astype(np.float64) for values in SURE["poor"]], axis=0)
    probs = np.exp(pooled / 2) / np.exp(pooled / 2).sum(0)
    decision = pooled.argmax(0)
    near = np.zeros(decision.shape, dtype=bool)
    edge = [
        v
        for v in np.ndindex(decision.shape)
        for axis in range(3)
        for step in (-1, 1)
        if 0 <= v[axis] + step < decision.shape[axis]
        and decision[(*v[:axis], v[axis] + step, *v[axis + 1 :])] != decision[v]
    ]
    points = np.array(sorted(set(edge)))
    for v in np.ndindex(decision.shape):
        near[v] = np.min(((points - v) ** 2).sum(1)) < 9
    expected = [2 * probs[c][decision == c].sum() / ((decision == c).sum() + probs[c].sum()) for c in (1, 2)]
    assert found.expected_dsc == pytest.approx(np.mean(expected), rel=1e-5)
    assert found.boundary_confidence == pytest.approx(probs.max(0)[near].mean(), rel=1e-5)
    disagree = (SURE["poor"][0].argmax(0) != SURE["poor"][1].argmax(0))[near].mean()
    assert found.disagreement == pytest.approx(disagree, rel=1e-9)


def test_no_label_is_read(tmp_path: Path) -> None:
    manifest = labelled(tmp_path, SURE)
    (tmp_path / "label.nii.gz").unlink()
    result = look(manifest, calibrator=temperature(1.0))
    assert not result.failed


def test_the_worst_come_first_and_flags_say_why(manifest: Manifest) -> None:
    result = look(manifest, calibrator=temperature(1.0))
    assert [each.case.case_id for each in result.cases] == ["poor", "good"]
    codes = {flag.code for flag in result.cases[0].flags}
    assert {"low_expected_dsc", "unsure_boundary", "low_member_dice", "members_disagree", "low_class_dsc"} <= codes


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"min_expected_dsc": 1.0}, "low_expected_dsc"),
        ({"min_class_expected_dsc": 1.0}, "low_class_dsc"),
        ({"max_volume_gap": 0.0}, "volume_gap"),
        ({"min_boundary_confidence": 1.0}, "unsure_boundary"),
        ({"max_disagreement": 0.0}, "members_disagree"),
        ({"min_member_dice": 1.0}, "low_member_dice"),
        ({"max_volume_variation": 0.0}, "volume_spread"),
        ({"max_outlyingness": 0.0}, "unusual_free_energy_mean"),
    ],
)
def test_every_threshold_has_its_flag_and_null_switches_it_off(
    manifest: Manifest, change: dict[str, float], code: str
) -> None:
    fitted = remembering(temperature(1.0), free_energy_mean=[1.0, 2.0, 3.0, 4.0, 5.0])
    assert not run_qa(manifest, calibrator=fitted, settings=QUIET).flagged
    flags = run_qa(manifest, calibrator=fitted, settings=QUIET.changed(**change), cases=["poor"]).cases[0].flags
    assert {flag.code for flag in flags} == {code}


def test_a_class_that_is_missed_is_flagged_and_has_no_dice(tmp_path: Path) -> None:
    values = blob(0)
    values[2] = values[:2].max(0) - 0.1
    result = look(write_manifest(tmp_path, {"a": [values]}), calibrator=temperature(1.0))
    (each,) = result.cases
    assert "missed_class" in {flag.code for flag in each.flags}
    assert each.numbers["volume_voxels:tumour"] == 0.0
    assert isinstance(each.numbers["expected_dsc:tumour"], Undefined)
    assert each.case.expected_dsc == each.numbers["expected_dsc:liver"]


def test_an_empty_segmentation_is_flagged_and_undefined(tmp_path: Path) -> None:
    values = np.zeros((3, 4, 5, 6), dtype=np.float32)
    values[0] = 20
    result = look(write_manifest(tmp_path, {"a": [values, values]}), calibrator=temperature(1.0))
    (each,) = result.cases
    assert {flag.code for flag in each.flags} == {"nothing_segmented"}
    for name in ("expected_dsc", "boundary_confidence", "member_dice", "disagreement"):
        assert isinstance(each.numbers[name], Undefined), name


def test_methods_that_move_labels_are_judged_by_the_segmentation_they_write(manifest: Manifest) -> None:
    vs = make_fitted("vs", {"a": np.array([1.0, 1.0, 1.0]), "b": np.array([0.0, 0.0, 9.0])})
    folder = applied(manifest, vs)
    written = np.asarray(nib.load(folder / "good.nii.gz").dataobj)
    assert (np.mean(SURE["good"], axis=0).argmax(0) != written.T).any(), "the method moves no label; nothing is shown"
    for source in (manifest, folder):
        found = case_of(look(source, calibrator=vs), "good")
        assert [c.sums.hard for c in found.classes] == [int((written == c).sum()) for c in (1, 2)]


def test_regions_keep_their_own_masks(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, SURE, affine=rotated(), **REGION_KEYS)
    fitted = make_fitted("ts", classes=("whole", "core", "rest"), regions=True)
    pooled = np.mean(SURE["good"], axis=0)
    folder = applied(manifest, fitted)
    for source in (manifest, folder):
        found = case_of(look(source, calibrator=fitted), "good")
        assert [c.name for c in found.classes] == ["whole", "core", "rest"]
        probs = 1 / (1 + np.exp(-pooled.astype(np.float64)))
        for region, each in enumerate(found.classes):
            p, mask = probs[region], pooled[region] > 0
            assert each.sums.hard == int(mask.sum())
            assert each.sums.expected_dsc == pytest.approx(2 * p[mask].sum() / (mask.sum() + p.sum()), rel=1e-5)
    assert [c.name for c in case_of(look(folder), "good").classes] == ["region 1", "region 2", "region 3"]


def test_voxels_outside_the_crop_count_nowhere(tmp_path: Path) -> None:
    crop = [[2, 6], [3, 14], [3, 14]]
    manifest = write_manifest(tmp_path, SURE, crop=crop)
    fitted = temperature(1.0)
    folder = applied(manifest, fitted)
    one, other = (case_of(look(source, calibrator=fitted), "poor") for source in (folder, manifest))
    assert one.boundary_confidence == pytest.approx(other.boundary_confidence, rel=1e-6)
    inside = tuple(slice(*ends) for ends in crop)
    pooled = np.mean(SURE["poor"], axis=0)[:, *inside].astype(np.float64)
    probs = np.exp(pooled) / np.exp(pooled).sum(0)
    assert [c.sums.expected for c in other.classes] == pytest.approx(probs[1:].sum((1, 2, 3)), rel=1e-5)
    assert one.voxel_ml is None, "an invented geometry would give invented millilitres"


def test_the_zone_leaves_out_what_was_not_predicted_and_needs_a_boundary() -> None:
    labels = np.zeros((1, 1, 10), dtype=np.int16)
    assert boundary_zone(labels, 3.0, None) is None
    labels[..., 5:] = 1
    zone = boundary_zone(labels, 3.0, None)
    assert zone is not None
    np.testing.assert_array_equal(zone[0, 0].nonzero()[0], [2, 3, 4, 5, 6, 7])
    inside = torch.ones(1, 1, 10, dtype=torch.bool)
    inside[..., 7:] = False
    cut = boundary_zone(labels, 3.0, inside)
    assert cut is not None
    assert cut.sum() == 5
    assert mean_in_zone(torch.zeros(1, 1, 10), np.zeros((1, 1, 10), dtype=bool)) is NO_BOUNDARY


def test_outlyingness_reaches_the_result(manifest: Manifest) -> None:
    fitted = remembering(temperature(1.0), confidence_mean=[0.90, 0.91, 0.92, 0.93, 0.94])
    case = case_of(look(manifest, calibrator=fitted), "poor")
    score = case.outlyingness["confidence_mean"]
    assert not isinstance(score, Undefined)
    assert score < -3.5
    assert isinstance(case.outlyingness["free_energy_mean"], Undefined)


def test_measuring_is_a_pure_function_of_the_maps(manifest: Manifest) -> None:
    probs = torch.softmax(torch.tensor(SURE["good"][0]), 0)
    maps = QaMaps.of_classes("a", probs, probs.argmax(0))
    assert measure(maps, CLASSES[1:], QUIET, {}) == measure(maps, CLASSES[1:], QUIET, {})


def test_a_broken_map_is_listed_and_the_others_are_done(manifest: Manifest) -> None:
    folder = applied(manifest, temperature(1.0))
    content = (folder / "poor.npz").read_bytes()
    (folder / "poor.npz").write_bytes(content[: len(content) // 2])
    result = look(folder)
    assert [each.case.case_id for each in result.cases] == ["good"]
    assert "poor.npz" in result.failed["poor"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.full((3, 8, 16, 16), np.nan, dtype=np.float32), "expected probabilities"),
        (np.full((3, 8, 16, 16), 0.9, dtype=np.float32), "sum to 1"),
        (np.full((2, 8, 16, 16), 0.5, dtype=np.float32), "has 2 channels"),
        (np.full((3, 8, 16, 15), 1 / 3, dtype=np.float32), "is not that of"),
    ],
)
def test_maps_that_are_no_probabilities_are_refused_by_name(manifest: Manifest, values: Any, said: str) -> None:
    folder = applied(manifest, temperature(1.0))
    write_member(folder / "good.npz", values, kind="probabilities")
    result = look(folder)
    assert said in result.failed["good"]
    assert len(result.cases) == 1


def test_a_segmentation_with_foreign_labels_is_refused(manifest: Manifest) -> None:
    folder = applied(manifest, temperature(1.0))
    nib.save(nib.Nifti1Image(np.full((16, 16, 8), 7, dtype=np.uint8), rotated()), folder / "good.nii.gz")
    assert "labels 7 to 7" in look(folder).failed["good"]


def test_cases_that_apply_could_not_do_are_listed_with_its_message(manifest: Manifest) -> None:
    (manifest.root / "member_0" / "poor.npz").write_bytes(b"nothing")
    folder = applied(manifest, temperature(1.0), keep_going=True)
    result = look(folder)
    assert "`segcal apply` could not do it" in result.failed["poor"]
    assert result.warnings


def test_a_broken_member_is_listed(manifest: Manifest) -> None:
    (manifest.root / "member_1" / "good.npz").write_bytes(b"nothing")
    result = look(manifest, calibrator=temperature(1.0))
    assert "good.npz" in result.failed["good"]
    assert [each.case.case_id for each in result.cases] == ["poor"]


def test_wrong_sources_are_named(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no run\.json"):
        look(tmp_path / "empty")
    with pytest.raises(MissingFileError, match="no such folder"):
        look(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="needs --calibrator"):
        look(manifest)
    (tmp_path / "empty" / "run.json").write_text("{}")
    with pytest.raises(FileFormatError, match="not the record"):
        look(tmp_path / "empty")
    folder = applied(manifest, temperature(1.0))
    with pytest.raises(MismatchError, match="another calibrator"):
        look(folder, calibrator=temperature(3.0))
    with pytest.raises(UsageError, match="holds no case `goood`, did you mean `good`"):
        look(folder, cases=["goood"])
    with pytest.raises(UsageError, match="--images belongs to a folder"):
        look(manifest, calibrator=temperature(1.0), images=tmp_path)


def test_progress_counts_the_cases(manifest: Manifest) -> None:
    seen: list[tuple[str, int, int]] = []
    look(manifest, calibrator=temperature(1.0), progress=lambda *step: seen.append(step))
    assert seen == [("qa", 0, 2), ("qa", 1, 2), ("qa", 2, 2)]


def test_the_number_of_threads_changes_no_byte(tmp_path: Path) -> None:
    large = write_ensemble(tmp_path, n_cases=1, shape=(12, 64, 64))  # enough voxels for torch to share them out
    before = torch.get_num_threads()
    try:
        texts = []
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            texts.append(run_qa(large, calibrator=temperature(1.0)).csv())
    finally:
        torch.set_num_threads(before)
    assert texts[0] == texts[1]
