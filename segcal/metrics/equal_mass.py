"""Equal-mass (adaptive) ECE from a fine histogram, with a bound on what the histogram can cost.

Equal-mass groups need the order of all confidences. Instead of keeping them, voxels are counted in fine cells, and a
cell that a group edge runs through is shared out in proportion. Cells are spaced by the logarithm of 1 - confidence,
256 to each power of two, because nearly all voxels of a good segmentation lie close to 1; confidence exactly 1 has a
cell of its own. Ties at a group edge are shared out in proportion by definition, so the quantity does not depend on the
order of voxels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score
from segcal.metrics.bins import BinTable
from segcal.metrics.voxels import VoxelBatch

# A float32 is sign, 8 bits of exponent, 23 of mantissa: dropping 15 of them leaves 256 cells to each power of two.
_DROPPED_BITS = 15
_SMALLEST = 2.0**-24  # the gap between 1 and the float32 below it
_FIRST_CELL = (int(np.float32(_SMALLEST).view(np.int32)) >> _DROPPED_BITS) - 1
N_CELLS = (int(np.float32(1.0).view(np.int32)) >> _DROPPED_BITS) - _FIRST_CELL + 1


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
        top = batch.confidence.float()
        distance = (1.0 - top).clamp_(min=0.0)
        cell = (distance.view(torch.int32) >> _DROPPED_BITS).sub_(_FIRST_CELL).clamp_(min=0)
        index = cell.mul_(2).add_(batch.hit)
        counts = torch.bincount(index, minlength=2 * N_CELLS).view(N_CELLS, 2).cpu().numpy()
        sums = torch.bincount(index, top.double(), minlength=2 * N_CELLS).view(N_CELLS, 2).cpu().numpy()
        return FineHistogram(BinTable(counts[:, 0] + counts[:, 1], sums[:, 0] + sums[:, 1], counts[:, 1]))

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
    width = _cell_widths()[cell]
    by_cuts = np.bincount(cell, 2.0 * (hits_off + m * f * (1.0 - f) * width), minlength=N_CELLS)
    at_most = np.zeros(N_CELLS)
    at_most[cell] = 2.0 * h * (m - h) / np.maximum(m, 1.0) + m * width
    off = np.minimum(by_cuts, at_most)[1:]  # the first cell holds one value only: sharing it out is exact
    return value, float(off.sum() / n)


def _cell_widths() -> NDArray[np.float64]:
    """(cell,) how far apart two confidences in a cell can be; 1 - p itself may be rounded by 2^-24."""
    bits = (np.arange(N_CELLS + 1, dtype=np.int32) + _FIRST_CELL) << _DROPPED_BITS
    return np.diff(bits.view(np.float32).astype(np.float64)) + _SMALLEST
