"""Sums over voxels whose bits do not depend on the order of adding.

Floating-point addition is not associative, so the same case summed in other chunks, or by several workers, would give
other last digits. Every summand is therefore rounded once to a multiple of 2^-34 (an error of at most 2.9e-11 a voxel,
far below the 1e-9 the metrics promise) and the multiples are added as whole numbers, which is exact in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.compiled import agreed

UNITS_PER_ONE = agreed.UNITS_PER_ONE
"""Summands are counted in units of 1 / UNITS_PER_ONE."""

_ROW = 1 << 12
CHUNK_VOXELS = 1 << 17
"""Voxels worked on at once: small enough for the cache, and for 2^53 (bin sums) and 2^63 (totals) to hold a chunk."""


def in_units(values: Tensor) -> Tensor:
    """Round values to whole units, kept in their floating type (scaling by a power of two loses nothing)."""
    return (values * float(UNITS_PER_ONE)).round_()


def exact_sum(values: Tensor) -> int:
    """Sum of float64 values in units, exact whatever the order. At most CHUNK_VOXELS values below 2^7."""
    units = in_units(values)
    whole = len(units) // _ROW * _ROW
    # Sums of a row stay below 2^53, so float64 holds them exactly; their total needs whole numbers.
    rows = units[:whole].view(-1, _ROW).sum(1).to(torch.int64).sum()
    return int(rows) + int(units[whole:].to(torch.int64).sum())


def from_units(total: int) -> float:
    """A sum in units as a float; Python divides whole numbers of any size with one rounding."""
    return total / UNITS_PER_ONE
