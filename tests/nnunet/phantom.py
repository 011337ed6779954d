"""A small dataset in nnU-Net's layout: two channels, an organ with a lesion in it, obliquely lying sagittal slices.

The slices are thickest along x, so that nnU-Net's plan transposes; the voxel size varies, so that it resamples; the
images are zero around a box, so that it crops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK
from numpy.typing import NDArray

DATASET = "Dataset901_Phantom"
CLASSES = ("background", "organ", "lesion")
TRAINING = tuple(f"phantom_{k:02d}" for k in range(9))
HELD_OUT = ("phantom_90", "phantom_91")
N_FOLDS = 3

_MARGIN = 3
_INTENSITIES = ((20.0, 60.0, 95.0), (40.0, 55.0, 20.0))


def write_dataset(raw: Path) -> Path:
    """imagesTr, labelsTr, imagesTs, labelsTs (held out, labelled) and dataset.json; returns the dataset's folder."""
    folder = raw / DATASET
    for seed, case_id in enumerate((*TRAINING, *HELD_OUT)):
        part = "Ts" if case_id in HELD_OUT else "Tr"
        _write_case(folder, part, case_id, np.random.default_rng(seed))
    dataset = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": {name: value for value, name in enumerate(CLASSES)},
        "numTraining": len(TRAINING),
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(dataset))
    return folder


def splits() -> list[dict[str, list[str]]]:
    """splits_final.json: every training case is validated by one fold."""
    own = [list(TRAINING[fold::N_FOLDS]) for fold in range(N_FOLDS)]
    return [{"train": [c for c in TRAINING if c not in val], "val": val} for val in own]


def _write_case(folder: Path, part: str, case_id: str, rng: np.random.Generator) -> None:
    shape = (24 + int(rng.integers(4)), 26 + int(rng.integers(4)), 14)
    labels = _labels(shape, rng)
    spacing = (3.0, 1.0 + 0.1 * float(rng.integers(3)), 1.2)  # (x, y, z)
    box = tuple(slice(_MARGIN, -_MARGIN) for _ in shape)
    for channel, means in enumerate(_INTENSITIES):
        values = np.zeros(shape, dtype=np.float32)
        seen = np.choose(labels, means) + rng.normal(0, 18, shape)
        values[box] = np.maximum(seen, 1)[box]
        _write(folder / f"images{part}" / f"{case_id}_{channel:04d}.nii.gz", values, spacing)
    _write(folder / f"labels{part}" / f"{case_id}.nii.gz", labels, spacing)


def _labels(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"))
    centre = np.array(shape) / 2 + rng.uniform(-1.5, 1.5, 3)
    half = np.array([7.0, 8.0, 3.5]) * rng.uniform(0.8, 1.1)
    away = ((grid - centre[:, None, None, None]) / half[:, None, None, None]) ** 2
    inner = ((grid - (centre + np.array([1, -2, 0]))[:, None, None, None]) / (0.5 * half)[:, None, None, None]) ** 2
    labels = (away.sum(0) < 1).astype(np.uint8)
    labels[inner.sum(0) < 1] = 2
    return labels


def _write(path: Path, values: NDArray[Any], spacing: tuple[float, float, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = SimpleITK.GetImageFromArray(values)
    image.SetSpacing(spacing)
    image.SetOrigin((-31.0, 12.5, 140.0))
    c, s = np.cos(0.2), np.sin(0.2)
    image.SetDirection((c, -s, 0.0, s, c, 0.0, 0.0, 0.0, 1.0))
    SimpleITK.WriteImage(image, path)
