"""The zone around the predicted boundary, where a segmentation is right or wrong, and how sure the map is in it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.metrics.base import Score, Undefined
from segcal.metrics.distance import distance_bands
from segcal.types import IGNORED

NO_BOUNDARY = Undefined("the segmentation has no boundary: one label fills it")


def boundary_zone(segmentation: NDArray[np.integer], width: float, inside: Tensor | None) -> NDArray[np.bool_] | None:
    """Voxels at a distance below `width` voxels from the boundary of a segmentation.

    Distances are those of BA-ECE: boundary voxels, which have a face neighbour of another label, are at 0.

    Args:
        segmentation: (z, y, x) labels.
        width: in voxels.
        inside: (z, y, x) bool, where the network predicted; the certain background outside says nothing.

    Returns:
        (z, y, x) bool; None for a segmentation without a boundary.
    """
    bands = distance_bands(segmentation, (0.0, width), ignored=IGNORED)
    if bands.squared is None:
        return None
    zone: NDArray[np.bool_] = bands.band == 0
    return zone if inside is None else zone & inside.cpu().numpy()


def mean_in_zone(values: Tensor, zone: NDArray[np.bool_] | None) -> Score:
    """Mean of (z, y, x) values over the zone, in float64."""
    if zone is None or not zone.any():
        return NO_BOUNDARY
    chosen = values[torch.from_numpy(zone).to(values.device)]
    return float(chosen.mean(dtype=torch.float64))
