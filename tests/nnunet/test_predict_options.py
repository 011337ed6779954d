"""Options of `segcal nnunet predict`: workers, NIfTI maps, several models, members one by one, going on, keeping on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

import segcal.nnunet.predict as predicting
from segcal.apply import apply_calibrator
from segcal.errors import CaseError, FileFormatError, GeometryError, Interrupted, MismatchError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.nnunet.export import export_logits
from segcal.nnunet.model import TrainedModel, load_model
from segcal.nnunet.predict import PredictRun, predict_folder
from segcal.nnunet.predict_steps import PreparedCase
from segcal_cli.main import app
from tests.apply_data import make_fitted, preserving, temperature
from tests.nnunet import untrained

pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; pip install -c constraints.txt '.[nnunet]'")
pytestmark = [pytest.mark.nnunet]

CPU = torch.device("cpu")
CASES = ("case_a", "case_b", "case_c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained 3-D model, a second one with other weights, and three images."""
    root = tmp_path_factory.mktemp("options")
    untrained.write_model(root / "model")
    untrained.write_model(root / "other", near_ties=True)
    untrained.write_images(root / "images", CASES)
    return root


@pytest.fixture(scope="module")
def model(folder: Path) -> TrainedModel:
    return load_model(folder / "model", device=CPU, mirroring=False)


@pytest.fixture(scope="module")
def other(folder: Path) -> TrainedModel:
    return load_model(folder / "other", device=CPU, mirroring=False, folds=(0, 1))


def named(fitted: FittedCalibrator, **how: Any) -> FittedCalibrator:
    """The same calibrator for the classes of the model."""
    return FittedCalibrator(fitted.calibrator, fitted.info.model_copy(update={"classes": untrained.CLASSES, **how}))


def stored(folder: Path, case_id: str = "case_a") -> NDArray[np.float32]:
    values: NDArray[np.float32] = np.load(folder / f"{case_id}.npz")["probabilities"]
    return values


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def softmax(logits: NDArray[Any], t: float = 1.0) -> NDArray[np.float64]:
    z = logits.astype(np.float64) / t
    e = np.exp(z - z.max(0))
    result: NDArray[np.float64] = e / e.sum(0)
    return result


def exported(models: Sequence[TrainedModel], images: Path, out: Path, case_id: str) -> list[NDArray[Any]]:
    """Every member's logits of a case, by the export command."""
    manifest = export_logits(models, images, out).manifest
    members = next(case.members for case in manifest.cases if case.id == case_id)
    return [np.load(manifest.resolve(name))["logits"].astype(np.float64) for name in members]


def test_workers_write_the_bytes_of_the_sequential_run_and_stdout_is_still_one_json_object(
    folder: Path, model: TrainedModel, tmp_path: Path
) -> None:
    """A spatial method, whose sums could depend on the number of threads, and both formats.

    In a process of its own: what nnU-Net prints in a worker would go past every redirection of this one.
    """
    fitted = named(preserving("lts_ti", 3))
    fitted.save(tmp_path / "cal.safetensors")
    how: dict[str, Any] = {"format": "both", "n_preprocessing": 0, "n_export": 0}
    run = predict_folder(model, fitted, folder / "images", tmp_path / "sequential", **how)
    words = ["nnunet", "predict", "-m", folder / "model", "-i", folder / "images", "-o", tmp_path / "workers"]
    words += ["--calibrator", tmp_path / "cal.safetensors", "--format", "both", "--disable_tta", "-device", "cpu"]
    words += ["-npp", 1, "-nps", 1, "--json"]
    code = "from segcal_cli.main import run; run()"
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cases"] == list(run.cases) == list(CASES)
    one, two = contents(tmp_path / "sequential"), contents(tmp_path / "workers")
    assert len(one) == 4 * 3 + 3
    assert one == two


def test_a_killed_worker_ends_the_run_with_the_name_of_its_case(
    folder: Path, model: TrainedModel, tmp_path: Path
) -> None:
    killer = threading.Thread(target=_kill_first_child, daemon=True)
    killer.start()
    with pytest.raises(CaseError, match=r"case_a: the worker process .* died"):
        predict_folder(model, named(temperature(2.0)), folder / "images", tmp_path / "out", n_export=1)
    killer.join()

    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"dataset.json", "plans.json", "segcal_predict.json"}
    record = json.loads((tmp_path / "out" / "segcal_predict.json").read_text())
    assert record["cases"]["case_a"]["status"] == "failed"


def _kill_first_child() -> None:
    for _ in range(6000):
        children = active_children()
        if children:
            os.kill(children[0].pid or 0, signal.SIGKILL)
            return
        time.sleep(0.01)


def broken_images(root: Path) -> Path:
    """Three cases, the second no image at all."""
    untrained.write_images(root, CASES)
    (root / "case_b_0000.nii.gz").write_bytes(b"no image")
    return root


