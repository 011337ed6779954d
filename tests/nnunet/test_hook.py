"""Calibration inside nnU-Net's own run: its segmentation untouched, its probabilities calibrated, workers included."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import softmax

from segcal.checks.calibrated_before import calibrator_of
from segcal.errors import CaseError, MismatchError, MissingFileError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.nnunet.hook import (
    CALIBRATOR_VARIABLE,
    calibrated_export,
    environment_calibrator,
    export_calibrated,
    run_entry_point,
)
from segcal.nnunet.postprocess import postprocess_folder
from tests.apply_data import make_fitted, temperature
from tests.nnunet import untrained

pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; pip install -c constraints.txt '.[nnunet]'")
pytestmark = [pytest.mark.nnunet]

CPU = torch.device("cpu")
IDS = ("hippocampus_001", "hippocampus_006")
TEMPERATURE = 1.7


@dataclass(frozen=True)
class Run:
    """Images, a calibrator, and what nnU-Net itself writes for them without and with probabilities."""

    root: Path
    model: Path
    calibrator: Path

    def files(self) -> list[list[str]]:
        return [[str(self.root / "images" / f"{case_id}_0000.nii.gz")] for case_id in IDS]

    def expected(self, case_id: str) -> NDArray[np.float64]:
        """softmax(z / T) from nnU-Net's own probabilities: z is log p up to a constant of the voxel."""
        probs = np.load(self.root / "own_True" / f"{case_id}.npz")["probabilities"].astype(np.float64)
        with np.errstate(divide="ignore"):
            return np.asarray(softmax(np.log(probs) / TEMPERATURE, axis=0))

    def check(self, out: Path, *, probabilities: bool) -> None:
        for case_id in IDS:
            own = untrained.read_segmentation(self.root / f"own_{probabilities}" / f"{case_id}.nii.gz")
            np.testing.assert_array_equal(untrained.read_segmentation(out / f"{case_id}.nii.gz"), own)
            written = np.load(out / f"{case_id}.npz")["probabilities"]
            assert written.dtype == np.float32
            np.testing.assert_allclose(written, self.expected(case_id), atol=1e-5)
            np.testing.assert_array_equal(written.argmax(0), own)
            assert (out / f"{case_id}.pkl").is_file()


def for_hippocampus(fitted: FittedCalibrator, model: Path) -> FittedCalibrator:
    from segcal.io.dataset_json import read_dataset_json

    info = fitted.info.model_copy(update={"classes": read_dataset_json(model / "dataset.json").classes})
    return FittedCalibrator(fitted.calibrator, info)


