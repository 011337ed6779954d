"""Model folders that nnU-Net's real predictor takes, written in a moment: random weights instead of training.

`write_model` is 3-D with three classes and a transposed plan, and its images are anisotropic, need resampling and are
cropped. `write_region_model` is 2-D with two channels, overlapping regions and an ignore label. `write_png_model` reads
grey pictures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK
import torch
from numpy.typing import NDArray

CLASSES = ("background", "liver", "tumour")
N_FOLDS = 3
SHAPE = (14, 26, 30)
CROP = ((2, 13), (4, 22), (5, 28))
"""Where the images are not zero: the box nnU-Net crops to, in image order (z, y, x)."""

_LABELS = {name: value for value, name in enumerate(CLASSES)}
_REGIONS = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}


def write_model(
    folder: Path, *, near_ties: bool = False, previous_stage: str | None = None, reader: str = "SimpleITKIO"
) -> Path:
    """A 3-D model with three folds; with `near_ties` its last two classes differ by next to nothing everywhere."""
    plans = _plans(dimensions=3, n_channels=1, forward=(2, 0, 1), spacing=(1.4, 3.1, 1.5), patch=(16, 8, 16))
    plans["image_reader_writer"] = reader
    if previous_stage is not None:
        plans["configurations"]["tiny"]["previous_stage"] = previous_stage
    dataset = {"channel_names": {"0": "CT"}, "labels": _LABELS, "numTraining": 5, "file_ending": ".nii.gz"}
    return _write(folder, plans, dataset, heads=3, channels=3 if previous_stage else 1, near_ties=near_ties)


def write_region_model(folder: Path) -> Path:
    """A 2-D model with two input channels, two regions and an ignore label."""
    plans = _plans(dimensions=2, n_channels=2, forward=(0, 1, 2), spacing=(1.4, 1.5), patch=(16, 16))
    dataset = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": _REGIONS,
        "regions_class_order": [1, 2],
        "numTraining": 5,
        "file_ending": ".nii.gz",
    }
    return _write(folder, plans, dataset, heads=2, channels=2)


def write_png_model(folder: Path, channels: Sequence[str] = ("grey",)) -> Path:
    """A 2-D model of PNG images with three classes."""
    n_channels = len(channels)
    plans = _plans(dimensions=2, n_channels=n_channels, forward=(0, 1, 2), spacing=(1.0, 1.0), patch=(16, 16))
    plans["image_reader_writer"] = "NaturalImage2DIO"
    names = {str(k): name for k, name in enumerate(channels)}
    dataset = {"channel_names": names, "labels": _LABELS, "numTraining": 5, "file_ending": ".png"}
    return _write(folder, plans, dataset, heads=3, channels=n_channels)


def write_images(folder: Path, case_ids: Sequence[str], n_channels: int = 1, orientation: str = "LPS") -> Path:
    """Images with zeros around `CROP` and a voxel 1.0 x 1.2 x 4.5 mm; another orientation turns the array."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, case_id in enumerate(case_ids):
        for channel in range(n_channels):
            rng = np.random.default_rng([seed, channel])
            values = np.zeros(SHAPE, dtype=np.float32)
            z, y, x = (slice(*side) for side in CROP)
            values[z, y, x] = rng.uniform(1, 100, values[z, y, x].shape)
            image = SimpleITK.GetImageFromArray(values)
            image.SetSpacing((1.0, 1.2, 4.5))
            image.SetOrigin((-12.0, 7.5, 30.0))
            turned = SimpleITK.DICOMOrient(image, orientation)
            SimpleITK.WriteImage(turned, folder / f"{case_id}_{channel:04d}.nii.gz")
    return folder


def inside(values: NDArray[Any]) -> NDArray[Any]:
    """The part of (…, z, y, x) that lies in `CROP`."""
    z, y, x = (slice(*side) for side in CROP)
    part: NDArray[Any] = values[..., z, y, x]
    return part


