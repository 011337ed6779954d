"""Folders as nnU-Net leaves them, written with nothing but numpy, pickle and the image libraries."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from PIL import Image

from tests.apply_data import rotated

Bounds = Sequence[tuple[int, int]]

CLASS_LABELS = {"background": 0, "liver": 1, "tumour": 2}
REGION_LABELS = {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}
WHOLE_FORWARD = (0, 1, 2)


def softmax(logits: NDArray[Any], temperature: float = 1.0) -> NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    shifted = np.exp(scaled - scaled.max(0))
    return shifted / shifted.sum(0)


def properties(shape: Sequence[int], box: Bounds, forward: Sequence[int] = WHOLE_FORWARD) -> dict[str, Any]:
    """What nnU-Net's preprocessor notes; numpy scalars and arrays where it has them, axes after transpose_forward."""
    return {
        "sitk_stuff": {"spacing": (0.8, 1.1, 2.5), "origin": (0.0, 1.0, 2.0), "direction": tuple(np.eye(3).ravel())},
        "nibabel_stuff": {"original_affine": rotated()},
        "spacing": [np.float64(2.5), np.float64(1.1), np.float64(0.8)],
        "shape_before_cropping": tuple(shape[axis] for axis in forward),
        "bbox_used_for_cropping": [[np.int64(box[axis][0]), int(box[axis][1])] for axis in forward],
        "shape_after_cropping_and_before_resampling": tuple(np.int64(box[a][1] - box[a][0]) for a in forward),
        "class_locations": {1: np.arange(12).reshape(3, 4), (1, 2): np.asfortranarray(np.ones((2, 4))), 2: []},
    }


def write_documents(
    folder: Path,
    *,
    labels: dict[str, Any] | None = None,
    ending: str = ".nii.gz",
    forward: Sequence[int] = WHOLE_FORWARD,
    reader: str = "SimpleITKIO",
) -> None:
    """dataset.json and plans.json."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = CLASS_LABELS if labels is None else labels
    dataset: dict[str, Any] = {"channel_names": {"0": "CT"}, "labels": labels, "numTraining": 5, "file_ending": ending}
    if labels is REGION_LABELS:
        dataset["regions_class_order"] = [1, 2]
    (folder / "dataset.json").write_text(json.dumps(dataset))
    backward = [list(forward).index(axis) for axis in range(3)]
    plans = {"image_reader_writer": reader, "transpose_forward": list(forward), "transpose_backward": backward}
    (folder / "plans.json").write_text(json.dumps(plans))


def inside(box: Bounds) -> tuple[slice, ...]:
    return (slice(None), *(slice(low, high) for low, high in box))


def filled(logits: NDArray[np.float32], box: Bounds | None, *, regions: bool = False) -> NDArray[np.float32]:
    """Probabilities as nnU-Net saves them: certain background, or no region, outside the box."""
    probs = (1 / (1 + np.exp(-logits)) if regions else softmax(logits)).astype(np.float32)
    if box is None:
        return probs
    around = np.zeros_like(probs)
    around[0] = 0 if regions else 1
    around[inside(box)] = probs[inside(box)]
    return around


def decided(probs: NDArray[np.float32], *, regions: bool = False) -> NDArray[np.uint8]:
    """nnU-Net's own decision (regions painted 1, 2)."""
    if regions:
        return np.where(probs[1] > 0.5, 2, np.where(probs[0] > 0.5, 1, 0)).astype(np.uint8)
    return probs.argmax(0).astype(np.uint8)


def write_case(
    folder: Path,
    case_id: str,
    probs: NDArray[np.float32],
    *,
    box: Bounds | None = None,
    regions: bool = False,
    forward: Sequence[int] = WHOLE_FORWARD,
    ending: str = ".nii.gz",
    affine: NDArray[np.float64] | None = None,
) -> NDArray[np.uint8]:
    """`<case>.npz`, `.pkl` and the segmentation; returns the latter, (z, y, x)."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{case_id}.npz", probabilities=probs)
    shape = probs.shape[1:]
    noted = properties(shape, [(0, n) for n in shape] if box is None else box, forward)
    (folder / f"{case_id}.pkl").write_bytes(pickle.dumps(noted))
    labels = decided(probs, regions=regions)
    write_labels(folder / f"{case_id}{ending}", labels, rotated() if affine is None else affine)
    return labels


def write_labels(path: Path, labels: NDArray[Any], affine: NDArray[np.float64]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith((".nii", ".nii.gz")):
        nib.save(nib.Nifti1Image(labels.T, affine), path)
    elif path.suffix in (".png", ".bmp", ".tif"):
        Image.fromarray(labels[0]).save(path)
    else:
        image = sitk.GetImageFromArray(labels)
        image.SetSpacing((0.8, 1.1, 2.5))
        image.SetOrigin((-3.0, 4.0, 5.5))
        sitk.WriteImage(image, str(path))


def read_probs(folder: Path, case_id: str) -> NDArray[Any]:
    with np.load(folder / f"{case_id}.npz") as content:
        values: NDArray[Any] = content["probabilities"]
    return values


def two_blobs() -> NDArray[np.uint8]:
    labels = np.zeros((6, 7, 8), dtype=np.uint8)
    labels[0:2, 0:3, 0:3] = 1
    labels[2, 3, 3] = 2  # touches the first blob at a corner
    labels[4:6, 5:7, 6:8] = 1
    labels[5, 0, 7] = 2
    return labels


def turned_affine() -> NDArray[np.float64]:
    """Axes that run posterior, left, superior."""
    affine = np.eye(4)
    affine[:3, :3] = np.array([[0, -1.1, 0], [-0.8, 0, 0], [0, 0, 2.5]])
    affine[:3, 3] = (20.0, 30.0, -5.0)
    return affine
