"""`segcal nnunet predict`: nnU-Net's segmentation to the voxel, calibrated probabilities that nnU-Net's tools read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from segcal.apply import apply_calibrator
from segcal.cases import load_case
from segcal.errors import MismatchError
from segcal.fitted import FittedCalibrator
from segcal.io.images import read_grid
from segcal.nnunet.export import export_logits
from segcal.nnunet.model import TrainedModel, load_model
from segcal.nnunet.predict import predict_folder
from segcal_cli.main import app
from tests.apply_data import make_fitted, preserving, temperature
from tests.nnunet import untrained

pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; pip install -c constraints.txt '.[nnunet]'")
pytestmark = [pytest.mark.nnunet]

CPU = torch.device("cpu")
CASES = ("case_a", "case_b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose last two classes are nearly tied everywhere, images, and nnU-Net's own prediction."""
    root = tmp_path_factory.mktemp("predict")
    untrained.write_model(root / "model", near_ties=True)
    untrained.write_images(root / "images", CASES)
    untrained.nnunet_predict(
        root / "model", root / "images", root / "own", folds=(0, 1, 2), mirroring=True, probabilities=False
    )
    return root


@pytest.fixture(scope="module")
def model(folder: Path) -> TrainedModel:
    return load_model(folder / "model", device=CPU)


def named(fitted: FittedCalibrator) -> FittedCalibrator:
    """The same calibrator for the classes of the model."""
    info = fitted.info.model_copy(update={"classes": untrained.CLASSES})
    return FittedCalibrator(fitted.calibrator, info)


def stored(folder: Path, case_id: str) -> NDArray[np.float32]:
    """Probabilities as nnU-Net's tools load them."""
    values: NDArray[np.float32] = np.load(folder / f"{case_id}.npz")["probabilities"]
    return values


@pytest.mark.parametrize("method", ["ts", "ets", "cms_ap", "cms_op", "lts_ti"])
def test_segmentation_of_preserving_methods_is_that_of_nnunet_at_every_voxel(
    method: str, folder: Path, model: TrainedModel, tmp_path: Path
) -> None:
    predict_folder(model, named(preserving(method, 3)), folder / "images", tmp_path / "out", dtype="float16")

    for case_id in CASES:
        own = untrained.read_segmentation(folder / "own" / f"{case_id}.nii.gz")
        written = untrained.read_segmentation(tmp_path / "out" / f"{case_id}.nii.gz")
        np.testing.assert_array_equal(written, own)
        np.testing.assert_array_equal(stored(tmp_path / "out", case_id).argmax(0), own)
        assert set(np.unique(own)) == {0, 1, 2}


def test_near_ties_are_decided_by_half_precision_so_the_reference_is_needed(
    folder: Path, model: TrainedModel, tmp_path: Path
) -> None:
    """Without nnU-Net's own decision the pooled logits would change its segmentation: this data can show it."""
    manifest = export_logits([model], folder / "images", tmp_path / "logits").manifest
    case = load_case(manifest, manifest.cases[0], pooling="logits", device=CPU, with_labels=False)

    own = untrained.read_segmentation(folder / "own" / "case_a.nii.gz")
    assert (untrained.inside(case.decision.numpy()) != untrained.inside(own)).sum() > 10