@pytest.mark.parametrize("workers", [0, 1])
def test_a_case_that_cannot_be_read_is_named_and_with_keep_going_the_others_are_done(
    workers: int, model: TrainedModel, tmp_path: Path
) -> None:
    images = broken_images(tmp_path / "images")
    how: dict[str, Any] = {"n_preprocessing": workers}
    with pytest.raises(FileFormatError, match=r"case_b_0000\.nii\.gz: not a readable NIfTI file"):
        predict_folder(model, named(temperature(2.0)), images, tmp_path / "stopped", **how)
    run = predict_folder(model, named(temperature(2.0)), images, tmp_path / "out", keep_going=True, **how)

    assert run.cases == ("case_a", "case_c")
    assert list(run.failed) == ["case_b"]
    assert not list((tmp_path / "out").glob("case_b*"))


def predict(folder: Path, images: Path, out: Path, *options: object, fitted: FittedCalibrator | None = None) -> Any:
    named(fitted or temperature(2.0)).save(out.parent / "cal.safetensors")
    words = ["nnunet", "predict", "-m", folder / "model", "-i", images, "-o", out]
    words += ["--calibrator", out.parent / "cal.safetensors", "--disable_tta", "-device", "cpu", "-npp", 0, "-nps", 0]
    return CliRunner().invoke(app, [str(word) for word in (*words, *options)])