@pytest.fixture(scope="module")
def run(hippocampus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("hook")
    model = hippocampus / "model"
    (root / "images").mkdir()
    for case_id in IDS:
        shutil.copy(hippocampus / "images" / f"{case_id}_0000.nii.gz", root / "images")
    for probabilities in (False, True):
        untrained.nnunet_predict(
            model,
            root / "images",
            root / f"own_{probabilities}",
            folds=range(5),
            mirroring=False,
            probabilities=probabilities,
        )
    for_hippocampus(temperature(TEMPERATURE), model).save(root / "ts.safetensors")
    return Run(root, model, root / "ts.safetensors")


@pytest.fixture(scope="module")
def plain(run: Run) -> Any:
    """nnU-Net's own predictor with all folds."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(use_mirroring=False, device=CPU, allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(run.model), tuple(range(5)))
    return predictor


@pytest.fixture(scope="module")
def calibrated(run: Run) -> Any:
    from segcal.nnunet import CalibratedPredictor

    predictor = CalibratedPredictor(run.calibrator, use_mirroring=False, device=CPU, allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(run.model), tuple(range(5)))
    return predictor


def image(run: Run, plain: Any) -> tuple[NDArray[np.float32], dict[str, Any]]:
    array, properties = plain.plans_manager.image_reader_writer_class().read_images(run.files()[0])
    return array, properties


@pytest.mark.parametrize("probabilities", [False, True])
def test_unmodified_predictor_writes_calibrated_probabilities(
    probabilities: bool, run: Run, plain: Any, tmp_path: Path
) -> None:
    with calibrated_export(run.calibrator):
        plain.predict_from_files_sequential(run.files(), [str(tmp_path / name) for name in IDS], probabilities)
    run.check(tmp_path, probabilities=probabilities)


def test_spawned_workers_calibrate_too(run: Run, plain: Any, tmp_path: Path) -> None:
    out = [str(tmp_path / name) for name in IDS]
    with warnings.catch_warnings(), calibrated_export(run.calibrator):
        warnings.simplefilter("ignore")  # of nnU-Net's pools
        plain.predict_from_files(
            run.files(), out, True, num_processes_preprocessing=1, num_processes_segmentation_export=1
        )
    run.check(tmp_path, probabilities=True)


def test_functions_and_environment_are_restored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnunetv2.inference import export_prediction, predict_from_raw_data

    for before in (None, "another"):
        if before is not None:
            monkeypatch.setenv(CALIBRATOR_VARIABLE, before)
        with calibrated_export(run.calibrator):
            assert os.environ[CALIBRATOR_VARIABLE] == str(run.calibrator)
            assert predict_from_raw_data.export_prediction_from_logits.func is export_calibrated
        with pytest.raises(KeyError), calibrated_export(run.calibrator):
            raise KeyError
        assert os.environ.get(CALIBRATOR_VARIABLE) == before
        for name in ("export_prediction_from_logits", "convert_predicted_logits_to_segmentation_with_correct_shape"):
            assert getattr(predict_from_raw_data, name) is getattr(export_prediction, name)


def test_calibrator_is_asked_for_outside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CALIBRATOR_VARIABLE, raising=False)
    with pytest.raises(UsageError, match="calibrated_export"):
        environment_calibrator()


def test_calibrator_of_pooled_probabilities_is_refused(run: Run, plain: Any, tmp_path: Path) -> None:
    from segcal.nnunet import CalibratedPredictor, calibrated_probabilities

    fitted = for_hippocampus(make_fitted("ts", pooling="probabilities"), run.model)
    fitted.save(tmp_path / "other.safetensors")
    with (
        pytest.raises(MismatchError, match="fitted on pooled probabilities"),
        calibrated_export(tmp_path / "other.safetensors"),
    ):
        pass
    assert CALIBRATOR_VARIABLE not in os.environ
    with pytest.raises(MismatchError, match="fitted on pooled probabilities"):
        CalibratedPredictor(tmp_path / "other.safetensors", device=CPU)
    with pytest.raises(MismatchError, match="fitted on pooled probabilities"):
        calibrated_probabilities(plain, *image(run, plain), fitted)


def test_calibrator_of_other_classes_writes_nothing(run: Run, plain: Any, tmp_path: Path) -> None:
    temperature(2.0, classes=("background", "kidney", "cyst")).save(tmp_path / "other.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(MismatchError, match="classes differ"), calibrated_export(tmp_path / "other.safetensors"):
        plain.predict_from_files_sequential(run.files()[:1], [str(tmp_path / "out" / IDS[0])], True)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(IDS[0])]


def test_calibrated_predictor_writes_as_nnunet_does(run: Run, calibrated: Any, tmp_path: Path) -> None:
    calibrated.predict_from_files_sequential(run.files(), [str(tmp_path / name) for name in IDS], True)
    run.check(tmp_path, probabilities=True)
    (tmp_path / "quiet").mkdir()
    calibrated.predict_from_files_sequential(run.files()[:1], [str(tmp_path / "quiet" / IDS[0])], False)
    assert not list((tmp_path / "quiet").glob("*.npz"))  # not asked for
    own = untrained.read_segmentation(run.root / "own_False" / f"{IDS[0]}.nii.gz")
    np.testing.assert_array_equal(untrained.read_segmentation(tmp_path / "quiet" / f"{IDS[0]}.nii.gz"), own)


def test_one_image_array(run: Run, plain: Any, calibrated: Any) -> None:
    from segcal.nnunet import calibrated_probabilities

    array, properties = image(run, plain)
    segmentation, probs = calibrated.predict_single_npy_array(array, properties, None, None, True)
    own, uncalibrated = plain.predict_single_npy_array(array, properties, None, None, True)

    np.testing.assert_array_equal(segmentation, own)
    np.testing.assert_allclose(probs, run.expected(IDS[0]), atol=1e-5)
    assert np.abs(probs - uncalibrated).max() > 0.05
    np.testing.assert_array_equal(calibrated_probabilities(plain, array, properties, calibrated.fitted), probs)
    np.testing.assert_array_equal(calibrated.predict_single_npy_array(array, properties), own)


@pytest.mark.parametrize(("key", "value"), [("mirroring", True), ("step_size", 0.75), ("folds", [0, 1])])
def test_predictor_warns_of_another_way_to_predict(key: str, value: object, run: Run, tmp_path: Path) -> None:
    from segcal.nnunet import CalibratedPredictor

    fitted = for_hippocampus(temperature(2.0), run.model)
    info = fitted.info.model_copy(update={"prediction": {key: value}})
    FittedCalibrator(fitted.calibrator, info).save(tmp_path / "ts.safetensors")
    predictor = CalibratedPredictor(tmp_path / "ts.safetensors", use_mirroring=False, device=CPU, allow_tqdm=False)
    with pytest.warns(UserWarning, match=rf"prediction\.{key} differs"):
        predictor.initialize_from_trained_model_folder(str(run.model), (0,))


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("regions", [False, True])
def test_plan_that_transposes_resamples_and_crops(regions: bool, save: bool, tmp_path: Path) -> None:
    """Outside the crop background is certain; inside the map is that of nnU-Net's own numbers over T."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    (untrained.write_region_model if regions else untrained.write_model)(tmp_path / "model")
    images = untrained.write_images(tmp_path / "images", ["a"], n_channels=2 if regions else 1)
    for probabilities in (False, True):
        untrained.nnunet_predict(
            tmp_path / "model",
            images,
            tmp_path / f"own_{probabilities}",
            folds=(0, 1, 2),
            mirroring=False,
            probabilities=probabilities,
        )
    classes = ("whole", "core") if regions else untrained.CLASSES
    temperature(2.0, classes=classes, regions=regions).save(tmp_path / "ts.safetensors")
    predictor = nnUNetPredictor(use_mirroring=False, device=CPU, allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(tmp_path / "model"), (0, 1, 2))
    (tmp_path / "out").mkdir()
    with calibrated_export(tmp_path / "ts.safetensors"):
        files = [[str(path) for path in sorted(images.iterdir())]]
        predictor.predict_from_files_sequential(files, [str(tmp_path / "out" / "a")], save)

    own = np.load(tmp_path / "own_True" / "a.npz")["probabilities"].astype(np.float64)
    written = np.load(tmp_path / "out" / "a.npz")["probabilities"]
    roots = np.sqrt(own)
    expected = roots / (roots + np.sqrt(1 - own)) if regions else roots / roots.sum(0)
    # Where nnU-Net's sigmoid has rounded to 1 in single precision, its own number no longer says how far it went.
    known = own < 0.999 if regions else np.ones_like(own, dtype=bool)
    assert known.mean() > 0.5
    np.testing.assert_allclose(written[known], expected[known], atol=1e-5)
    np.testing.assert_array_equal(
        untrained.read_segmentation(tmp_path / "out" / "a.nii.gz"),
        untrained.read_segmentation(tmp_path / f"own_{save}" / "a.nii.gz"),
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """An untrained model, two images, and `ts.safetensors` for its classes."""
    untrained.write_model(tmp_path / "model")
    untrained.write_images(tmp_path / "images", ["a", "b"])
    temperature(TEMPERATURE, classes=untrained.CLASSES).save(tmp_path / "ts.safetensors")
    return tmp_path


def test_going_on_takes_only_maps_of_this_calibrator_for_finished(small: Path) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    def go_on(temperature_now: float) -> None:
        fitted = temperature(temperature_now, classes=untrained.CLASSES)
        fitted.save(small / "now.safetensors")
        with calibrated_export(small / "now.safetensors"):
            predictor.predict_from_files_sequential(
                [[str(path)] for path in sorted((small / "images").iterdir())],
                [str(out / case_id) for case_id in ("a", "b")],
                False,
                overwrite=False,
            )
        assert {calibrator_of(out / f"{case_id}.npz") for case_id in ("a", "b")} == {fitted.sha256}

    out = small / "out"
    untrained.nnunet_predict(small / "model", small / "images", out, folds=(0,), mirroring=False, probabilities=True)
    assert calibrator_of(out / "a.npz") is None
    (out / "b.npz").unlink()
    predictor = nnUNetPredictor(use_mirroring=False, device=CPU, allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(small / "model"), (0,))

    go_on(2.0)
    written = (out / "a.npz").stat().st_mtime_ns
    (out / "b.nii.gz").unlink()
    go_on(2.0)
    assert (out / "a.npz").stat().st_mtime_ns == written
    assert (out / "b.nii.gz").is_file()
    go_on(3.0)


def test_maps_of_the_hook_are_not_calibrated_a_second_time(small: Path) -> None:
    with calibrated_export(small / "ts.safetensors") as fitted:
        untrained.nnunet_predict(
            small / "model", small / "images", small / "out", folds=(0,), mirroring=False, probabilities=True
        )
    (small / "out" / "dataset.json").write_bytes((small / "model" / "dataset.json").read_bytes())

    with pytest.raises(MismatchError, match="holds maps that segcal has calibrated"):
        postprocess_folder(fitted, small / "out", small / "twice", device=CPU)


@pytest.mark.parametrize("folds", ["all", ("all",), ("0", "1"), None])
def test_folds_are_compared_however_nnunet_takes_them(folds: Any, small: Path) -> None:
    from segcal.nnunet import CalibratedPredictor

    shutil.copytree(small / "model" / "fold_0", small / "model" / "fold_all")
    shutil.rmtree(small / "model" / "fold_2")
    fitted = temperature(2.0, classes=untrained.CLASSES)
    info = fitted.info.model_copy(update={"prediction": {"folds": ["all"]}})
    FittedCalibrator(fitted.calibrator, info).save(small / "all.safetensors")
    predictor = CalibratedPredictor(small / "all.safetensors", device=CPU, allow_tqdm=False)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        predictor.initialize_from_trained_model_folder(str(small / "model"), folds)
    differ = [str(one.message) for one in said if "prediction.folds differs" in str(one.message)]
    assert len(differ) == (0 if folds in ("all", ("all",)) else 1)
    assert all("applied with [0, 1]" in text for text in differ)


def test_what_is_wrong_with_a_command_is_said_before_anything_is_predicted(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(calibrator: str, *, images: str = "images", device: str = "cpu") -> list[str]:
        said: list[str] = []
        words = ["-m", small / "model", "-i", small / images, "-o", small / "out", "-device", device, "-f", "0"]
        command = ["nnUNetv2_predict_from_modelfolder", *map(str, words), "-step_size", "0.75"]
        run_entry_point(small / calibrator, command, warn=said.append)
        return said

    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("torch.set_num_interop_threads", lambda _: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (small / "empty").mkdir()
    temperature(2.0, classes=("background", "a", "b")).save(small / "foreign.safetensors")
    fitted = temperature(2.0, classes=untrained.CLASSES)
    info = fitted.info.model_copy(update={"prediction": {"step_size": 0.5}})
    FittedCalibrator(fitted.calibrator, info).save(small / "half.safetensors")

    with pytest.raises(MismatchError, match="names of classes differ"):
        hook("foreign.safetensors")
    with pytest.raises(MissingFileError, match=r"empty: no image named `<case>_0000\.nii\.gz`"):
        hook("ts.safetensors", images="empty")
    with pytest.raises(UsageError, match=r"'cuda' is not available .*-device cpu"):
        hook("ts.safetensors", device="cuda")
    with pytest.raises(CaseError, match=r"nnUNetv2_predict_from_modelfolder failed \(AssertionError: -device must be"):
        hook("ts.safetensors", device="tpu")
    nothing = "nnunetv2.inference.predict_from_raw_data.nnUNetPredictor.predict_from_files"
    monkeypatch.setattr(nothing, lambda *_, **__: None)
    (sentence,) = hook("half.safetensors")
    assert "prediction.step_size differs: fitted with 0.5, applied with 0.75" in sentence


def test_only_predict_commands_are_run(run: Run) -> None:
    for command in ([], ["nnUNetv2_train", "4"]):
        with pytest.raises(UsageError, match="expected one of nnUNetv2_predict"):
            run_entry_point(run.calibrator, command)


def test_json_of_the_command_is_free_of_what_nnunet_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from segcal_cli.main import app

    monkeypatch.setattr(
        "segcal.nnunet.hook.run_entry_point", lambda calibrator, command, warn: print("Please cite", command)
    )
    words = ["nnunet", "hook", "--json", "ts.safetensors", "--", "nnUNetv2_predict", "-d", "4", "--disable_tta"]
    result = CliRunner().invoke(app, words)
    assert json.loads(result.stdout)["command"] == ["nnUNetv2_predict", "-d", "4", "--disable_tta"]


@pytest.mark.slow
def test_command_runs_nnunets_entry_point(run: Run, tmp_path: Path) -> None:
    """nnU-Net's command takes all cores, and their number changes the rounding: the reference is made with as many."""
    from typer.testing import CliRunner

    from segcal_cli.main import app

    words = ["-m", run.model, "-i", run.root / "images", "-o", tmp_path / "out", "--disable_tta", "-device", "cpu"]
    command = ["nnUNetv2_predict_from_modelfolder", *words, "-npp", "1", "-nps", "1", "-f", "0", "1", "2", "3", "4"]
    threads, arguments = torch.get_num_threads(), sys.argv
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nnU-Net's pools
            result = CliRunner().invoke(app, ["nnunet", "hook", str(run.calibrator), "--", *map(str, command)])
        assert result.exit_code == 0, result.output
        assert sys.argv is arguments
        torch.set_num_threads(multiprocessing.cpu_count())
        for probabilities in (False, True):
            own = tmp_path / f"own_{probabilities}"
            untrained.nnunet_predict(
                run.model, run.root / "images", own, folds=range(5), mirroring=False, probabilities=probabilities
            )
    finally:
        torch.set_num_threads(threads)
    Run(tmp_path, run.model, run.calibrator).check(tmp_path / "out", probabilities=False)