def test_predict_gives_the_probabilities_of_export_and_apply(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    """A method that changes the decision, so that both take the same one: the pooled logits decide alone."""
    rng = np.random.default_rng(0)
    fitted = named(make_fitted("ms", {"W": np.eye(3) + rng.normal(0, 0.1, (3, 3)), "b": np.array([0.0, 0.5, 0.1])}))
    manifest = export_logits([model], folder / "images", tmp_path / "logits").manifest
    apply_calibrator(fitted, manifest, tmp_path / "applied", device=CPU)
    predict_folder(model, fitted, folder / "images", tmp_path / "predicted")

    for case_id in CASES:
        np.testing.assert_array_equal(stored(tmp_path / "predicted", case_id), stored(tmp_path / "applied", case_id))
        expected = untrained.read_segmentation(tmp_path / "applied" / f"{case_id}.nii.gz")
        np.testing.assert_array_equal(
            untrained.read_segmentation(tmp_path / "predicted" / f"{case_id}.nii.gz"), expected
        )


def test_outside_the_crop_background_is_certain(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    predict_folder(model, named(temperature(3.0)), folder / "images", tmp_path / "out")

    probs = stored(tmp_path / "out", "case_a")
    outside = np.ones(untrained.SHAPE, dtype=bool)
    untrained.inside(outside)[...] = False
    assert (probs[0, outside] == 1).all()
    assert not probs[1:, outside].any()
    assert untrained.inside(probs[1:]).min() > 0


def test_probability_pooling_is_the_mean_that_nnunet_ensembles_take(
    folder: Path, model: TrainedModel, tmp_path: Path
) -> None:
    """Every fold's logits are nnU-Net's to the bit, so only the rounding of the float32 mean is left."""
    predict_folder(model, named(make_fitted("identity", pooling="probabilities")), folder / "images", tmp_path / "out")
    for fold in range(3):
        out = tmp_path / f"fold_{fold}"
        untrained.nnunet_predict(
            folder / "model", folder / "images", out, folds=(fold,), mirroring=True, probabilities=True
        )

    mean = np.mean([stored(tmp_path / f"fold_{fold}", "case_b") for fold in range(3)], axis=0)
    np.testing.assert_allclose(stored(tmp_path / "out", "case_b"), mean, atol=2e-6)


def test_nnunet_ensembles_calibrated_folders(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    from nnunetv2.ensembling.ensemble import merge_files
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    for name, value in (("warm", 2.0), ("hot", 4.0)):
        predict_folder(model, named(temperature(value)), folder / "images", tmp_path / name)
    plans = PlansManager(str(tmp_path / "warm" / "plans.json"))
    dataset = json.loads((tmp_path / "warm" / "dataset.json").read_text())
    (tmp_path / "merged").mkdir()
    merge_files(
        [str(tmp_path / name / "case_a.npz") for name in ("warm", "hot")],
        str(tmp_path / "merged" / "case_a"),
        ".nii.gz",
        plans.image_reader_writer_class(),
        plans.get_label_manager(dataset),
        True,
    )

    mean = (stored(tmp_path / "warm", "case_a") + stored(tmp_path / "hot", "case_a")) / 2
    np.testing.assert_array_equal(stored(tmp_path / "merged", "case_a"), mean)
    grid = read_grid(tmp_path / "merged" / "case_a.nii.gz")
    assert grid.agrees_with(read_grid(folder / "images" / "case_a_0000.nii.gz"))
    assert read_grid(tmp_path / "warm" / "case_a.nii.gz").agrees_with(grid)


def test_region_model_keeps_the_painted_label_map(tmp_path: Path) -> None:
    untrained.write_region_model(tmp_path / "model")
    images = untrained.write_images(tmp_path / "images", CASES, n_channels=2)
    untrained.nnunet_predict(
        tmp_path / "model", images, tmp_path / "own", folds=(0, 1, 2), mirroring=False, probabilities=False
    )
    fitted = temperature(2.0, classes=("whole", "core"), regions=True)
    predict_folder(load_model(tmp_path / "model", device=CPU, mirroring=False), fitted, images, tmp_path / "out")

    for case_id in CASES:
        own = untrained.read_segmentation(tmp_path / "own" / f"{case_id}.nii.gz")
        np.testing.assert_array_equal(untrained.read_segmentation(tmp_path / "out" / f"{case_id}.nii.gz"), own)
        painted = np.zeros_like(own)
        for region, value in zip(stored(tmp_path / "out", case_id), (1, 2), strict=True):
            painted[region > 0.5] = value
        np.testing.assert_array_equal(painted, own)


@pytest.mark.parametrize("reader", ["NibabelIOWithReorient", "SimpleITKIOWithReorient"])
def test_reader_that_reorients_keeps_nnunets_files(reader: str, tmp_path: Path) -> None:
    untrained.write_model(tmp_path / "model", reader=reader)
    images = untrained.write_images(tmp_path / "images", ["a"], orientation="PIR")
    for probabilities in (False, True):
        untrained.nnunet_predict(
            tmp_path / "model",
            images,
            tmp_path / f"own_{probabilities}",
            folds=(0, 1, 2),
            mirroring=False,
            probabilities=probabilities,
        )
    model = load_model(tmp_path / "model", device=CPU, mirroring=False)
    predict_folder(model, named(make_fitted("ts")), images, tmp_path / "out")

    own = untrained.read_segmentation(tmp_path / "own_False" / "a.nii.gz")
    np.testing.assert_array_equal(untrained.read_segmentation(tmp_path / "out" / "a.nii.gz"), own)
    np.testing.assert_allclose(stored(tmp_path / "out", "a"), stored(tmp_path / "own_True", "a"), atol=1e-2)


@pytest.mark.parametrize(("channels", "shape"), [(("grey",), (30, 41)), (("R", "G", "B"), (30, 41, 3))])
def test_pictures_are_predicted_as_nnunet_does(channels: Sequence[str], shape: Sequence[int], tmp_path: Path) -> None:
    """The colours of one file are three channels."""
    untrained.write_png_model(tmp_path / "model", channels)
    images = tmp_path / "images"
    images.mkdir()
    picture = np.random.default_rng(0).integers(1, 255, shape, dtype=np.uint8)
    Image.fromarray(picture).save(images / "a_0000.png")
    untrained.nnunet_predict(
        tmp_path / "model", images, tmp_path / "own", folds=(0, 1, 2), mirroring=True, probabilities=False
    )
    model = load_model(tmp_path / "model", device=CPU)
    predict_folder(model, named(temperature(2.0)), images, tmp_path / "out")
    manifest = export_logits([model], images, tmp_path / "logits").manifest

    own = np.asarray(Image.open(tmp_path / "own" / "a.png"))
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / "a.png")), own)
    assert stored(tmp_path / "out", "a").shape == (3, 1, 30, 41)
    case = load_case(manifest, manifest.cases[0], pooling="logits", device=CPU, with_labels=False)
    assert np.mean(case.decision[0].numpy() != own) < 0.01


