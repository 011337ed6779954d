"""Exported logits are what nnU-Net computes, where the image has them, and never from cases seen in training."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from segcal.errors import CaseError, FileFormatError, MissingFileError, UsageError
from segcal.io.members import read_member
from segcal.manifest import Manifest
from segcal.nnunet import model as model_module
from segcal.nnunet.export import export_logits
from segcal.nnunet.model import TrainedModel, load_model
from segcal_cli.main import app
from tests.nnunet import untrained

pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; pip install -c constraints.txt '.[nnunet]'")
pytestmark = [pytest.mark.nnunet]

CPU = torch.device("cpu")
CASES = ("case_a", "case_b")

PROBABILITY_TOLERANCE = 1e-2
"""nnU-Net sums the folds in half precision before it resamples the mean to half precision; the mean of the exported
folds is taken afterwards and is exact. Half precision has steps of 0.008 for logits of 8 to 16. Measured: 0.004."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` (three untrained folds) and `images` (two cases)."""
    root = tmp_path_factory.mktemp("export")
    untrained.write_model(root / "model")
    untrained.write_images(root / "images", CASES)
    return root


@pytest.fixture(scope="module")
def model(folder: Path) -> TrainedModel:
    return load_model(folder / "model", device=CPU)


@pytest.fixture(scope="module")
def exported(folder: Path, model: TrainedModel) -> Manifest:
    return export_logits([model], folder / "images", folder / "logits").manifest


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(0, keepdims=True))
    return shifted / shifted.sum(0, keepdims=True)


def test_softmax_of_the_mean_exported_logits_is_what_nnunet_saves(
    folder: Path, exported: Manifest, tmp_path: Path
) -> None:
    untrained.nnunet_predict(
        folder / "model", folder / "images", tmp_path / "own", folds=(0, 1, 2), mirroring=True, probabilities=True
    )
    for case in exported.cases:
        members = [read_member(exported.resolve(name), kind="logits").values for name in case.members]
        mean = np.mean([values.astype(np.float64) for values in members], axis=0)
        own = np.load(tmp_path / "own" / f"{case.id}.npz")["probabilities"]

        assert mean.shape == own.shape == (3, *untrained.SHAPE)
        difference = np.abs(softmax(untrained.inside(mean)) - untrained.inside(own))
        assert difference.max() < PROBABILITY_TOLERANCE
        # Outside the crop nnU-Net writes certain background, inside nothing of the kind.
        certain = (own[0] == 1) & (own[1:] == 0).all(0)
        assert certain.sum() == certain.size - untrained.inside(certain).size


def test_every_exported_member_is_what_nnunet_computes_for_that_fold_alone(
    folder: Path, exported: Manifest, tmp_path: Path
) -> None:
    untrained.nnunet_predict(
        folder / "model", folder / "images", tmp_path / "own", folds=(1,), mirroring=True, probabilities=True
    )
    for case_id in CASES:
        logits = read_member(exported.resolve(f"fold_1/{case_id}.npz"), kind="logits").values
        own = np.load(tmp_path / "own" / f"{case_id}.npz")["probabilities"]
        np.testing.assert_allclose(
            untrained.inside(softmax(logits.astype(np.float64))), untrained.inside(own), rtol=1e-6, atol=1e-7
        )


def test_crop_is_the_box_that_is_not_zero_and_nothing_is_filled_in_outside(exported: Manifest) -> None:
    for name in exported.cases[0].members:
        member = read_member(exported.resolve(name), kind="logits")

        assert member.crop == untrained.CROP
        assert member.values.dtype == np.float16
        outside = np.ones(untrained.SHAPE, dtype=bool)
        untrained.inside(outside)[...] = False
        assert not member.values[:, outside].any()
        assert untrained.inside(member.values).any(axis=0).all()


def test_sidecar_says_how_the_member_was_predicted(folder: Path, exported: Manifest) -> None:
    sidecar = json.loads((exported.root / "fold_1" / "case_a.json").read_text())
    checkpoint = (folder / "model" / "fold_1" / "checkpoint_final.pth").read_bytes()

    assert sidecar["checkpoint_sha256"] == hashlib.sha256(checkpoint).hexdigest()
    known = {key: sidecar[key] for key in ("fold", "mirroring", "step_size", "configuration", "reader")}
    expected = {"fold": 1, "mirroring": True, "step_size": 0.5, "configuration": "tiny", "reader": "SimpleITKIO"}
    assert known == expected
    assert sidecar["crop"] == [list(side) for side in untrained.CROP]
    assert sidecar["nnunetv2"]


