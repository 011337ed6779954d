"""Equal-mass (adaptive) ECE from a fine histogram, with a bound on what the histogram can cost.

Equal-mass groups need the order of all confidences. Instead of keeping them, voxels are counted in fine cells
(`segcal.metrics.fine_cells`), and a cell that a group edge runs through is shared out in proportion. Ties at a group
edge are shared out in proportion by definition, so the quantity does not depend on the order of voxels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score
from segcal.metrics.bins import BinTable
from segcal.metrics.fine_cells import N_CELLS, cell_widths
from segcal.metrics.voxels import VoxelBatch


@dataclass(frozen=True, slots=True, eq=False)
class FineHistogram:
    """Cells from confidence 1 downwards: (cell,) voxels, sum of confidence, hits."""

    cells: BinTable

    def __add__(self, other: Self) -> Self:
        return type(self)(self.cells + other.cells)


class EqualMassError(Metric[FineHistogram]):
    """ECE over `ece_bins` groups of equally many voxels.

    `equal_mass_ece_bound` is the largest distance between the reported value and the one that sorting all confidences
    (as float32) would give.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"equal_mass_ece": "lower"}

    def measure(self, batch: VoxelBatch) -> FineHistogram:
        return FineHistogram(batch.sums.fine)

    def score(self, state: FineHistogram) -> dict[str, Score]:
        if not state.cells.total:
            return {"equal_mass_ece": NO_VOXELS, "equal_mass_ece_bound": NO_VOXELS}
        value, bound = equal_mass_ece(state.cells, self.settings.ece_bins)
        return {"equal_mass_ece": value, "equal_mass_ece_bound": bound}


def equal_mass_ece(cells: BinTable, n_groups: int) -> tuple[float, float]:
    """Equal-mass ECE of a fine histogram and the bound on its error.

    With m voxels and h hits in the cell of a cut and f the share of the cell before it, the hits before the cut differ
    from f h by at most max(min(h, f m) - f h, f h - max(0, f m - (m - h))) and the confidences, spread over a width w,
    by at most m f (1 - f) w. Each cut moves two groups. However many cuts run through a cell, what it adds to all
    groups together is off by at most 2 h (m - h) / m + m w.
    """
    n = cells.total
    excess = cells.confidence - cells.hits
    before = np.concatenate([[0.0], np.cumsum(cells.counts)])
    excess_before = np.concatenate([[0.0], np.cumsum(excess)])
    cuts = n * np.arange(1, n_groups) / n_groups
    cell = np.minimum(np.searchsorted(before, cuts, side="right") - 1, N_CELLS - 1)
    m, h = (part[cell].astype(np.float64) for part in (cells.counts, cells.hits))
    f = np.clip((cuts - before[cell]) / np.maximum(m, 1.0), 0.0, 1.0)

    reached = np.concatenate([[0.0], excess_before[cell] + f * excess[cell], [excess_before[-1]]])
    value = float(np.abs(np.diff(reached)).sum() / n)
    hits_off = np.maximum(np.minimum(h, f * m) - f * h, f * h - np.maximum(0.0, f * m - (m - h)))
    width = cell_widths()[cell]
    by_cuts = np.bincount(cell, 2.0 * (hits_off + m * f * (1.0 - f) * width), minlength=N_CELLS)
    at_most = np.zeros(N_CELLS)
    at_most[cell] = 2.0 * h * (m - h) / np.maximum(m, 1.0) + m * width
    off = np.minimum(by_cuts, at_most)[1:]  # the first cell holds one value only: sharing it out is exact
    return value, float(off.sum() / n)
