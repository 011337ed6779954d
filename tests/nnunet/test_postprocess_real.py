"""`segcal nnunet postprocess` against nnU-Net itself: readers, post-processing, predictor and ensembling."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from segcal.nnunet.components import clean_labels
from segcal.nnunet.postprocess import postprocess_folder
from segcal.nnunet.segmentations import in_file_orientation
from tests.apply_data import CPU, temperature
from tests.nnunet.folders import inside, read_probs, turned_affine, two_blobs, write_labels

pytestmark = pytest.mark.nnunet

LARGEST = "remove_all_but_largest_component_from_segmentation"
CLASSES = ("background", "anterior", "posterior")
MISSING = "needs the extra `nnunet`"


@given(
    labels=hnp.arrays(np.uint8, (4, 5, 5), elements=st.sampled_from([0, 0, 0, 1, 2, 3])),
    steps=st.lists(st.sampled_from([1, 2, (1, 2), (1, 2, 3)]), max_size=3),
)
def test_cleaning_equals_nnunets(labels: NDArray[np.uint8], steps: list[Any]) -> None:
    theirs = pytest.importorskip("nnunetv2.postprocessing.remove_connected_components", reason=MISSING)
    expected = theirs.apply_postprocessing(
        labels, [getattr(theirs, LARGEST)] * len(steps), [{"labels_or_regions": step} for step in steps]
    )
    ours = clean_labels(labels, [[step] if isinstance(step, int) else step for step in steps])
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("reader", ["NibabelIOWithReorient", "SimpleITKIOWithReorient"])
def test_reoriented_arrays_return_to_the_file_as_nnunets_readers_turn_them(tmp_path: Path, reader: str) -> None:
    module = "nibabel_reader_writer" if reader.startswith("Nibabel") else "simpleitk_reader_writer"
    theirs = pytest.importorskip(f"nnunetv2.imageio.{module}", reason=MISSING)
    labels = two_blobs()
    write_labels(tmp_path / "a.nii.gz", labels, turned_affine())
    array, _ = getattr(theirs, reader)().read_seg(str(tmp_path / "a.nii.gz"))

    assert array[0].shape != labels.shape or (array[0] != labels).any()
    np.testing.assert_array_equal(in_file_orientation(array[0].astype(np.uint8), tmp_path / "a.nii.gz"), labels)


@pytest.fixture(scope="module")
def predicted(hippocampus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nnU-Net's own predictor saves for two images, one of them with a black border that it crops."""
    predict = pytest.importorskip("nnunetv2.inference.predict_from_raw_data", reason=MISSING)
    folder = tmp_path_factory.mktemp("real")
    images = sorted((hippocampus / "images").glob("*_0000.nii.gz"))[:2]
    bordered = nib.load(images[1])
    values = np.pad(np.asarray(bordered.dataobj), ((3, 0), (0, 5), (2, 4)))
    nib.save(nib.Nifti1Image(values, bordered.affine), folder / "bordered_0000.nii.gz")
    predictor = predict.nnUNetPredictor(
        use_mirroring=False, perform_everything_on_device=False, device=CPU, allow_tqdm=False
    )
    predictor.initialize_from_trained_model_folder(str(hippocampus / "model"), use_folds=(0, 1))
    out = folder / "out"
    out.mkdir()
    predictor.predict_from_files_sequential(
        [[str(images[0])], [str(folder / "bordered_0000.nii.gz")]],
        [str(out / "plain"), str(out / "bordered")],
        save_probabilities=True,
    )
    for name in ("dataset.json", "plans.json"):
        (out / name).write_bytes((hippocampus / "model" / name).read_bytes())
    return out


@pytest.mark.filterwarnings("ignore")
def test_real_output_of_nnunet_is_calibrated_in_place(predicted: Path, tmp_path: Path) -> None:
    done = postprocess_folder(temperature(2.0, classes=CLASSES), predicted, tmp_path / "out", device=CPU)

    assert done.notes == []
    assert done.changed == {"bordered": 0, "plain": 0}
    with (predicted / "bordered.pkl").open("rb") as file:
        box = pickle.load(file)["bbox_used_for_cropping"]
    before, after = read_probs(predicted, "bordered"), read_probs(tmp_path / "out", "bordered")
    part = inside(box)
    assert before[part].size < before.size
    tempered = np.sqrt(np.maximum(before.astype(np.float64), 1e-45))
    np.testing.assert_allclose(after[part], (tempered / tempered.sum(0))[part], atol=2e-6)
    away = np.ones(before.shape[1:], dtype=bool)
    away[part[1:]] = False
    assert (after[0][away] == 1).all()
    assert (after[1:][:, away] == 0).all()
    for name in ("plain.nii.gz", "bordered.nii.gz"):
        ours, theirs = sitk.ReadImage(str(tmp_path / "out" / name)), sitk.ReadImage(str(predicted / name))
        np.testing.assert_array_equal(sitk.GetArrayFromImage(ours), sitk.GetArrayFromImage(theirs))
        np.testing.assert_allclose(ours.GetOrigin(), theirs.GetOrigin(), atol=1e-4)
        np.testing.assert_allclose(ours.GetDirection(), theirs.GetDirection(), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_nnunets_ensembling_reads_the_calibrated_folder(predicted: Path, tmp_path: Path) -> None:
    ensemble = pytest.importorskip("nnunetv2.ensembling.ensemble", reason=MISSING)
    handler = pytest.importorskip("nnunetv2.utilities.plans_handling.plans_handler", reason=MISSING)
    readers = pytest.importorskip("nnunetv2.imageio.simpleitk_reader_writer", reason=MISSING)
    postprocess_folder(temperature(2.0, classes=CLASSES), predicted, tmp_path / "out", device=CPU)
    dataset = json.loads((tmp_path / "out" / "dataset.json").read_text())
    labels = handler.PlansManager(str(tmp_path / "out" / "plans.json")).get_label_manager(dataset)

    ensemble.merge_files(
        [str(folder / "plain.npz") for folder in (predicted, tmp_path / "out")],
        str(tmp_path / "merged"),
        ".nii.gz",
        readers.SimpleITKIO(),
        labels,
        True,
    )

    mean = (read_probs(predicted, "plain") + read_probs(tmp_path / "out", "plain")) / 2
    np.testing.assert_allclose(read_probs(tmp_path, "merged"), mean, atol=1e-6)