def test_manifest_knows_classes_members_and_how_they_were_predicted(exported: Manifest) -> None:
    assert exported.classes == untrained.CLASSES
    assert [case.id for case in exported.cases] == list(CASES)
    assert exported.cases[1].members == tuple(f"fold_{k}/case_b.npz" for k in range(3))
    assert exported.prediction is not None
    assert exported.prediction.model_dump() == {"mirroring": True, "step_size": 0.5, "folds": (0, 1, 2)}
    assert exported.resolve(exported.cases[0].image or "").is_file()


def test_region_model_exports_log_odds_of_its_regions(tmp_path: Path) -> None:
    untrained.write_region_model(tmp_path / "model")
    images = untrained.write_images(tmp_path / "images", ["a"], n_channels=2)
    manifest = export_logits(
        [load_model(tmp_path / "model", device=CPU, mirroring=False)], images, tmp_path / "out"
    ).manifest
    untrained.nnunet_predict(
        tmp_path / "model", images, tmp_path / "own", folds=(0, 1, 2), mirroring=False, probabilities=True
    )

    members = [read_member(manifest.resolve(name), kind="logits").values for name in manifest.cases[0].members]
    log_odds = np.mean([values.astype(np.float64) for values in members], axis=0)
    own = np.load(tmp_path / "own" / "a.npz")["probabilities"]
    assert manifest.class_names == ("whole", "core")
    assert (manifest.regions_class_order, manifest.ignore_label) == ((1, 2), 3)
    difference = np.abs(1 / (1 + np.exp(-untrained.inside(log_odds))) - untrained.inside(own))
    assert difference.max() < PROBABILITY_TOLERANCE


@pytest.mark.parametrize("orientation", ["RAS", "LPS", "PIR", "SAL"])
@pytest.mark.parametrize("reader", ["NibabelIOWithReorient", "SimpleITKIOWithReorient"])
def test_reader_that_reorients_still_exports_in_the_order_of_the_file(
    reader: str, orientation: str, tmp_path: Path
) -> None:
    untrained.write_model(tmp_path / "model", reader=reader)
    images = untrained.write_images(tmp_path / "images", ["a"], orientation=orientation)
    one_fold = load_model(tmp_path / "model", folds=[0], device=CPU, mirroring=False)
    manifest = export_logits([one_fold], images, tmp_path / "out").manifest
    untrained.nnunet_predict(
        tmp_path / "model", images, tmp_path / "own", folds=[0], mirroring=False, probabilities=False
    )

    member = read_member(manifest.resolve("fold_0/a.npz"), kind="logits")
    image = untrained.read_segmentation(images / "a_0000.nii.gz")
    assert member.crop == tuple((int(at.min()), int(at.max()) + 1) for at in np.nonzero(image))
    own = untrained.read_segmentation(tmp_path / "own" / "a.nii.gz")
    np.testing.assert_array_equal(member.values.argmax(0), own)
    assert own.any()


def test_folds_of_several_model_folders_are_members_side_by_side(
    folder: Path, model: TrainedModel, exported: Manifest, tmp_path: Path
) -> None:
    single = load_model(folder / "model", folds=[2], device=CPU)
    manifest = export_logits([single, single], folder / "images", tmp_path / "out").manifest

    assert manifest.cases[0].members == ("model_0_fold_2/case_a.npz", "model_1_fold_2/case_a.npz")
    expected = read_member(exported.resolve("fold_2/case_a.npz"), kind="logits").values
    for name in manifest.cases[0].members:
        np.testing.assert_array_equal(read_member(manifest.resolve(name), kind="logits").values, expected)


SPLITS = [
    {"train": ["case_b", "other"], "val": ["case_a"]},
    {"train": ["case_a", "other"], "val": ["case_b"]},
    {"train": ["case_a", "case_b"], "val": ["other"]},
]


