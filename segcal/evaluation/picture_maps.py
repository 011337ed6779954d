"""The volumes of one case that a picture is made of, and which slice of them is worth showing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import GeometryError

Volume = NDArray[Any]


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


def informative_slice(maps: PictureMaps, *, min_voxels: int = 5) -> int:
    """The slice along axis 0 with the most classes and, among those, the most doubt, errors and flips.

    A class counts when at least `min_voxels` voxels of the slice carry it.
    """
    shown = maps.segmentation if maps.label is None else maps.label
    n_classes = np.zeros(len(shown), dtype=np.int64)
    for value in range(int(shown.max()) + 1):
        n_classes += (shown == value).sum(axis=(1, 2)) >= min_voxels
    weight = (1.0 - maps.confidence_before.astype(np.float64)).sum(axis=(1, 2))
    for extra in (maps.errors, maps.flips):
        if extra is not None:
            weight += extra.sum(axis=(1, 2))
    return int(np.lexsort((weight, n_classes))[-1])