@pytest.mark.parametrize(
    ("key", "value"), [("mirroring", False), ("step_size", 0.75), ("folds", [0, 1, 2, 3, 4])], ids=lambda x: str(x)
)
def test_a_difference_to_the_fit_is_a_warning_that_names_it(
    key: str, value: object, folder: Path, model: TrainedModel, tmp_path: Path
) -> None:
    fitted = named(temperature(2.0))
    info = fitted.info.model_copy(update={"prediction": {key: value}})
    run = predict_folder(
        model, FittedCalibrator(fitted.calibrator, info), folder / "images", tmp_path / "out", dtype="float16"
    )

    assert len(run.warnings) == 1
    assert f"prediction.{key} differs" in run.warnings[0]


def test_calibrator_of_other_classes_is_refused_before_anything_is_written(
    folder: Path, model: TrainedModel, tmp_path: Path
) -> None:
    other = temperature(2.0, classes=("background", "kidney", "cyst"))
    with pytest.raises(MismatchError, match="names of classes differ"):
        predict_folder(model, other, folder / "images", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_writes_the_folder_as_nnunet_lays_it_out(folder: Path, tmp_path: Path) -> None:
    named(temperature(2.0)).save(tmp_path / "ts.safetensors")
    command = ["nnunet", "predict", "-m", folder / "model", "-i", folder / "images", "-o", tmp_path / "out"]
    options = ["-f", "0", "1", "--calibrator", tmp_path / "ts.safetensors", "--disable_tta", "-device", "cpu", "--json"]
    options += ["-npp", "0", "-nps", "0"]
    result = CliRunner().invoke(app, [str(word) for word in (*command, *options)])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cases"] == list(CASES)
    per_case = {f"{case_id}{ending}" for case_id in CASES for ending in (".npz", ".pkl", ".nii.gz")}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == per_case | {"dataset.json", "plans.json", "segcal_predict.json"}
    record = json.loads((tmp_path / "out" / "segcal_predict.json").read_text())
    assert record["models"][0]["prediction"] == {"mirroring": False, "step_size": 0.5, "folds": [0, 1]}
    properties = pickle.loads((tmp_path / "out" / "case_a.pkl").read_bytes())
    assert tuple(properties["shape_before_cropping"]) == tuple(untrained.SHAPE[axis] for axis in (2, 0, 1))


@pytest.mark.parametrize("make", [lambda: temperature(1.7), lambda: preserving("cms_ap", 3)], ids=["ts", "cms_ap"])
def test_hippocampus_segmentation_equals_that_of_nnunet(
    make: Callable[[], FittedCalibrator], hippocampus: Path, tmp_path: Path
) -> None:
    """The folds' float32 mean decides otherwise in a voxel of hippocampus_001; nnU-Net's decision is kept there."""
    ids = ("hippocampus_001", "hippocampus_006")
    images = tmp_path / "images"
    images.mkdir()
    for case_id in ids:
        shutil.copy(hippocampus / "images" / f"{case_id}_0000.nii.gz", images)
    trained = load_model(hippocampus / "model", device=CPU, mirroring=False)
    fitted = make()
    info = fitted.info.model_copy(update={"classes": trained.labels.classes})
    predict_folder(trained, FittedCalibrator(fitted.calibrator, info), images, tmp_path / "out")
    untrained.nnunet_predict(
        hippocampus / "model", images, tmp_path / "own", folds=range(5), mirroring=False, probabilities=False
    )

    for case_id in ids:
        own = untrained.read_segmentation(tmp_path / "own" / f"{case_id}.nii.gz")
        np.testing.assert_array_equal(untrained.read_segmentation(tmp_path / "out" / f"{case_id}.nii.gz"), own)
        np.testing.assert_array_equal(stored(tmp_path / "out", case_id).argmax(0), own)
