"""Every kind of model, predicted by nnU-Net itself, through `postprocess`, `hook` and `collect`.

3-D classes with a transposed plan, resampling and a crop; 2-D regions of two input channels with an ignore label;
pictures; readers that turn images to RAS. `export` and `predict` meet the same kinds in their own files.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from segcal.cases import load_case
from segcal.errors import FileFormatError, ManifestError
from segcal.fitted import FittedCalibrator
from segcal.io.dataset_json import read_dataset_json
from segcal.nnunet.collect import collect_out_of_fold
from segcal.nnunet.hook import calibrated_export
from segcal.nnunet.postprocess import postprocess_folder
from segcal_cli.main import app
from tests.apply_data import CPU, temperature
from tests.nnunet import untrained
from tests.nnunet.folders import inside, read_probs

pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; pip install -c constraints.txt '.[nnunet]'")
pytestmark = [pytest.mark.nnunet, pytest.mark.filterwarnings("ignore:.*low contrast image.*")]

FOLDS = (0, 1, 2)
TEMPERATURE = 2.0
WHOLE_PICTURE = ((0, 1), (0, 30), (0, 41))


@dataclass(frozen=True)
class Kind:
    """A model folder, one image, and what nnU-Net's predictor makes of it with all folds and with each."""

    root: Path
    ending: str
    box: tuple[tuple[int, int], ...]
    """Where the network predicted, in the order of the saved array."""
    regions: bool

    @property
    def own(self) -> Path:
        return self.root / "own"

    def segmentation(self, folder: Path) -> NDArray[np.uint8]:
        return _read(folder / f"a{self.ending}")

    def calibrator(self) -> FittedCalibrator:
        labels = read_dataset_json(self.root / "model" / "dataset.json")
        names = labels.classes or tuple(name for name, _ in labels.regions or ())
        return temperature(TEMPERATURE, classes=names, regions=self.regions)

    def check(self, folder: Path) -> None:
        """nnU-Net's own decision; its own numbers over T inside the box, certain background outside."""
        np.testing.assert_array_equal(self.segmentation(folder), self.segmentation(self.own))
        before, after = read_probs(self.own, "a").astype(np.float64), read_probs(folder, "a")
        roots = np.sqrt(before)
        expected = roots / (roots + np.sqrt(1 - before)) if self.regions else roots / roots.sum(0)
        # Where a sigmoid has rounded to 1 in single precision, the number no longer says how far it went.
        known = before < 0.999 if self.regions else np.ones_like(before, dtype=bool)
        part = inside(self.box)
        assert known[part].mean() > 0.5
        np.testing.assert_allclose(after[part][known[part]], expected[part][known[part]], atol=1e-5)
        away = np.ones(before.shape[1:], dtype=bool)
        away[part[1:]] = False
        np.testing.assert_array_equal(after[:, away], before[:, away])
        np.testing.assert_array_equal(after[0, away], 0 if self.regions else 1)


def _read(path: Path) -> NDArray[np.uint8]:
    if path.suffix == ".png":
        return np.asarray(Image.open(path))
    return untrained.read_segmentation(path)


def classes_3d(root: Path) -> Kind:
    untrained.write_model(root / "model")
    untrained.write_images(root / "images", ["a"])
    return Kind(root, ".nii.gz", untrained.CROP, regions=False)


def regions_2d(root: Path) -> Kind:
    untrained.write_region_model(root / "model")
    untrained.write_images(root / "images", ["a"], n_channels=2)
    return Kind(root, ".nii.gz", untrained.CROP, regions=True)


def pictures(root: Path) -> Kind:
    untrained.write_png_model(root / "model")
    (root / "images").mkdir()
    grey = np.random.default_rng(0).integers(1, 255, (30, 41), dtype=np.uint8)
    Image.fromarray(grey).save(root / "images" / "a_0000.png")
    return Kind(root, ".png", WHOLE_PICTURE, regions=False)


def turned(reader: str) -> Callable[[Path], Kind]:
    def make(root: Path) -> Kind:
        untrained.write_model(root / "model", reader=reader)
        untrained.write_images(root / "images", ["a"], orientation="PIR")
        return Kind(root, ".nii.gz", _nonzero_in_ras(root / "images" / "a_0000.nii.gz"), regions=False)

    return make


def _nonzero_in_ras(path: Path) -> tuple[tuple[int, int], ...]:
    import nibabel

    values = np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj).T
    z, y, x = ((int(at.min()), int(at.max()) + 1) for at in np.nonzero(values))
    return z, y, x


