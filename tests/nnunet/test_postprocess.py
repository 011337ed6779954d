"""A calibrated copy of nnU-Net's output folder: the maps, the segmentation, the filling, and what nnU-Net reads."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from PIL import Image
from typer.testing import CliRunner

from segcal.errors import FileFormatError, GeometryError, MismatchError, MissingFileError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.io.images import read_labels
from segcal.nnunet.components import keep_largest_component
from segcal.nnunet.documents import read_postprocessing
from segcal.nnunet.postprocess import PostprocessRun, postprocess_folder
from segcal.types import Pooling
from segcal_cli.main import app
from tests.apply_data import CPU, make_fitted, random_logits, rotated, temperature
from tests.nnunet.folders import (
    REGION_LABELS,
    decided,
    filled,
    inside,
    read_probs,
    softmax,
    turned_affine,
    two_blobs,
    write_case,
    write_documents,
    write_labels,
)

SHAPE = (3, 6, 7, 8)
BOX = ((1, 4), (0, 7), (3, 8))
LARGEST = "remove_all_but_largest_component_from_segmentation"
OUTSIDE = np.ones(SHAPE[1:], dtype=bool)
OUTSIDE[inside(BOX)[1:]] = False


def run(fitted: FittedCalibrator, folder: Path, out: Path, **how: Any) -> PostprocessRun:
    return postprocess_folder(fitted, folder, out, device=CPU, **how)


def turns_everything(**how: Any) -> FittedCalibrator:
    """A calibrator that says `liver` whatever the input: filling it touches cannot stay background."""
    return make_fitted("ms", {"W": np.zeros((3, 3)), "b": np.array([0.0, 4.0, 0.0])}, **how)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two cases, the first cropped."""
    path = tmp_path / "nnunet_out"
    write_documents(path)
    write_case(path, "a", filled(random_logits(0, SHAPE), BOX), box=BOX)
    write_case(path, "b.1", filled(random_logits(1, SHAPE), None))
    return path


def test_maps_are_calibrated_inside_the_box_and_left_alone_outside(folder: Path, tmp_path: Path) -> None:
    done = run(temperature(2.0), folder, tmp_path / "out")

    assert done.applied.done == ["a", "b.1"]
    assert done.notes == []
    stored = read_probs(tmp_path / "out", "a")
    assert stored.dtype == np.float32
    expected = softmax(random_logits(0, SHAPE), 2.0)
    np.testing.assert_allclose(stored[inside(BOX)], expected[inside(BOX)], atol=2e-6)
    np.testing.assert_array_equal(stored[:, OUTSIDE], np.eye(3)[0][:, None].repeat(OUTSIDE.sum(), 1))
    np.testing.assert_allclose(read_probs(tmp_path / "out", "b.1"), softmax(random_logits(1, SHAPE), 2.0), atol=2e-6)


def test_the_segmentation_keeps_its_decision_and_its_place(folder: Path, tmp_path: Path) -> None:
    done = run(temperature(2.0), folder, tmp_path / "out")

    assert done.changed == {"a": 0, "b.1": 0}
    for name in ("a.nii.gz", "b.1.nii.gz"):
        before, after = nib.load(folder / name), nib.load(tmp_path / "out" / name)
        np.testing.assert_array_equal(np.asarray(after.dataobj), np.asarray(before.dataobj))
        np.testing.assert_allclose(after.affine, before.affine, atol=1e-5)


