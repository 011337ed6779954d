"""Top-label calibration error: ECE and MCE of each case, tables for ACE and reliability diagrams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score
from segcal.metrics.bins import BinTable
from segcal.metrics.voxels import VoxelBatch


@dataclass(frozen=True, slots=True)
class TopLabelTables:
    """One table (band, B) for every number of bins B."""

    by_bins: Mapping[int, BinTable]

    def __add__(self, other: Self) -> Self:
        return type(self)({n_bins: table + other.by_bins[n_bins] for n_bins, table in self.by_bins.items()})


class TopLabelError(Metric[TopLabelTables]):
    """Gap between the confidence of the winning class and how often it is right (Guo et al. 2017).

    `ece` and `mce` use `ece_bins` bins a case. ACE is not a number of a case: its tables (`ace_bins`) are pooled over
    all test cases of a repeat by `segcal.metrics.bootstrap`. The tables keep the distance bands apart, so reliability
    near the boundary and far from it can be drawn from them.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"ece": "lower", "mce": "lower", "ace": "lower"}

    def measure(self, batch: VoxelBatch) -> TopLabelTables:
        return TopLabelTables(batch.sums.top_label)

    def score(self, state: TopLabelTables) -> dict[str, Score]:
        table = state.by_bins[self.settings.ece_bins].over_first_axis()
        if not table.total:
            return {"ece": NO_VOXELS, "mce": NO_VOXELS}
        return {"ece": table.ece(), "mce": table.mce()}

    def tables(self, state: TopLabelTables) -> dict[str, NDArray[np.float64]]:
        """`top_label_<B>`: (3, B) for every B; `top_label_bands_<ace_bins>`: (band, 3, B)."""
        kept = {f"top_label_{n}": table.over_first_axis().as_array() for n, table in state.by_bins.items()}
        n_ace = self.settings.ace_bins
        return kept | {f"top_label_bands_{n_ace}": state.by_bins[n_ace].as_array()}