KINDS: dict[str, Callable[[Path], Kind]] = {
    "3d": classes_3d,
    "regions": regions_2d,
    "png": pictures,
    "nibabel_ras": turned("NibabelIOWithReorient"),
    "itk_ras": turned("SimpleITKIOWithReorient"),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    made = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    model, images = made.root / "model", made.root / "images"
    untrained.nnunet_predict(model, images, made.own, folds=FOLDS, mirroring=False, probabilities=True)
    # nnU-Net writes its validation with the same function, from one fold.
    validation = model / "fold_1" / "validation"
    untrained.nnunet_predict(model, images, validation, folds=(1,), mirroring=False, probabilities=True)
    for name in ("dataset.json", "plans.json"):
        (made.own / name).write_bytes((model / name).read_bytes())
    return made


def test_postprocess(kind: Kind, tmp_path: Path) -> None:
    done = postprocess_folder(kind.calibrator(), kind.own, tmp_path / "out", device=CPU)

    assert done.notes == []
    assert done.changed == {"a": 0}
    kind.check(tmp_path / "out")


def test_hook(kind: Kind, tmp_path: Path) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    kind.calibrator().save(tmp_path / "ts.safetensors")
    predictor = nnUNetPredictor(use_mirroring=False, device=CPU, allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(kind.root / "model"), FOLDS)
    files = [[str(path) for path in sorted((kind.root / "images").iterdir())]]
    with calibrated_export(tmp_path / "ts.safetensors"):
        predictor.predict_from_files_sequential(files, [str(tmp_path / "a")], True)

    kind.check(tmp_path)


def test_collect(kind: Kind, tmp_path: Path) -> None:
    """With the segmentation of all folds in the place of the label, as it lies in the file."""
    plans = json.loads((kind.root / "model" / "plans.json").read_bytes())
    if plans["image_reader_writer"].endswith("WithReorient"):
        with pytest.raises(ManifestError, match="turned the predictions to RAS"):
            collect_out_of_fold(kind.root / "model", labels=kind.own, out=tmp_path / "m.yaml")
        return

    manifest = collect_out_of_fold(kind.root / "model", labels=kind.own, out=tmp_path / "m.yaml").manifest

    (case,) = manifest.cases
    whole = read_probs(kind.own, "a").shape[1:]
    assert case.crop == (None if kind.box == tuple((0, n) for n in whole) else kind.box)
    loaded = load_case(manifest, case, pooling="logits", device=CPU, with_labels=True)
    validated = kind.segmentation(kind.root / "model" / "fold_1" / "validation").reshape(whole)
    part = inside(kind.box)[1:]
    if not kind.regions:
        np.testing.assert_array_equal(loaded.decision.numpy()[part], validated[part])
        assert loaded.labels is not None
        np.testing.assert_array_equal(loaded.labels.numpy()[part], kind.segmentation(kind.own).reshape(whole)[part])
        return
    assert manifest.ignore_label == 3
    whole_organ, core = loaded.decision.numpy()[:, *part]
    np.testing.assert_array_equal(np.where(core, 2, np.where(whole_organ, 1, 0)), validated[part])


@pytest.mark.parametrize("command", ["export", "predict", "postprocess"])
def test_missing_cuda_is_said_before_anything_is_done(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    temperature(TEMPERATURE).save(tmp_path / "ts.safetensors")
    untrained.write_model(tmp_path / "model")
    untrained.write_images(tmp_path / "images", ["a"])
    calibrator = ["--calibrator", tmp_path / "ts.safetensors"]
    words = {
        "export": ["-m", tmp_path / "model", "-i", tmp_path / "images", "-o", tmp_path / "out"],
        "predict": ["-m", tmp_path / "model", "-i", tmp_path / "images", "-o", tmp_path / "out", *calibrator],
        "postprocess": [tmp_path / "images", "--out", tmp_path / "out", *calibrator],
    }[command]
    result = CliRunner().invoke(app, ["nnunet", command, *map(str, words), "--device", "cuda"])

    assert result.exit_code == 2
    assert "device 'cuda' is not available to torch here, only cpu" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_predicts_as_the_cpu_does(tmp_path: Path) -> None:
    from segcal.nnunet.model import load_model
    from segcal.nnunet.predict import predict_folder

    made = classes_3d(tmp_path)
    for name in ("cpu", "cuda"):
        model = load_model(tmp_path / "model", device=torch.device(name))
        predict_folder(model, made.calibrator(), tmp_path / "images", tmp_path / name)

    # Half precision inside the network, which nnU-Net uses on CUDA only.
    there, here = (read_probs(tmp_path / name, "a") for name in ("cuda", "cpu"))
    assert np.abs(there - here).max() < 0.05


def test_hook_and_predictor_open_no_checkpoint_that_would_run_code(tmp_path: Path) -> None:
    from segcal.nnunet import CalibratedPredictor
    from segcal.nnunet.hook import run_entry_point

    made = classes_3d(tmp_path)
    made.calibrator().save(tmp_path / "ts.safetensors")
    path = tmp_path / "model" / "fold_0" / "checkpoint_final.pth"
    torch.save({**torch.load(path, weights_only=False), "extra": Path}, path)
    where = ["-i", tmp_path / "images", "-o", tmp_path / "out", "-m", tmp_path / "model", "-f", "0", "-device", "cpu"]
    command = ["nnUNetv2_predict_from_modelfolder", *map(str, where), "-npp", "0", "-nps", "0"]

    threads = torch.get_num_threads()
    try:
        with pytest.raises(FileFormatError, match="would run code"):
            run_entry_point(tmp_path / "ts.safetensors", command)
    finally:
        torch.set_num_threads(threads)
    predictor = CalibratedPredictor(tmp_path / "ts.safetensors", use_mirroring=False, device=CPU, allow_tqdm=False)
    with pytest.raises(pickle.UnpicklingError):
        predictor.initialize_from_trained_model_folder(str(tmp_path / "model"), (0,))
