"""The volumes of one case that a picture is made of, and which slice of them is worth showing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import GeometryError

Volume = NDArray[Any]

FEWEST_VOXELS = 5
"""A class of a slice is worth showing when at least so many of its voxels carry it."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureMaps:
    """The volumes (z, y, x) of one case that a picture is made of.

    Attributes:
        segmentation: Class index per voxel, before calibration.
        confidence_before: Probability of the predicted class before calibration.
        confidence_after: The same after calibration.
        image: (z, y, x) or (channel, z, y, x); of several channels the first is shown, of a 2-D image with three all.
        label: True class index per voxel; negative where ignored.
        flips: Where calibration moved the decision.
        free_energy: logsumexp of the pooled logits.
    """

    segmentation: Volume
    confidence_before: Volume
    confidence_after: Volume
    image: Volume | None = None
    label: Volume | None = None
    flips: Volume | None = None
    free_energy: Volume | None = None

    def __post_init__(self) -> None:
        shape = self.segmentation.shape
        for name in ("confidence_before", "confidence_after", "image", "label", "flips", "free_energy"):
            volume = getattr(self, name)
            if volume is not None and volume.shape[-3:] != shape:
                raise GeometryError(f"picture of a case: {name} has shape {volume.shape}, segmentation {shape}")

    @property
    def errors(self) -> NDArray[np.bool_] | None:
        """Where the segmentation is wrong; None without a label."""
        if self.label is None:
            return None
        return np.asarray((self.segmentation != self.label) & (self.label >= 0))


def informative_slice(maps: PictureMaps) -> int:
    """The slice along axis 0 that `choose_slice` chooses."""
    shown = maps.segmentation if maps.label is None else maps.label

    def doubt(index: int) -> float:
        cut = slice(index, index + 1)
        parts = (maps.errors, maps.flips)
        errors, flips = (None if part is None else part[cut] for part in parts)
        return slice_doubt(maps.confidence_before[cut], errors, flips)

    return choose_slice(len(shown), shown.__getitem__, doubt)


def choose_slice(n_slices: int, shown: Callable[[int], Volume], doubt: Callable[[int], float]) -> int:
    """The slice with the most classes and, among those, the most doubt, errors and flips; the last of equals.

    Args:
        n_slices: How many there are.
        shown: Class index per pixel of a slice; negative where ignored.
        doubt: What `slice_doubt` says of a slice; only asked of slices with the most classes.
    """
    n_classes = [_n_classes(shown(index)) for index in range(n_slices)]
    candidates = [index for index, count in enumerate(n_classes) if count == max(n_classes)]
    return max(candidates, key=lambda index: (doubt(index), index))


def slice_doubt(confidence: Volume, errors: Volume | None, flips: Volume | None) -> float:
    """How much there is to see: confidence that is missing, errors and flips, in voxels."""
    extra = sum(int(part.sum()) for part in (errors, flips) if part is not None)
    return float((1.0 - confidence.astype(np.float64)).sum()) + extra


def _n_classes(shown: Volume) -> int:
    return int((np.bincount(shown[shown >= 0]) >= FEWEST_VOXELS).sum())
