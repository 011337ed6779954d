"""Which bin a score falls into, and the table of counts, sums and hits of such bins.

Equal-width bins are [k/B, (k+1)/B), the last closed. Equal-mass bins cut the sorted scores into B runs whose lengths
differ by at most one; equal scores are never torn apart (they go with the lowest of their runs), so a result does not
depend on the order of rows and B bins may become fewer: a constant score has one.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.classification.metrics.rows import Floats, Whole
from segcal.errors import ParameterError
from segcal.metrics.bins import BinTable
from segcal.metrics.fixed_point import CHUNK_VOXELS, UNITS_PER_ONE

Binning: TypeAlias = Literal["width", "mass"]


def bin_index(scores: Floats, n_bins: int, binning: Binning = "width") -> Whole:
    """(n,) bin of every score; see the module for the two ways."""
    if n_bins < 1:
        raise ParameterError(f"the number of bins must be at least 1, got {n_bins}")
    if binning == "width":
        return equal_width_index(scores, n_bins)
    if binning != "mass":
        raise ParameterError(f"binning must be `width` or `mass`, got {binning!r}")
    edges = equal_mass_edges(np.sort(scores), n_bins)
    return np.searchsorted(edges, scores, side="left").astype(np.int64)


def equal_width_index(scores: Floats, n_bins: int) -> Whole:
    """min(int(score B), B - 1), the index of the core's tables; any shape."""
    return np.minimum((scores * n_bins).astype(np.int64), n_bins - 1)


def equal_mass_edges(ordered: Floats, n_bins: int) -> Floats:
    """Rising upper ends of the bins of sorted scores, each once; a score belongs to the first end it does not pass."""
    n = len(ordered)
    size, longer = divmod(n, n_bins)
    ends = np.cumsum([size + (k < longer) for k in range(n_bins)])
    return np.unique(ordered[ends[ends > 0] - 1])


def bin_table(index: Whole, scores: Floats, hits: NDArray[np.bool_], n_bins: int) -> BinTable:
    """Counts, sums of scores and hits of every bin; sums have the same bits for any order of rows."""
    counts = np.bincount(index, minlength=n_bins)
    right = np.bincount(index[hits], minlength=n_bins)
    units = unit_sums(index, scores, n_bins)
    return BinTable(counts, units / float(UNITS_PER_ONE), right)


def unit_sums(index: Whole, values: Floats, n_cells: int) -> Whole:
    """(cell,) exact sums of values in units of segcal.metrics.fixed_point; they hold 2^29 values up to 1 a cell."""
    total = np.zeros(n_cells, dtype=np.int64)
    for start in range(0, len(index), CHUNK_VOXELS):  # a float64 holds the whole numbers that one chunk can reach
        part = slice(start, start + CHUNK_VOXELS)
        total += np.bincount(index[part], np.rint(values[part] * UNITS_PER_ONE), n_cells).astype(np.int64)
    return total