def test_cases_seen_in_training_are_refused_unless_forced(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    splits = tmp_path / "splits_final.json"
    splits.write_text(json.dumps(SPLITS))
    with pytest.raises(UsageError, match=r"2 of the cases were used to train fold 0, 1, 2 .*: case_a, case_b\."):
        export_logits([model], folder / "images", tmp_path / "out", splits=splits)
    assert not (tmp_path / "out").exists()

    unseen = load_model(folder / "model", folds=[0], device=CPU)
    one = tmp_path / "one"
    one.mkdir()
    shutil.copy(folder / "images" / "case_a_0000.nii.gz", one)
    assert export_logits([unseen], one, tmp_path / "unseen", splits=splits).warnings == ()
    forced = export_logits([model], one, tmp_path / "forced", splits=splits, force=True)
    assert any("overconfident" in sentence for sentence in forced.warnings)


def test_splits_beside_the_model_and_the_images_it_was_trained_on_are_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    copy = load_model(tmp_path / "model", folds=[1], device=CPU)
    shutil.copytree(folder / "images", tmp_path / "imagesTr")
    with pytest.raises(UsageError, match="they lie in imagesTr"):
        export_logits([copy], tmp_path / "imagesTr", tmp_path / "out")

    shutil.copytree(folder / "images", tmp_path / "raw" / "Dataset999_Tiny" / "imagesTr")
    monkeypatch.setenv("nnUNet_raw", str(tmp_path / "raw"))
    with pytest.raises(UsageError, match="they lie in imagesTr"):
        export_logits([copy], folder / "images", tmp_path / "out")

    (tmp_path / "model" / "splits_final.json").write_text(json.dumps(SPLITS))
    with pytest.raises(UsageError, match=r"1 of the cases were used to train fold 1 .*: case_a\."):
        export_logits([copy], folder / "images", tmp_path / "out")


def test_out_of_fold_predicts_every_case_with_the_fold_that_did_not_see_it(
    folder: Path, model: TrainedModel, exported: Manifest, tmp_path: Path
) -> None:
    splits = tmp_path / "splits_final.json"
    splits.write_text(json.dumps(SPLITS))
    done = export_logits([model], folder / "images", tmp_path / "out", splits=splits, out_of_fold=True)

    assert {case.id: case.members for case in done.manifest.cases} == {
        "case_a": ("fold_0/case_a.npz",),
        "case_b": ("fold_1/case_b.npz",),
    }
    assert done.manifest.prediction is not None
    assert done.manifest.prediction.folds is None
    assert any("single model" in sentence for sentence in done.warnings)
    assert len(list((tmp_path / "out").rglob("*.npz"))) == 2
    own = read_member(tmp_path / "out" / "fold_1" / "case_b.npz", kind="logits").values
    np.testing.assert_array_equal(own, read_member(exported.resolve("fold_1/case_b.npz"), kind="logits").values)


def test_resume_leaves_finished_members_alone_and_redoes_what_changed(
    folder: Path, model: TrainedModel, exported: Manifest, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(exported.root, out)
    marker = b"not looked at again"
    for name in ("fold_0/case_a.npz", "fold_1/case_b.npz", "fold_2/case_b.npz"):
        (out / name).write_bytes(marker)
    (out / "fold_1" / "case_b.json").unlink()  # stopped between the file and its sidecar
    images = tmp_path / "images"
    shutil.copytree(folder / "images", images)
    steps: list[tuple[int, int]] = []
    export_logits([model], images, out, resume=True, progress=lambda _, done, total: steps.append((done, total)))

    assert steps == [(6, 6)]
    assert (out / "fold_0" / "case_a.npz").read_bytes() == marker
    assert (out / "fold_1" / "case_b.npz").read_bytes() == (exported.root / "fold_1" / "case_b.npz").read_bytes()

    shutil.copy(images / "case_b_0000.nii.gz", images / "case_a_0000.nii.gz")
    export_logits([model], images, out, resume=True)
    for fold in range(3):
        changed = read_member(out / f"fold_{fold}" / "case_a.npz", kind="logits").values
        expected = read_member(exported.resolve(f"fold_{fold}/case_b.npz"), kind="logits").values
        np.testing.assert_array_equal(changed, expected)


def test_folders_that_are_no_folds_are_not_taken_for_some(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    shutil.copytree(tmp_path / "model" / "fold_0", tmp_path / "model" / "fold_0_old")
    (tmp_path / "model" / "fold_2").rename(tmp_path / "model" / "fold_all")

    assert load_model(tmp_path / "model", device=CPU).folds == (0, 1)
    assert load_model(tmp_path / "model", folds=["all"], device=CPU).folds == ("all",)


def test_cascade_is_refused_and_the_message_says_the_way_out(tmp_path: Path) -> None:
    untrained.write_model(tmp_path / "model", previous_stage="3d_lowres")
    with pytest.raises(UsageError, match=r"second stage of a cascade.*3d_lowres.*segcal nnunet postprocess"):
        load_model(tmp_path / "model", device=CPU)


class _Payload:
    """Unpickling this creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.target,)


def test_checkpoint_that_would_run_code_is_not_opened(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    path = tmp_path / "model" / "fold_1" / "checkpoint_final.pth"
    checkpoint = torch.load(path, weights_only=False)
    torch.save({**checkpoint, "logging": _Payload(tmp_path / "ran")}, path, pickle_module=pickle)

    with pytest.raises(FileFormatError, match="would run code"):
        load_model(tmp_path / "model", device=CPU)
    assert not (tmp_path / "ran").exists()


def test_missing_extra_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise model_module.PackageNotFoundError(name)

    monkeypatch.setattr(model_module, "version", absent)
    with pytest.raises(UsageError, match=r"pip install -c constraints.txt '\.\[nnunet\]'"):
        load_model(folder / "model", device=CPU)


def test_missing_folds_channels_and_labels_are_named(folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"fold_7.*folds with that checkpoint: 0, 1, 2"):
        load_model(folder / "model", folds=[7], device=CPU)
    untrained.write_images(tmp_path / "two", ["x"], n_channels=2)
    with pytest.raises(FileFormatError, match=r"case x has the channels _0000, _0001, the model expects 1 \(CT\)"):
        export_logits([model], tmp_path / "two", tmp_path / "out")
    (tmp_path / "labels").mkdir()
    with pytest.raises(MissingFileError, match=r"no label named `<case>\.nii\.gz`"):
        export_logits([model], folder / "images", tmp_path / "out", labels=tmp_path / "labels")


@pytest.mark.parametrize("kept", [0.05, 0.5, 0.99])
def test_a_truncated_image_is_refused(kept: float, folder: Path, model: TrainedModel, tmp_path: Path) -> None:
    """The reader of nnU-Net takes zeros for what is missing, and the network predicts them without a word."""
    images = untrained.write_images(tmp_path / "images", ["x"])
    path = images / "x_0000.nii.gz"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])

    with pytest.raises(FileFormatError, match=r"x_0000\.nii\.gz: .*truncated"):
        export_logits([model], images, tmp_path / "out")
    path.write_bytes(b"no image")
    with pytest.raises(FileFormatError, match=r"x_0000\.nii\.gz"):
        export_logits([model], images, tmp_path / "out")


def test_an_image_that_nnunet_cannot_read_is_told_with_its_case(tmp_path: Path) -> None:
    untrained.write_png_model(tmp_path / "model")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x_0000.png").write_bytes(b"no picture")

    with pytest.raises(CaseError, match=r"x: preprocessing by nnU-Net failed"):
        export_logits([load_model(tmp_path / "model", device=CPU)], tmp_path / "images", tmp_path / "out")


def test_network_that_diverged_is_an_error_that_names_the_fold(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    path = tmp_path / "model" / "fold_2" / "checkpoint_final.pth"
    checkpoint = torch.load(path, weights_only=False)
    for tensor in checkpoint["network_weights"].values():
        tensor.fill_(torch.nan)
    torch.save(checkpoint, path)

    with pytest.raises(ValueError, match=r"case_a: fold 2 of .* NaN"):
        export_logits([load_model(tmp_path / "model", device=CPU)], folder / "images", tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.yaml").exists()


def test_command_takes_the_flags_of_nnunet(folder: Path, exported: Manifest, tmp_path: Path) -> None:
    command = ["nnunet", "export", "-m", folder / "model", "-f", "0", "2", "-i", folder / "images"]
    options = ["-o", tmp_path / "out", "-chk", "checkpoint_final.pth", "-step_size", "0.5", "-device", "cpu", "--json"]
    result = CliRunner().invoke(app, [str(word) for word in (*command, *options)])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["n_members"] == 2
    assert Manifest.load(tmp_path / "out" / "manifest.yaml").cases[0].members[1] == "fold_2/case_a.npz"


def test_hippocampus_export_equals_the_member_files(hippocampus: Path, tmp_path: Path) -> None:
    """Measured: 0.1 % of the values differ, by at most two steps of float16 (nnU-Net adds tiles in half precision)."""
    images = tmp_path / "images"
    images.mkdir()
    for case_id in ("hippocampus_001", "hippocampus_006"):
        shutil.copy(hippocampus / "images" / f"{case_id}_0000.nii.gz", images)
    trained = load_model(hippocampus / "model", device=CPU, mirroring=False)
    done = export_logits([trained], images, tmp_path / "out", labels=hippocampus / "labels")

    assert len(done.manifest.labelled_cases) == 2
    for case in done.manifest.cases:
        for fold, name in enumerate(case.members):
            own = read_member(done.manifest.resolve(name), kind="logits")
            given = read_member(hippocampus / f"member_{fold}" / f"{case.id}.npz", kind="logits").values
            step = np.spacing(np.maximum(np.abs(own.values), np.abs(given))).astype(np.float64)
            apart = np.abs(own.values.astype(np.float64) - given.astype(np.float64))
            assert (apart <= np.maximum(2 * step, 2**-10)).all()
            assert np.mean(apart > 0) < 0.01
            assert own.crop == tuple((0, n) for n in given.shape[1:])