def test_command_goes_on_where_it_stopped_and_lists_failures(folder: Path, tmp_path: Path) -> None:
    images, out = broken_images(tmp_path / "images"), tmp_path / "out"
    result = predict(folder, images, out, "--keep-going", "--json")
    assert result.exit_code == 1
    assert "failed: case_b" in result.stderr
    before = (out / "case_a.npz").stat().st_mtime_ns

    untrained.write_images(images, CASES)  # case_b can be read now
    (out / "case_c.pkl").unlink()
    result = predict(folder, images, out, "--continue_prediction", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["skipped"] == ["case_a"]
    assert json.loads(result.stdout)["cases"] == list(CASES)
    assert (out / "case_a.npz").stat().st_mtime_ns == before
    assert (out / "case_c.pkl").exists()

    result = predict(folder, images, out, "--continue_prediction", "--json", fitted=temperature(3.0))
    assert json.loads(result.stdout)["skipped"] == []
    assert "differs in calibrator_sha256" in result.stderr


def test_a_run_that_is_stopped_says_how_to_go_on(
    folder: Path, model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = predicting.member_logits

    def stopped_at_b(models: Sequence[TrainedModel], case: PreparedCase) -> Any:
        if case.case_id == "case_b":
            raise KeyboardInterrupt
        return original(models, case)

    monkeypatch.setattr(predicting, "member_logits", stopped_at_b)
    with pytest.raises(Interrupted, match=r"1 of 3 cases .* --continue_prediction"):
        predict_folder(model, named(temperature(2.0)), folder / "images", tmp_path / "out")
    monkeypatch.undo()
    run = predict_folder(model, named(temperature(2.0)), folder / "images", tmp_path / "out", resume=True)
    assert run.skipped == ("case_a",)
    assert run.cases == CASES


@pytest.mark.parametrize("reader", ["NibabelIOWithReorient", "SimpleITKIOWithReorient"])
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_nifti_maps_lie_as_the_image_does_whatever_the_reader_turned(reader: str, dtype: str, tmp_path: Path) -> None:
    """Independent of nnU-Net's arrays: in nibabel and in SimpleITK the map's decision is the written segmentation."""
    untrained.write_model(tmp_path / "model", reader=reader)
    images = untrained.write_images(tmp_path / "images", ["a"], orientation="PIR")
    turned = load_model(tmp_path / "model", device=CPU, mirroring=False)
    predict_folder(turned, named(temperature(2.0)), images, tmp_path / "out", format="nifti", dtype=dtype)  # type: ignore[arg-type]

    image, seg = nib.load(images / "a_0000.nii.gz"), nib.load(tmp_path / "out" / "a.nii.gz")
    probs = nib.load(tmp_path / "out" / "probabilities" / "a.nii.gz")
    assert probs.shape == (*image.shape, 3)
    np.testing.assert_allclose(probs.affine, image.affine, atol=1e-4)
    np.testing.assert_array_equal(probs.get_fdata().argmax(-1), np.asarray(seg.dataobj))
    if dtype == "uint16":
        assert probs.get_data_dtype() == np.uint16
        assert probs.dataobj.slope == pytest.approx(1 / 65535)
    itk, itk_seg = (sitk.ReadImage(tmp_path / "out" / name) for name in ("probabilities/a.nii.gz", "a.nii.gz"))
    np.testing.assert_array_equal(sitk.GetArrayFromImage(itk).argmax(0), sitk.GetArrayFromImage(itk_seg))
    np.testing.assert_allclose(itk.GetOrigin()[:3], itk_seg.GetOrigin(), atol=1e-4)
    assert not (tmp_path / "out" / "a.npz").exists()


def test_formats_that_nobody_could_read_are_refused(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    for format, dtype in (("both", "uint16"), ("both", "float16"), ("nnunet", "uint16"), ("nifti", "float16")):
        with pytest.raises(UsageError, match="cannot hold"):
            predict_folder(
                model,
                named(temperature(2.0)),
                folder / "images",
                tmp_path / "out",
                format=format,
                dtype=dtype,  # type: ignore[arg-type]
            )
    assert not (tmp_path / "out").exists()


def test_pictures_have_no_place_in_the_world(tmp_path: Path) -> None:
    from PIL import Image

    untrained.write_png_model(tmp_path / "model")
    (tmp_path / "images").mkdir()
    grey = np.random.default_rng(0).integers(1, 255, (30, 41), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "images" / "a_0000.png")
    with pytest.raises(GeometryError, match="a: cannot be written as NIfTI"):
        predict_folder(
            load_model(tmp_path / "model", device=CPU),
            named(temperature(2.0)),
            tmp_path / "images",
            tmp_path / "out",
            format="nifti",
        )


def test_several_models_pool_all_their_folds(
    folder: Path, model: TrainedModel, other: TrainedModel, tmp_path: Path
) -> None:
    predict_folder([model, other], named(temperature(2.0)), folder / "images", tmp_path / "out")

    members = exported([model, other], folder / "images", tmp_path / "logits", "case_b")
    assert len(members) == 5
    mean = np.mean(members, axis=0)
    expected = softmax(mean, 2.0)
    np.testing.assert_allclose(
        untrained.inside(stored(tmp_path / "out", "case_b")), untrained.inside(expected), atol=1e-5
    )
    seg = untrained.read_segmentation(tmp_path / "out" / "case_b.nii.gz")
    np.testing.assert_array_equal(stored(tmp_path / "out", "case_b").argmax(0), seg)
    record = json.loads((tmp_path / "out" / "segcal_predict.json").read_text())
    assert [list(one["checkpoint_sha256"]) for one in record["models"]] == [["0", "1", "2"], ["0", "1"]]


def test_models_of_other_classes_or_readers_are_refused(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    untrained.write_model(tmp_path / "turning", reader="NibabelIOWithReorient")
    regional = load_model(untrained.write_region_model(tmp_path / "regions"), device=CPU)
    turning = load_model(tmp_path / "turning", device=CPU)
    for second, message in ((regional, "names other channels"), (turning, "reads images with NibabelIOWithReorient")):
        with pytest.raises(MismatchError, match=message):
            predict_folder([model, second], named(temperature(2.0)), folder / "images", tmp_path / "out")


def each(model: Any, fitted: FittedCalibrator, folder: Path, out: Path) -> PredictRun:
    return predict_folder(model, fitted, folder / "images", out, pooling="members-probabilities")


def test_members_one_by_one_are_the_mean_of_calibrated_members(
    folder: Path, other: TrainedModel, tmp_path: Path
) -> None:
    """The segmentation stays nnU-Net's, the map stays the mean, and the voxels where they differ are counted."""
    single = named(temperature(3.0), n_members=1)
    run = each(other, single, folder, tmp_path / "out")
    untrained.nnunet_predict(
        folder / "other", folder / "images", tmp_path / "own", folds=(0, 1), mirroring=False, probabilities=False
    )

    members = exported([other], folder / "images", tmp_path / "logits", "case_a")
    expected = np.mean([softmax(one, 3.0) for one in members], axis=0)
    probs = stored(tmp_path / "out")
    np.testing.assert_allclose(untrained.inside(probs), untrained.inside(expected), atol=3e-6)
    own = untrained.read_segmentation(tmp_path / "own" / "case_a.nii.gz")
    np.testing.assert_array_equal(untrained.read_segmentation(tmp_path / "out" / "case_a.nii.gz"), own)
    assert run.differing["case_a"] == np.count_nonzero(probs.argmax(0) != own) > 0
    assert run.warnings == ()
    record = json.loads((tmp_path / "out" / "segcal_predict.json").read_text())
    assert record["pooling"] == "members-probabilities"
    assert record["fitted_on"] == {"pooling": "logits", "n_members": 1}
    assert record["preserves"] is None

    manifest = export_logits([other], folder / "images", tmp_path / "logits").manifest
    applied = apply_calibrator(
        single, manifest, tmp_path / "applied", device=CPU, pooling="members-probabilities", cases=["case_a"]
    )
    np.testing.assert_allclose(stored(tmp_path / "applied"), probs, atol=2e-6)
    assert applied.differing["case_a"] > 0


def test_which_calibrators_may_be_applied_to_each_member(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    of_probabilities = named(make_fitted("ts", pooling="probabilities"), n_members=3)
    with pytest.raises(MismatchError, match="needs one fitted on single models"):
        each(model, of_probabilities, folder, tmp_path / "refused")
    run = each(model, named(temperature(2.0), n_members=3), folder, tmp_path / "out")
    assert run.warnings == (run.warnings[0],)
    assert "applied to each member alone" in run.warnings[0]
    usual = predict_folder(model, named(temperature(2.0), n_members=1), folder / "images", tmp_path / "usual")
    assert "--pooling members-probabilities" in usual.warnings[0]
