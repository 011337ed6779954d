"""Boundary-aware calibration error: calibration near the ground-truth boundary counts more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score, Undefined
from segcal.metrics.bins import BinTable
from segcal.metrics.fixed_point import from_units
from segcal.metrics.voxels import VoxelBatch

NO_BANDS = Undefined("no distance to a boundary: the data are not an image")


@dataclass(frozen=True, slots=True, eq=False)
class BandSums:
    """Sums of one case in every band; `distance` in units of segcal.metrics.fixed_point, None without an image."""

    table: BinTable  # (band, 1)
    distance: tuple[int, ...] | None

    def __add__(self, other: Self) -> Self:
        if self.distance is None or other.distance is None:
            return type(self)(self.table + other.table, None)
        distance = tuple(a + b for a, b in zip(self.distance, other.distance, strict=True))
        return type(self)(self.table + other.table, distance)

    def mean_distance(self) -> NDArray[np.float64]:
        """(band,) mean distance to the boundary in voxels, NaN in empty bands."""
        sums = np.array([from_units(total) for total in self.distance or ()])
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums / self.table.counts[:, 0]


class BoundaryError(Metric[BandSums]):
    """BA-ECE = sum_k w_k |mean confidence - accuracy| over distance bands k, per case.

    Weights are w_k = 1 / (1 + mean distance in band k), normalised over the non-empty bands: the form in the public
    code of the paper's first author (Zeevi et al. 2025 and the paper only say inverse-distance weighting). A case with
    one label has no boundary: all its voxels are in the last band, with weight 1.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"ba_ece": "lower"}

    def measure(self, batch: VoxelBatch) -> BandSums:
        return BandSums(batch.sums.top_label[self.settings.ece_bins].over_bins(), batch.band_distance)

    def score(self, state: BandSums) -> dict[str, Score]:
        if state.distance is None:
            return {"ba_ece": NO_BANDS}
        filled = state.table.counts[:, 0] > 0
        if not filled.any():
            return {"ba_ece": NO_VOXELS}
        weights = np.ones(int(filled.sum()))
        if self.settings.band_weights == "inverse_distance":
            weights = 1.0 / (1.0 + state.mean_distance()[filled])
        gaps = state.table.gaps()[filled, 0]
        return {"ba_ece": float((weights * gaps).sum() / weights.sum())}

    def tables(self, state: BandSums) -> dict[str, NDArray[np.float64]]:
        """`band_distance`: (band,) mean distance in voxels, NaN in empty bands."""
        return {} if state.distance is None else {"band_distance": state.mean_distance()}
