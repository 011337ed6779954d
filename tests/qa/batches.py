"""Small labelled batches and calibrators with a memory of their calibration cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from tests.apply_data import CLASSES, rotated, write_manifest

REGIONS = [{"name": "whole", "labels": [1, 2, 3]}, {"name": "core", "labels": [2, 3]}, {"name": "rest", "labels": [3]}]
REGION_KEYS: dict[str, Any] = {"classes": None, "regions": REGIONS, "regions_class_order": [1, 2, 3]}


def labelled(
    root: Path,
    cases: Mapping[str, Sequence[NDArray[Any]]],
    *,
    crop: Any = None,
    classes: Sequence[str] | None = CLASSES,
    n_labels: int = 3,
    **keys: Any,
) -> Manifest:
    """A manifest whose cases all share one random label map."""
    shape = next(iter(cases.values()))[0].shape[1:]
    labels = np.random.default_rng(7).integers(0, n_labels, shape).astype(np.uint8)
    root.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(labels.T, rotated()), root / "label.nii.gz")
    return write_manifest(root, cases, classes=classes, crop=crop, extra={"label": "label.nii.gz"}, **keys)


def labelled_regions(root: Path, cases: Mapping[str, Sequence[NDArray[Any]]], crop: Any = None) -> Manifest:
    """The same for a model with three regions."""
    return labelled(root, cases, crop=crop, n_labels=4, **REGION_KEYS)


def blob(seed: int, *, sharp: float = 4.0, noise: float = 0.3, depth: int = 8, size: int = 16) -> NDArray[np.float32]:
    """(3, z, y, x) logits of a ball of class 1 with a core of class 2; `sharp` says how sure its rim is."""
    z, y, x = np.meshgrid(*(np.linspace(-1, 1, n) for n in (depth, size, size)), indexing="ij")
    radius = np.sqrt(z**2 + y**2 + x**2)
    logits = np.stack([radius - 0.7, 0.25 - np.abs(radius - 0.5), 0.35 - radius]) * 8 * sharp
    return (logits + np.random.default_rng(seed).normal(0, noise, logits.shape)).astype(np.float32)


def remembering(fitted: FittedCalibrator, **statistics: Sequence[float]) -> FittedCalibrator:
    """The calibrator with statistics of calibration cases in its file."""
    kept = {name: tuple(values) for name, values in statistics.items()}
    return FittedCalibrator(fitted.calibrator, fitted.info.model_copy(update={"reference_statistics": kept}))
