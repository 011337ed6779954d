"""Folders as nnU-Net 2.2 to 2.8 left them, read by the installed one.

What differs between the versions was found by training with 2.5.2, 2.6.4, 2.7.0 and 2.8.1 and looking at the files
(docs/nnunet_versions.md); here the same forms are written and run through nnU-Net's real predictor.
"""

from __future__ import annotations

import copy
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from segcal.nnunet.collect import collect_out_of_fold
from segcal.nnunet.model import load_model
from segcal.nnunet.postprocess import postprocess_folder
from segcal.nnunet.predict import predict_folder
from tests.apply_data import CPU, random_logits, temperature
from tests.nnunet import untrained
from tests.nnunet.folders import (
    REGION_LABELS,
    filled,
    properties,
    write_case,
    write_documents,
    write_labels,
)

pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; pip install -c constraints.txt '.[nnunet]'")
pytestmark = [pytest.mark.nnunet]

OLD_NAMES = {
    "n_conv_per_stage": "n_conv_per_stage_encoder",
    "n_conv_per_stage_decoder": "n_conv_per_stage_decoder",
    "strides": "pool_op_kernel_sizes",
    "kernel_sizes": "conv_kernel_sizes",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    untrained.write_model(tmp_path / "model")
    untrained.write_images(tmp_path / "images", ["a"])
    return tmp_path


def rewrite(model: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every fold's checkpoint."""
    for path in model.glob("fold_*/checkpoint_final.pth"):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def predicted(folder: Path, out: str) -> tuple[np.ndarray, np.ndarray]:
    predict_folder(load_model(folder / "model", device=CPU), temperature(2.0), folder / "images", folder / out)
    with np.load(folder / out / "a.npz") as content:
        return content["probabilities"], untrained.read_segmentation(folder / out / "a.nii.gz")


def assert_same(folder: Path, reference: tuple[np.ndarray, np.ndarray]) -> None:
    for ours, expected in zip(predicted(folder, "again"), reference, strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("version", ["2.5", "2.6"])
def test_checkpoint_with_all_that_training_leaves_in_it(folder: Path, version: str) -> None:
    """Optimiser, log and arguments; 2.5 also noted `unpack_dataset`. Trained on a GPU that is not here."""
    plans = json.loads((folder / "model" / "plans.json").read_bytes())

    def complete(content: dict[str, Any]) -> None:
        arguments = {"plans": plans, "configuration": "tiny", "fold": 0, "dataset_json": {"labels": {}}}
        if version == "2.5":
            arguments["unpack_dataset"] = True
        content["init_args"] = {**arguments, "device": torch.device("cuda")}
        content["optimizer_state"] = {"state": {0: {"momentum_buffer": torch.zeros(3, device=CPU)}}, "param_groups": []}
        content["grad_scaler_state"] = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 7}
        content["logging"] = {
            "mean_fg_dice": [np.float32(0.5)],
            "ema_fg_dice": [np.float64(0.5)],
            "dice_per_class_or_region": [[np.float32(0.4), np.float32(0.6)]],
            "lrs": [0.01],
        }
        content.update(_best_ema=np.float32(0.5), current_epoch=1000)

    reference = predicted(folder, "reference")
    rewrite(folder / "model", complete)

    assert_same(folder, reference)


def test_checkpoint_whose_log_was_written_with_numpy_1(folder: Path) -> None:
    """numpy 1 calls the function that makes a scalar by another name, which 2.5 models usually have."""
    reference = predicted(folder, "reference")
    for path in (folder / "model").glob("fold_*/checkpoint_final.pth"):
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        (name,) = (name for name in entries if name.endswith("/data.pkl"))
        assert b"cnumpy._core.multiarray\nscalar\n" in entries[name]
        entries[name] = entries[name].replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
        with zipfile.ZipFile(path, "w") as archive:
            for entry, content in entries.items():
                archive.writestr(entry, content)

    assert_same(folder, reference)


def test_checkpoint_without_mirroring_axes_predicts_without_mirroring_and_says_so(folder: Path) -> None:
    rewrite(folder / "model", lambda content: content.pop("inference_allowed_mirroring_axes"))

    model = load_model(folder / "model", device=CPU)

    assert model.prediction.mirroring is False
    fitted = temperature(2.0)
    info = fitted.info.model_copy(update={"prediction": {"mirroring": True}})
    run = predict_folder(model, type(fitted)(fitted.calibrator, info), folder / "images", folder / "out")
    assert any("prediction.mirroring differs" in sentence for sentence in run.warnings)


def test_plans_of_2_2_without_an_architecture(folder: Path) -> None:
    """nnU-Net rebuilds the network from the older keys, and warns; the plans it writes stay as they were."""
    reference = predicted(folder, "reference")
    path = folder / "model" / "plans.json"
    plans = json.loads(path.read_bytes())
    configuration = plans["configurations"]["tiny"]
    kwargs = configuration.pop("architecture")["arch_kwargs"]
    assert kwargs["features_per_stage"] == [min(4 * 2**stage, 8) for stage in range(3)]
    configuration.update({old: kwargs[new] for new, old in OLD_NAMES.items()})
    configuration.update(
        UNet_class_name="PlainConvUNet", UNet_base_num_features=4, unet_max_num_features=8, num_pool_per_axis=[2, 2, 2]
    )
    before = copy.deepcopy(plans)
    path.write_text(json.dumps(plans))

    with pytest.warns(UserWarning, match="old nnU-Net plans format"):
        again = predicted(folder, "again")

    for ours, expected in zip(again, reference, strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert json.loads((folder / "again" / "plans.json").read_bytes()) == before


def test_validation_of_2_5_whose_properties_have_numpy_numbers_as_keys(tmp_path: Path) -> None:
    model, box = tmp_path / "model", ((1, 4), (0, 4), (2, 6))
    write_documents(model, forward=(2, 0, 1))
    probs = filled(random_logits(0), box)
    write_case(model / "fold_0" / "validation", "a", probs, box=box, forward=(2, 0, 1))
    noted = properties(probs.shape[1:], box, (2, 0, 1))
    noted["class_locations"] = {np.int64(1): np.arange(8).reshape(2, 4), np.int64(2): []}
    (model / "fold_0" / "validation" / "a.pkl").write_bytes(pickle.dumps(noted))
    write_labels(tmp_path / "labels" / "a.nii.gz", np.zeros(probs.shape[1:], dtype=np.uint8), np.eye(4))

    found = collect_out_of_fold(model, labels=tmp_path / "labels", out=tmp_path / "m.yaml")

    assert found.manifest.cases[0].crop == box


def test_ensembled_regions_of_before_2_7_get_the_decision_of_their_probabilities(tmp_path: Path) -> None:
    """nnUNetv2_ensemble took the sigmoid of what were probabilities already: a region wherever it is not impossible."""
    write_documents(tmp_path / "old", labels=REGION_LABELS)
    (tmp_path / "old" / "plans.json").unlink()
    probs = filled(random_logits(1, (2, 4, 5, 6)), None, regions=True)
    right = write_case(tmp_path / "old", "a", probs, regions=True)
    (tmp_path / "old" / "a.pkl").write_bytes(pickle.dumps(probs))  # nor properties, until 2.8
    twice = 1 / (1 + np.exp(-probs))
    wrong = np.where(twice[1] > 0.5, 2, 0).astype(np.uint8)
    assert (wrong != right).any()
    write_labels(tmp_path / "old" / "a.nii.gz", wrong, np.eye(4))

    fitted = temperature(2.0, classes=("whole", "core"), regions=True)
    run = postprocess_folder(fitted, tmp_path / "old", tmp_path / "out", device=CPU)

    np.testing.assert_array_equal(untrained.read_segmentation(tmp_path / "out" / "a.nii.gz"), right)
    assert run.changed["a"] == np.count_nonzero(wrong != right)
    assert any("is not what its own probabilities say" in note for note in run.notes)
    assert any("holds an array" in note for note in run.notes)
    assert not (tmp_path / "out" / "a.pkl").exists()