def test_the_copy_has_the_files_nnunet_looks_for(folder: Path, tmp_path: Path) -> None:
    run(temperature(2.0), folder, tmp_path / "out")

    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in folder.iterdir()} | {"run.json"}
    for name in ("dataset.json", "plans.json", "a.pkl"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_no_method_calibrates_the_filling_away(folder: Path, tmp_path: Path) -> None:
    fitted = turns_everything(kind="probabilities", pooling="probabilities")

    done = run(fitted, folder, tmp_path / "out")

    stored = read_probs(tmp_path / "out", "a")
    assert (stored[1][~OUTSIDE] > 0.9).all()
    assert (stored[0][OUTSIDE] == 1).all()
    labels = read_labels(tmp_path / "out" / "a.nii.gz").values
    np.testing.assert_array_equal(labels, np.where(OUTSIDE, 0, 1))
    assert done.changed["a"] == np.count_nonzero(labels != read_labels(folder / "a.nii.gz").values)


@pytest.mark.parametrize("forward", [(2, 0, 1), (1, 2, 0), (0, 2, 1)])
def test_the_box_of_a_transposed_plan_is_turned_back(tmp_path: Path, forward: tuple[int, int, int]) -> None:
    folder = tmp_path / "in"
    write_documents(folder, forward=forward)
    write_case(folder, "a", filled(random_logits(0, SHAPE), BOX), box=BOX, forward=forward)

    run(turns_everything(kind="probabilities", pooling="probabilities"), folder, tmp_path / "out")

    np.testing.assert_array_equal(read_probs(tmp_path / "out", "a")[0] == 1, OUTSIDE)


def test_regions_are_calibrated_on_their_own_and_absent_outside_the_box(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_documents(folder, labels=REGION_LABELS)
    probs = filled(random_logits(4, (2, *SHAPE[1:])), BOX, regions=True)
    write_case(folder, "a", probs, box=BOX, regions=True)

    done = run(temperature(3.0, classes=("whole", "core"), regions=True), folder, tmp_path / "out")

    stored = read_probs(tmp_path / "out", "a")
    saved = probs[inside(BOX)].astype(np.float64)  # what float32 left of the log-odds near 1
    expected = 1 / (1 + ((1 - saved) / saved) ** (1 / 3))
    np.testing.assert_allclose(stored[inside(BOX)], expected, atol=1e-6)
    assert (stored[:, OUTSIDE] == 0).all()
    assert done.changed == {"a": 0}
    np.testing.assert_array_equal(read_labels(tmp_path / "out" / "a.nii.gz").values, decided(probs, regions=True))


def remove_plans(folder: Path) -> None:
    (folder / "plans.json").unlink()


def remove_properties(folder: Path) -> None:
    (folder / "a.pkl").unlink()


def store_an_array(folder: Path) -> None:
    (folder / "a.pkl").write_bytes(pickle.dumps(read_probs(folder, "a")))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(remove_plans, "no plans.json"), (remove_properties, "no .pkl"), (store_an_array, "holds an array")],
)
def test_without_usable_properties_the_filling_tells_the_box(
    folder: Path, tmp_path: Path, damage: Any, reason: str
) -> None:
    damage(folder)

    done = run(turns_everything(kind="probabilities", pooling="probabilities"), folder, tmp_path / "out")

    assert [note for note in done.notes if reason in note and note.startswith("a:")]
    np.testing.assert_array_equal(read_probs(tmp_path / "out", "a")[0] == 1, OUTSIDE)
    assert (tmp_path / "out" / "a.pkl").exists() == (damage is remove_plans)


