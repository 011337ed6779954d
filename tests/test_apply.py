"""Calibrated maps on disk, read back by the libraries their users have: numpy, nibabel and SimpleITK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from PIL import Image

from segcal.apply import ApplyRun, apply_calibrator
from segcal.calibrators import CALIBRATORS
from segcal.errors import GeometryError, MismatchError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from tests.apply_data import (
    CLASSES,
    CPU,
    RESOLUTION,
    STORAGE,
    make_fitted,
    near_ties,
    preserving,
    random_logits,
    rotated,
    temperature,
    write_image,
    write_manifest,
)

FLOAT_NOISE = 2.5e-7  # softmax and slope are computed in float32
PRESERVING = [name for name, cls in CALIBRATORS.items() if cls.preserves is not None]


def apply(fitted: FittedCalibrator, manifest: Manifest, out: Path, **how: Any) -> ApplyRun:
    return apply_calibrator(fitted, manifest, out, device=CPU, **how)


def stored_maps(out: Path, case_id: str) -> list[NDArray[np.float64]]:
    """The probabilities (class, z, y, x) as every reader of the format sees them."""
    archive = out / f"{case_id}.npz"
    if archive.exists():
        with np.load(archive) as content:
            return [content["probabilities"].astype(np.float64)]
    path = out / "probabilities" / f"{case_id}.nii.gz"
    by_nibabel = np.asarray(nib.load(path).dataobj, dtype=np.float64)
    by_itk = sitk.GetArrayFromImage(sitk.ReadImage(str(path)))
    return [np.ascontiguousarray(by_nibabel.T), by_itk.astype(np.float64)]


def segmentation(out: Path, case_id: str) -> NDArray[Any]:
    return np.asarray(nib.load(out / f"{case_id}.nii.gz").dataobj).T


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = np.exp(logits.astype(np.float64) - logits.max(0))
    return shifted / shifted.sum(0)


@pytest.mark.parametrize("n_classes", [2, 3, 5])
@pytest.mark.parametrize("method", PRESERVING)
def test_no_decision_flips_on_disk_however_close_the_classes(tmp_path: Path, method: str, n_classes: int) -> None:
    logits = near_ties(n_classes)
    fitted = preserving(method, n_classes)
    manifest = write_manifest(tmp_path, {"a": [logits]}, classes=fitted.info.classes, affine=rotated())
    decision = logits.argmax(0)
    for format, dtype in STORAGE:
        out = tmp_path / f"{format}_{dtype}"
        apply(fitted, manifest, out, format=format, dtype=dtype)

        for stored in stored_maps(out, "a"):
            assert np.count_nonzero(stored.argmax(0) != decision) == 0
            assert np.isfinite(stored).all()
            assert stored.min() >= 0
            assert np.abs(stored.sum(0) - 1).max() <= RESOLUTION[dtype] + FLOAT_NOISE
        np.testing.assert_array_equal(segmentation(out, "a"), decision)


@pytest.mark.parametrize("method", PRESERVING)
def test_region_decisions_do_not_flip_on_disk(tmp_path: Path, method: str) -> None:
    tiny = np.float32(1e-45)
    close = [0.0, tiny, -tiny, 1e-8, -1e-8, 1e-4, -1e-4, 3e-5, -3e-5, 0.01, -0.01, 40.0, -40.0, 1e4, -1e4]
    first, second = np.meshgrid(np.array(close, dtype=np.float32), np.array(close, dtype=np.float32))
    log_odds = np.stack([first, second])[:, np.newaxis]  # (region, 1, y, x), all pairs
    fitted = preserving(method, 2, regions=True)
    regions = [{"name": "class_0", "labels": [1, 2]}, {"name": "class_1", "labels": [2]}]
    manifest = write_manifest(
        tmp_path, {"a": [log_odds]}, classes=None, affine=rotated(), regions=regions, regions_class_order=[1, 2]
    )
    decision = log_odds > 0
    painted = np.where(decision[1], 2, np.where(decision[0], 1, 0))
    for format, dtype in STORAGE:
        out = tmp_path / f"{format}_{dtype}"
        apply(fitted, manifest, out, format=format, dtype=dtype)

        for stored in stored_maps(out, "a"):
            np.testing.assert_array_equal(stored > 0.5, decision)
        np.testing.assert_array_equal(segmentation(out, "a"), painted)


def test_later_regions_overwrite_earlier_ones_with_their_own_label(tmp_path: Path) -> None:
    log_odds = np.array([[5, 5, -5, -5], [5, -5, 5, -5]], dtype=np.float32).reshape(2, 1, 1, 4)
    regions = [{"name": "whole", "labels": [300, 7]}, {"name": "core", "labels": [7]}]
    manifest = write_manifest(
        tmp_path, {"a": [log_odds]}, classes=None, affine=rotated(), regions=regions, regions_class_order=[300, 7]
    )
    apply(make_fitted("identity", classes=("whole", "core"), regions=True), manifest, tmp_path / "out")

    np.testing.assert_array_equal(segmentation(tmp_path / "out", "a").ravel(), [7, 300, 7, 0])


@pytest.mark.parametrize(("format", "dtype"), STORAGE)
def test_two_real_cases_keep_every_decision_and_their_place(
    tmp_path: Path, hippocampus: Path, format: str, dtype: str
) -> None:
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    rng = np.random.default_rng(0)
    tensors = {"A": rng.uniform(0, 0.8, (3, 2, 2)), "beta": rng.uniform(1e-6, 0.5, (3, 2))}
    fitted = make_fitted("cms_ap", tensors, classes=manifest.class_names)
    ids = ["hippocampus_001", "hippocampus_006"]
    apply(fitted, manifest, tmp_path / "out", format=format, dtype=dtype, cases=ids)

    for case_id in ids:
        total = np.zeros(1, dtype=np.float32)
        for index in range(5):
            with np.load(hippocampus / f"member_{index}" / f"{case_id}.npz") as member:
                total = total + member["logits"].astype(np.float32)
        decision = (total / np.float32(5)).argmax(0)
        for stored in stored_maps(tmp_path / "out", case_id):
            assert np.count_nonzero(stored.argmax(0) != decision) == 0
            assert np.abs(stored.sum(0) - 1).max() <= RESOLUTION[dtype] + FLOAT_NOISE
        np.testing.assert_array_equal(segmentation(tmp_path / "out", case_id), decision)
        image = nib.load(hippocampus / "images" / f"{case_id}_0000.nii.gz")
        written = [nib.load(tmp_path / "out" / f"{case_id}.nii.gz")]
        if format == "nifti":
            written.append(nib.load(tmp_path / "out" / "probabilities" / f"{case_id}.nii.gz"))
        for file in written:
            np.testing.assert_allclose(file.affine, image.affine, atol=1e-4)
            assert file.shape[:3] == image.shape


@pytest.mark.parametrize(("format", "dtype"), STORAGE)
def test_the_map_holds_the_calibrated_probabilities(tmp_path: Path, format: str, dtype: str) -> None:
    members = [random_logits(seed) for seed in range(3)]
    manifest = write_manifest(tmp_path, {"a": members}, affine=rotated())
    apply(temperature(2.5), manifest, tmp_path / "out", format=format, dtype=dtype)

    expected = softmax(np.mean(members, 0, dtype=np.float64) / 2.5)
    for stored in stored_maps(tmp_path / "out", "a"):
        np.testing.assert_allclose(stored, expected, atol=2 * RESOLUTION[dtype])


@pytest.mark.parametrize("n_classes", [3, 20])
def test_uint16_voxels_sum_to_one_exactly_whatever_the_number_of_classes(tmp_path: Path, n_classes: int) -> None:
    logits = random_logits(0, (n_classes, 6, 7, 8), scale=1.0)
    names = tuple(f"c{k}" for k in range(n_classes))
    manifest = write_manifest(tmp_path, {"a": [logits]}, classes=names, affine=rotated())
    apply(temperature(1.5, classes=names), manifest, tmp_path / "out", format="nifti", dtype="uint16")

    image = nib.load(tmp_path / "out" / "probabilities" / "a.nii.gz")
    assert image.get_data_dtype() == np.uint16
    assert image.dataobj.slope == pytest.approx(1 / 65535, rel=1e-6)
    raw = np.asarray(image.dataobj.get_unscaled())
    sums = raw.sum(-1, dtype=np.int64)
    assert (sums == 65535).mean() > 0.99
    assert np.abs(sums - 65535).max() <= 1
    np.testing.assert_allclose(raw.T / 65535, softmax(logits / 1.5), atol=0.5 * n_classes / 65535)


@pytest.mark.parametrize(("format", "dtype"), STORAGE)
def test_the_segmentation_of_other_methods_is_what_their_map_says(tmp_path: Path, format: str, dtype: str) -> None:
    logits = np.concatenate([near_ties(3).reshape(3, -1), random_logits(1).reshape(3, -1)], 1)[
        :, np.newaxis, np.newaxis
    ]
    weight = np.array([[1.0, 0.3, 0.0], [0.2, 0.9, 0.1], [0.0, 0.4, 1.1]])
    fitted = make_fitted("dc", {"W": weight, "b": np.array([0.0, 0.5, -0.4])})
    manifest = write_manifest(tmp_path, {"a": [logits]}, affine=rotated())
    apply(fitted, manifest, tmp_path / "out", format=format, dtype=dtype)

    found = segmentation(tmp_path / "out", "a")
    assert np.count_nonzero(found != logits.argmax(0)) > 0
    for stored in stored_maps(tmp_path / "out", "a"):
        np.testing.assert_array_equal(stored.argmax(0), found)


@pytest.mark.parametrize(("format", "dtype"), STORAGE)
def test_outside_the_crop_background_is_certain(tmp_path: Path, format: str, dtype: str) -> None:
    logits = random_logits(2)
    logits[1] += 3  # an uncropped run would decide for class 1 nearly everywhere
    crop = [[1, 3], [0, 4], [2, 5]]
    manifest = write_manifest(tmp_path, {"a": [logits]}, affine=rotated(), crop=crop)
    apply(temperature(4.0), manifest, tmp_path / "out", format=format, dtype=dtype)

    outside = np.ones(logits.shape[1:], dtype=bool)
    outside[1:3, 0:4, 2:5] = False
    for stored in stored_maps(tmp_path / "out", "a"):
        # SimpleITK multiplies with the float32 slope of the header: 1 - 6e-8.
        np.testing.assert_allclose(stored[0][outside], 1.0, rtol=1e-6)
        assert (stored[1:, outside] == 0).all()
        np.testing.assert_allclose(stored[:, ~outside], softmax(logits / 4)[:, ~outside], atol=2 * RESOLUTION[dtype])
    assert (segmentation(tmp_path / "out", "a")[outside] == 0).all()
    if format == "nnunet":
        with np.load(tmp_path / "out" / "a.npz") as content:
            np.testing.assert_array_equal(content["crop"], crop)


def test_outside_the_crop_no_region_is_present(tmp_path: Path) -> None:
    log_odds = np.full((1, 2, 3, 4), 2.0, dtype=np.float32)
    manifest = write_manifest(
        tmp_path,
        {"a": [log_odds]},
        classes=None,
        affine=rotated(),
        crop=[[0, 1], [0, 3], [0, 4]],
        regions=[{"name": "whole", "labels": [1]}],
        regions_class_order=[1],
    )
    fitted = temperature(2.0, classes=("whole",), regions=True)
    apply(fitted, manifest, tmp_path / "out", confidence=True, entropy=True)

    stored = stored_maps(tmp_path / "out", "a")[0]
    np.testing.assert_allclose(stored[0, 0], 1 / (1 + np.exp(-1.0)), rtol=1e-6)
    assert (stored[0, 1] == 0).all()
    np.testing.assert_array_equal(segmentation(tmp_path / "out", "a")[:, 0, 0], [1, 0])
    confidence = nib.load(tmp_path / "out" / "confidence" / "a.nii.gz").get_fdata().T
    np.testing.assert_allclose(confidence[:, 0, 0], [1 / (1 + np.exp(-1.0)), 1.0], rtol=1e-6)


def test_confidence_and_entropy_agree_with_their_definitions(tmp_path: Path) -> None:
    logits = np.concatenate([random_logits(4), np.full((3, 4, 5, 1), 50, dtype=np.float32)], 3)
    logits[0, :, :, -1] = 1e4  # certain voxels: entropy 0, not NaN
    manifest = write_manifest(tmp_path, {"a": [logits]}, affine=rotated())
    apply(temperature(2.0), manifest, tmp_path / "out", confidence=True, entropy=True, dtype="float16")

    probs = softmax(logits / 2)
    entropy = -np.sum(probs * np.log(np.maximum(probs, 1e-300)), 0)
    for name, expected in (("confidence", probs.max(0)), ("entropy", entropy)):
        image = nib.load(tmp_path / "out" / name / "a.nii.gz")
        assert image.get_data_dtype() == np.float32
        np.testing.assert_allclose(image.get_fdata().T, expected, atol=1e-5)
        np.testing.assert_allclose(image.affine, rotated(), atol=1e-5)


def test_region_entropy_adds_up_over_regions_and_confidence_is_that_of_the_least_sure(tmp_path: Path) -> None:
    log_odds = random_logits(5, (2, 3, 4, 5))
    regions = [{"name": "whole", "labels": [1, 2]}, {"name": "core", "labels": [2]}]
    manifest = write_manifest(
        tmp_path, {"a": [log_odds]}, classes=None, affine=rotated(), regions=regions, regions_class_order=[1, 2]
    )
    fitted = make_fitted("identity", classes=("whole", "core"), regions=True)
    apply(fitted, manifest, tmp_path / "out", confidence=True, entropy=True)

    p = 1 / (1 + np.exp(-log_odds.astype(np.float64)))
    entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p)).sum(0)
    confidence = np.maximum(p, 1 - p).min(0)
    found = {name: nib.load(tmp_path / "out" / name / "a.nii.gz").get_fdata().T for name in ("entropy", "confidence")}
    np.testing.assert_allclose(found["entropy"], entropy, atol=1e-5)
    np.testing.assert_allclose(found["confidence"], confidence, atol=1e-6)


def world_by_itk(path: Path, index: tuple[int, int, int]) -> NDArray[np.float64]:
    """RAS position of voxel (x, y, z) as SimpleITK understands the file."""
    image = sitk.ReadImage(str(path))
    point = image.TransformIndexToPhysicalPoint([*index, 0][: image.GetDimension()])
    return np.array([-point[0], -point[1], point[2]])


@pytest.mark.parametrize("source", ["members", "label", "image"])
def test_oblique_geometry_survives_for_nibabel_and_simpleitk(tmp_path: Path, source: str) -> None:
    logits, affine = random_logits(6), rotated()
    manifest = write_manifest(tmp_path, {"a": [logits]}, affine=affine if source == "image" else None)
    content = manifest.model_dump(mode="json", exclude_none=True)
    if source == "label":
        write_image(tmp_path / "labels" / "a.nii.gz", logits.shape[1:], affine)
        content["cases"][0]["label"] = "labels/a.nii.gz"
    elif source == "members":
        nib.save(nib.Nifti1Image(logits.T, affine), tmp_path / "member_0" / "a.nii.gz")
        content["cases"][0]["members"] = ["member_0/a.nii.gz"]
    manifest = Manifest.from_content(content, tmp_path / "manifest.yaml")
    apply(temperature(2.0), manifest, tmp_path / "out", format="nifti", confidence=True)

    for name in ("probabilities/a.nii.gz", "confidence/a.nii.gz", "a.nii.gz"):
        path = tmp_path / "out" / name
        np.testing.assert_allclose(nib.load(path).affine, affine, atol=1e-5)
        for index in ((0, 0, 0), (5, 0, 0), (0, 4, 0), (0, 0, 3), (5, 4, 3)):
            expected = (affine @ [*index, 1.0])[:3]
            np.testing.assert_allclose(world_by_itk(path, index), expected, atol=1e-3)
    for stored in stored_maps(tmp_path / "out", "a"):
        np.testing.assert_allclose(stored, softmax(logits / 2), atol=1e-6)


def test_nifti_needs_geometry_and_says_where_it_could_come_from(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)]})
    with pytest.raises(GeometryError, match=r"^a: .*Add `image:`.*--format nnunet"):
        apply(temperature(2.0), manifest, tmp_path / "out", format="nifti")


def test_a_case_without_geometry_gets_its_segmentation_as_npz(tmp_path: Path) -> None:
    logits = random_logits(7)
    manifest = write_manifest(tmp_path, {"a": [logits]})
    apply(temperature(2.0), manifest, tmp_path / "out", confidence=True)

    with np.load(tmp_path / "out" / "segmentation" / "a.npz") as content:
        np.testing.assert_array_equal(content["segmentation"], logits.argmax(0))
        assert content["segmentation"].dtype == np.uint8
    with np.load(tmp_path / "out" / "confidence" / "a.npz") as content:
        np.testing.assert_allclose(content["confidence"], softmax(logits / 2).max(0), atol=1e-6)
    assert not list((tmp_path / "out").rglob("*.nii.gz"))


def test_a_flat_case_without_geometry_gets_its_segmentation_as_png(tmp_path: Path) -> None:
    logits = random_logits(8, (3, 1, 20, 30))
    manifest = write_manifest(tmp_path, {"a": [logits]})
    apply(temperature(2.0), manifest, tmp_path / "out")

    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / "a.png")), logits.argmax(0)[0])


@pytest.mark.parametrize(
    ("format", "dtype", "reason"),
    [
        ("nnunet", "uint16", "nnU-Net would average the raw integers"),
        ("nifti", "float16", "NIfTI has no 16-bit floats"),
        ("nrrd", "float32", "unknown format `nrrd`"),
        ("nnunet", "float64", "unknown dtype `float64`"),
    ],
)
def test_combinations_nobody_could_read_are_refused_with_the_reason(
    tmp_path: Path, format: str, dtype: str, reason: str
) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)]}, affine=rotated())
    with pytest.raises(UsageError, match=reason):
        apply(temperature(2.0), manifest, tmp_path / "out", format=format, dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_inputs_are_never_overwritten(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)]})
    before = (tmp_path / "member_0" / "a.npz").read_bytes()
    with pytest.raises(UsageError, match=r"member_0.a\.npz: is one of the input files"):
        apply(temperature(2.0), manifest, tmp_path / "member_0")
    assert (tmp_path / "member_0" / "a.npz").read_bytes() == before


def test_files_of_somebody_else_are_never_overwritten(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)]}, affine=rotated())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.nii.gz").write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"a\.nii\.gz: already exists"):
        apply(temperature(2.0), manifest, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.nii.gz"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)]})
    (tmp_path / "out").write_text("precious")
    with pytest.raises(UsageError, match="out: is a file"):
        apply(temperature(2.0), manifest, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"


def test_a_calibrator_for_other_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)]})
    with pytest.raises(MismatchError, match="names of classes differ"):
        apply(temperature(2.0, classes=("background", "spleen", "tumour")), manifest, tmp_path / "out")
    with pytest.raises(MismatchError, match="pooling differs"):
        apply(make_fitted("ms"), manifest, tmp_path / "out", pooling="probabilities")
    with pytest.raises(UsageError, match="no case 'b'"):
        apply(temperature(2.0), manifest, tmp_path / "out", cases=["b"])
    assert not (tmp_path / "out").exists()


def test_a_forced_mismatch_is_kept_as_a_warning(tmp_path: Path) -> None:
    probs = softmax(random_logits(0)).astype(np.float32)
    manifest = write_manifest(tmp_path, {"a": [probs]}, kind="probabilities")
    with pytest.raises(MismatchError, match="--force"):
        apply(make_fitted("ms"), manifest, tmp_path / "out")
    run = apply(make_fitted("ms"), manifest, tmp_path / "out", force=True)

    assert any("kind differs" in warning for warning in run.warnings)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["warnings"] == list(run.warnings)


@pytest.mark.parametrize(("key", "value"), [("mirroring", True), ("step_size", 0.9), ("folds", [0, 1, 2])])
def test_another_way_of_predicting_is_named_in_the_run(tmp_path: Path, key: str, value: Any) -> None:
    same = {"mirroring": False, "step_size": 0.5, "folds": [0, 1]}
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)]}, prediction={**same, key: value})
    plain = temperature(2.0)
    fitted = FittedCalibrator(plain.calibrator, plain.info.model_copy(update={"prediction": same}))

    run = apply_calibrator(fitted, manifest, tmp_path / "out", device=CPU)

    assert [text.split(":")[0] for text in run.warnings] == [f"prediction.{key} differs"]


@pytest.mark.parametrize("regions", [False, True])
def test_members_calibrated_one_by_one_are_averaged_and_the_pooled_decision_is_kept(
    tmp_path: Path, regions: bool
) -> None:
    """Against plain numpy; the map stays the mean and the voxels in which it says otherwise are counted."""
    logits = [random_logits(seed, scale=2.0) for seed in range(3)]
    keys: dict[str, Any] = {}
    if regions:
        names = [{"name": n, "labels": [k + 1]} for k, n in enumerate(CLASSES)]
        keys = {"classes": None, "regions": names, "regions_class_order": [1, 2, 3]}
    manifest = write_manifest(tmp_path, {"a": logits}, affine=rotated(), **keys)
    fitted = temperature(4.0, regions=regions)

    run = apply_calibrator(
        fitted, manifest, tmp_path / "out", device=CPU, pooling="members-probabilities", dtype="float16"
    )

    scaled = np.stack(logits).astype(np.float64) / 4
    each = 1 / (1 + np.exp(-scaled)) if regions else np.exp(scaled) / np.exp(scaled).sum(1, keepdims=True)
    mean, pooled = each.mean(0), np.mean(logits, axis=0)
    stored = np.load(tmp_path / "out" / "a.npz")["probabilities"]
    np.testing.assert_allclose(stored, mean, atol=6e-4)
    labels = np.asarray(nib.load(tmp_path / "out" / "a.nii.gz").dataobj).T
    if regions:
        said, decided = mean > 0.5, pooled > 0
        expected = np.zeros(labels.shape)
        for k, region in enumerate(decided):
            expected[region] = k + 1
        differing = (said != decided).any(0)
    else:
        expected = pooled.argmax(0)
        differing = mean.argmax(0) != expected
        np.testing.assert_array_equal(stored.argmax(0), mean.argmax(0))
    np.testing.assert_array_equal(labels, expected)
    assert run.differing == {"a": np.count_nonzero(differing)}
    assert run.differing["a"] > 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["settings"]["pooling"] == "members-probabilities"
    assert record["cases"]["a"]["n_differing"] == run.differing["a"]


def test_zero_probabilities_are_raised_and_counted(tmp_path: Path) -> None:
    probs = np.zeros((3, 1, 2, 2), dtype=np.float16)
    probs[0] = 1
    manifest = write_manifest(tmp_path, {"a": [probs]}, kind="probabilities")
    run = apply(temperature(2.0), manifest, tmp_path / "out")

    assert run.n_floored == 8
    assert json.loads((tmp_path / "out" / "run.json").read_text())["cases"]["a"]["n_floored"] == 8
    assert np.isfinite(stored_maps(tmp_path / "out", "a")[0]).all()


def test_run_json_says_what_was_read_made_and_asked_for(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0), random_logits(1)]}, affine=rotated())
    fitted = temperature(2.0)
    apply(fitted, manifest, tmp_path / "out", dtype="float16", entropy=True)

    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["complete"] is True
    assert record["calibrator_sha256"] == fitted.sha256
    assert record["manifest_sha256"] == manifest.sha256
    assert record["settings"]["dtype"] == "float16"
    assert set(record["versions"]) >= {"segcal", "torch", "numpy"}
    case = record["cases"]["a"]
    names = [entry["file"] for entry in case["recipe"]["inputs"]]
    assert names == ["member_0/a.npz", "member_1/a.npz", "images/a_0000.nii.gz"]
    assert case["recipe"]["inputs"][0]["fingerprint"] != case["recipe"]["inputs"][1]["fingerprint"]
    sizes = {entry["file"]: entry["bytes"] for entry in case["outputs"]}
    assert sizes == {
        name: (tmp_path / "out" / name).stat().st_size for name in ("a.npz", "entropy/a.nii.gz", "a.nii.gz")
    }
    assert set(case["seconds"]) == {"read", "calibrate", "write"}


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)], "b": [random_logits(1)]}, affine=rotated())
    for out in ("one", "two"):
        apply(temperature(2.0), manifest, tmp_path / out, format="nifti", dtype="uint16", confidence=True)

    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def contents(out: Path) -> dict[str, Any]:
    """All files of a run, run.json without its timings."""
    found: dict[str, Any] = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    record = json.loads(found["run.json"])
    for case in record["cases"].values():
        del case["seconds"]
    return found | {"run.json": record}


def test_progress_counts_the_cases_and_unused_names_stay_unused(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)], "b": [random_logits(1)]}, affine=rotated())
    calls: list[tuple[str, int, int]] = []
    run = apply(temperature(2.0), manifest, tmp_path / "out", progress=lambda *step: calls.append(step))

    assert calls == [("apply", 0, 2), ("apply", 1, 2), ("apply", 2, 2)]
    assert run.done == ["a", "b"]
    assert run.skipped == list(run.redone) == []
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "a.nii.gz",
        "a.npz",
        "b.nii.gz",
        "b.npz",
        "run.json",
    ]