def nnunet_predict(
    model: Path, images: Path, out: Path, *, folds: Sequence[int], mirroring: bool, probabilities: bool
) -> None:
    """nnU-Net itself, as `nnUNetv2_predict -npp 0 -nps 0` runs it, its own way of loading included."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(use_mirroring=mirroring, device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), tuple(folds))
    ending = predictor.dataset_json["file_ending"]
    ids = sorted({path.name[: -len(f"_0000{ending}")] for path in images.iterdir()})
    # Lists instead of the folder: for a folder nnU-Net starts twelve processes to look at its names.
    files = [[str(path) for path in sorted(images.glob(f"{case_id}_????{ending}"))] for case_id in ids]
    out.mkdir(parents=True)
    predictor.predict_from_files_sequential(files, [str(out / case_id) for case_id in ids], probabilities)


def read_segmentation(path: Path) -> NDArray[Any]:
    """(z, y, x) label values of a file."""
    values: NDArray[Any] = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(path))
    return values


def _write(
    folder: Path,
    plans: dict[str, Any],
    dataset: dict[str, Any],
    *,
    heads: int,
    channels: int,
    near_ties: bool = False,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(plans))
    (folder / "dataset.json").write_text(json.dumps(dataset))
    for fold in range(N_FOLDS):
        checkpoint = {
            "network_weights": _weights(plans, heads, channels, seed=fold, near_ties=near_ties),
            "trainer_name": "nnUNetTrainer",
            "init_args": {"configuration": "tiny"},
            "inference_allowed_mirroring_axes": (0, 1),
            # Real checkpoints carry the training log with numpy numbers in it.
            "logging": {"mean_fg_dice": [np.float64(0.5), np.float32(0.25)]},
        }
        (folder / f"fold_{fold}").mkdir()
        torch.save(checkpoint, folder / f"fold_{fold}" / "checkpoint_final.pth")
    return folder


def _weights(plans: dict[str, Any], heads: int, channels: int, *, seed: int, near_ties: bool) -> dict[str, Any]:
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    architecture = plans["configurations"]["tiny"]["architecture"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = get_network_from_plans(
            architecture["network_class_name"],
            architecture["arch_kwargs"],
            architecture["_kw_requires_import"],
            channels,
            heads,
            deep_supervision=False,
        )
    weights: dict[str, Any] = network.state_dict()
    for name in [name for name in weights if "seg_layers" in name]:
        weights[name] = weights[name] * 20  # logits as wide as those of a trained network
        if near_ties:
            weights[name][2] = weights[name][1] * (1 + 1e-4)
    return weights


def _plans(
    *, dimensions: int, n_channels: int, forward: Sequence[int], spacing: Sequence[float], patch: Sequence[int]
) -> dict[str, Any]:
    ones, halves = [1] * dimensions, [2] * dimensions
    resampling = {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None}
    configuration = {
        "data_identifier": "tiny",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": list(patch),
        "spacing": list(spacing),
        "normalization_schemes": ["ZScoreNormalization"] * n_channels,
        "use_mask_for_norm": [False] * n_channels,
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {**resampling, "order": 3},
        "resampling_fn_seg_kwargs": {**resampling, "is_seg": True},
        "resampling_fn_probabilities_kwargs": resampling,
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": {
                "n_stages": 3,
                "features_per_stage": [4, 8, 8],
                "conv_op": f"torch.nn.modules.conv.Conv{dimensions}d",
                "kernel_sizes": [[3] * dimensions] * 3,
                "strides": [ones, halves, halves],
                "n_conv_per_stage": [1, 1, 1],
                "n_conv_per_stage_decoder": [1, 1],
                "conv_bias": True,
                "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dimensions}d",
                "norm_op_kwargs": {"eps": 1e-05, "affine": True},
                "dropout_op": None,
                "dropout_op_kwargs": None,
                "nonlin": "torch.nn.LeakyReLU",
                "nonlin_kwargs": {"inplace": True},
            },
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": False,
    }
    return {
        "dataset_name": "Dataset999_Tiny",
        "plans_name": "tinyPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": list(forward),
        "transpose_backward": [list(forward).index(axis) for axis in range(3)],
        "label_manager": "LabelManager",
        "configurations": {"tiny": configuration},
        "foreground_intensity_properties_per_channel": {str(k): {} for k in range(n_channels)},
    }