class Harm:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_malicious_pickle_stops_the_run_or_its_case_and_does_nothing_else(folder: Path, tmp_path: Path) -> None:
    (folder / "a.pkl").write_bytes(pickle.dumps(Harm(tmp_path / "executed")))

    with pytest.raises(FileFormatError, match=r"a\.pkl: asks for (posix|nt)\.system"):
        run(temperature(2.0), folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = run(temperature(2.0), folder, tmp_path / "out", keep_going=True)

    assert done.applied.done == ["b.1"]
    assert list(done.failed) == ["a"]
    assert not (tmp_path / "executed").exists()
    assert not list((tmp_path / "out").glob("a.*"))


def test_properties_of_another_image_are_refused(folder: Path, tmp_path: Path) -> None:
    write_case(tmp_path / "other", "a", filled(random_logits(0, (3, 6, 7, 9)), None))
    (folder / "a.pkl").write_bytes((tmp_path / "other" / "a.pkl").read_bytes())

    with pytest.raises(FileFormatError, match=r"a\.pkl.*\(6, 7, 9\).*\(6, 7, 8\)"):
        run(temperature(2.0), folder, tmp_path / "out")


def test_other_formats_are_written_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_documents(folder, ending=".nrrd")
    labels = write_case(folder, "a", filled(random_logits(0, SHAPE), BOX), box=BOX, ending=".nrrd")

    done = run(temperature(2.0), folder, tmp_path / "out")
    again = run(temperature(2.0), folder, tmp_path / "out", resume=True)

    assert {path.name for path in (tmp_path / "out").iterdir()} == {p.name for p in folder.iterdir()} | {"run.json"}
    before, after = (sitk.ReadImage(str(path / "a.nrrd")) for path in (folder, tmp_path / "out"))
    np.testing.assert_array_equal(sitk.GetArrayFromImage(after), labels)
    assert (after.GetSpacing(), after.GetOrigin()) == (before.GetSpacing(), before.GetOrigin())
    assert done.changed == again.changed == {"a": 0}


@pytest.mark.parametrize("ending", [".png", ".tif", ".bmp"])
def test_two_dimensional_images(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "in"
    write_documents(folder, ending=ending, reader="NaturalImage2DIO")
    labels = write_case(folder, "a", filled(random_logits(2, (3, 1, 6, 7)), None), ending=ending)

    done = run(temperature(2.0), folder, tmp_path / "out")

    assert done.changed == {"a": 0}
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / f"a{ending}")), labels[0])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {p.name for p in folder.iterdir()} | {"run.json"}


@pytest.mark.parametrize("ending", [".nii.gz", ".mha"])
def test_a_two_dimensional_scan_keeps_its_two_dimensions(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "in"
    write_documents(folder, ending=ending)
    labels = write_case(folder, "a", filled(random_logits(2, (3, 1, 6, 7)), None), ending=ending)
    flat = sitk.GetImageFromArray(labels[0])
    flat.SetSpacing((0.7, 1.3))
    flat.SetOrigin((3.0, -4.0))
    sitk.WriteImage(flat, str(folder / f"a{ending}"))
    steps = {"postprocessing_fns": [LARGEST], "postprocessing_kwargs": [{"labels_or_regions": 1}]}
    (tmp_path / "postprocessing.json").write_text(json.dumps(steps))

    done = run(temperature(2.0), folder, tmp_path / "out", postprocessing_json=tmp_path / "postprocessing.json")

    assert done.changed == {"a": 0}
    before = sitk.ReadImage(str(folder / f"a{ending}"))
    for path in (tmp_path / "out", tmp_path / "out" / "postprocessed"):
        after = sitk.ReadImage(str(path / f"a{ending}"))
        assert (after.GetSpacing(), after.GetOrigin()) == (before.GetSpacing(), before.GetOrigin())
    np.testing.assert_array_equal(
        sitk.GetArrayFromImage(sitk.ReadImage(str(tmp_path / "out" / f"a{ending}"))), labels[0]
    )


@pytest.mark.parametrize("reader", ["NibabelIOWithReorient", "SimpleITKIOWithReorient"])
def test_readers_that_reorient_get_the_segmentation_back_as_the_file_lies(tmp_path: Path, reader: str) -> None:
    folder = tmp_path / "in"
    write_documents(folder, reader=reader)
    probs = filled(random_logits(0, SHAPE), BOX)
    write_case(folder, "a", probs, box=BOX)
    turned = nib.orientations.inv_ornt_aff(nib.io_orientation(turned_affine()), SHAPE[:0:-1])
    canonical = nib.Nifti1Image(decided(probs).T, turned_affine() @ turned)
    as_file = canonical.as_reoriented(
        nib.orientations.ornt_transform(nib.io_orientation(canonical.affine), nib.io_orientation(turned_affine()))
    )
    assert nib.aff2axcodes(as_file.affine) == ("P", "L", "S")
    nib.save(as_file, folder / "a.nii.gz")

    done = run(temperature(2.0), folder, tmp_path / "out")

    after = nib.load(tmp_path / "out" / "a.nii.gz")
    assert done.changed == {"a": 0}
    assert after.shape != SHAPE[:0:-1]
    np.testing.assert_array_equal(np.asarray(after.dataobj), np.asarray(as_file.dataobj))
    np.testing.assert_allclose(after.affine, as_file.affine, atol=1e-5)


def test_an_original_that_its_probabilities_do_not_say_is_pointed_out(folder: Path, tmp_path: Path) -> None:
    write_labels(folder / "a.nii.gz", np.zeros(SHAPE[1:], dtype=np.uint8), rotated())

    done = run(temperature(2.0), folder, tmp_path / "out")

    assert any("not what its own probabilities say: a;" in note for note in done.notes)
    np.testing.assert_array_equal(read_labels(tmp_path / "out" / "a.nii.gz").values, read_probs(folder, "a").argmax(0))


def test_cases_without_partner_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "a.npz").unlink()
    (folder / "b.1.nii.gz").unlink()

    done = run(temperature(2.0), folder, tmp_path / "out")

    assert done.applied.done == ["b.1"]
    assert any("without .npz: a" in note for note in done.notes)
    assert any("no segmentation beside the probabilities: b.1" in note for note in done.notes)


def test_a_folder_of_another_shape_or_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="names of classes differ"):
        run(temperature(2.0, classes=("background", "x", "y")), folder, tmp_path / "out")
    with pytest.raises(MismatchError, match="translation-invariant"):
        run(turns_everything(), folder, tmp_path / "out")
    with pytest.raises(UsageError, match="input files"):
        run(temperature(2.0), folder, folder)
    write_labels(folder / "a.nii.gz", np.zeros((6, 7, 9), dtype=np.uint8), rotated())
    with pytest.raises(GeometryError, match="does not match deployed segmentation"):
        run(temperature(2.0), folder, tmp_path / "out")
    for path in folder.glob("*.npz"):
        path.unlink()
    with pytest.raises(MissingFileError, match="--save_probabilities"):
        run(temperature(2.0), folder, tmp_path / "out")


def test_ti_calibrators_of_either_pooling_apply(folder: Path, tmp_path: Path) -> None:
    run(temperature(2.0, pooling="logits"), folder, tmp_path / "one")
    run(temperature(2.0, pooling="probabilities"), folder, tmp_path / "two")

    np.testing.assert_allclose(read_probs(tmp_path / "one", "a"), read_probs(tmp_path / "two", "a"), atol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "by_predict", "says"), [("probabilities", True, 1), ("probabilities", False, 0), ("logits", True, 0)]
)
def test_a_calibrator_of_the_other_average_is_pointed_out(
    pooling: Pooling, by_predict: bool, says: int, folder: Path, tmp_path: Path
) -> None:
    if by_predict:
        (folder / "predict_from_raw_data_args.json").write_text("{}")

    done = run(temperature(2.0, pooling=pooling), folder, tmp_path / "out")

    assert sum("averages the logits of its folds" in note for note in done.notes) == says


def test_a_finished_run_is_resumed_without_doing_it_again(folder: Path, tmp_path: Path) -> None:
    run(temperature(2.0), folder, tmp_path / "out")
    again = run(temperature(2.0), folder, tmp_path / "out", resume=True)

    assert (again.applied.done, again.applied.skipped) == ([], ["a", "b.1"])
    assert again.changed == {"a": 0, "b.1": 0}


def write_steps(path: Path, *steps: Any) -> Path:
    content = {
        "postprocessing_fns": [LARGEST] * len(steps),
        "postprocessing_kwargs": [{"labels_or_regions": step} for step in steps],
    }
    path.write_text(json.dumps(content))
    return path


def test_label_postprocessing_lies_beside_and_keeps_the_maps(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_documents(folder)
    labels = two_blobs()
    probs = np.stack([labels == k for k in range(3)]).astype(np.float32) * np.float32(0.8) + np.float32(0.2 / 3)
    write_case(folder, "a", probs / probs.sum(0))

    steps = write_steps(tmp_path / "postprocessing.json", [1, 2])
    done = run(temperature(2.0), folder, tmp_path / "out", postprocessing_json=steps)

    expected = labels.copy()
    expected[4:] = 0
    cleaned = nib.load(tmp_path / "out" / "postprocessed" / "a.nii.gz")
    np.testing.assert_array_equal(np.asarray(cleaned.dataobj).T, expected)
    np.testing.assert_allclose(cleaned.affine, nib.load(folder / "a.nii.gz").affine, atol=1e-5)
    np.testing.assert_array_equal(read_labels(tmp_path / "out" / "a.nii.gz").values, labels)
    assert done.cleaned == {"a": np.count_nonzero(expected != labels)}


def test_a_segmentation_that_cannot_be_cleaned_is_listed_and_the_others_are_cleaned(
    folder: Path, tmp_path: Path
) -> None:
    """Its header tells the geometry, so the case is calibrated; its voxels are cut off."""
    nib.save(nib.load(folder / "a.nii.gz"), folder / "a.nii")
    whole = (folder / "a.nii").read_bytes()
    (folder / "a.nii").unlink()
    (folder / "a.nii.gz").write_bytes(gzip.compress(whole[:-20]))
    how: dict[str, Any] = {"postprocessing_json": write_steps(tmp_path / "postprocessing.json", [1])}

    with pytest.raises(FileFormatError, match=r"a\.nii\.gz"):
        run(temperature(2.0), folder, tmp_path / "stopped", **how)
    done = run(temperature(2.0), folder, tmp_path / "out", keep_going=True, **how)

    assert list(done.failed) == ["a"]
    assert "could not be finished" in done.failed["a"]
    assert list(done.cleaned) == ["b.1"]
    assert (tmp_path / "out" / "postprocessed" / "b.1.nii.gz").exists()


def test_components_of_equal_size_all_stay() -> None:
    labels = np.zeros((1, 1, 7), dtype=np.uint8)
    labels[0, 0, [0, 1, 3, 4, 6]] = 1
    np.testing.assert_array_equal(keep_largest_component(labels, [1]).ravel(), [1, 1, 0, 1, 1, 0, 0])


@pytest.mark.parametrize(
    "content",
    [
        {"postprocessing_fns": ["os.system"], "postprocessing_kwargs": [{"labels_or_regions": [1]}]},
        {"postprocessing_fns": [LARGEST], "postprocessing_kwargs": []},
        {"postprocessing_fns": [LARGEST], "postprocessing_kwargs": [{"labels_or_regions": ["1"]}]},
        {"postprocessing_fns": [LARGEST], "postprocessing_kwargs": [{"labels_or_regions": 1, "background_label": 5}]},
        {"postprocessing_fns": [LARGEST], "postprocessing_kwargs": [{"labels_or_regions": 1, "other": 5}]},
        [],
    ],
)
def test_unknown_postprocessing_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "postprocessing.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match=r"postprocessing\.json"):
        read_postprocessing(path)
    with pytest.raises(FileFormatError, match="a pickle"):
        read_postprocessing(tmp_path / "postprocessing.pkl")


def test_the_command_works_without_nnunet_installed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nnunetv2", None)
    temperature(2.0).save(tmp_path / "ts.safetensors")
    steps = write_steps(tmp_path / "postprocessing.json", 1, [1, 2])
    options = ["--calibrator", tmp_path / "ts.safetensors", "--out", tmp_path / "out", "--device", "cpu", "--json"]
    arguments = ["nnunet", "postprocess", folder, *options, "--apply-postprocessing", steps]

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])

    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["done"] == ["a", "b.1"]
    assert content["changed_voxels"] == {"a": 0, "b.1": 0}
    assert (tmp_path / "out" / "postprocessed" / "b.1.nii.gz").exists()
