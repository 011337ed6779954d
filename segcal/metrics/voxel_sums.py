"""What the metrics keep of a batch of voxels: whole numbers and exact sums, whoever counts them.

Two forms count them: one compiled loop (`compiled_sums`, on the CPU) and torch operations (`torch_sums`, everywhere).
They agree bit for bit; tests/metrics/test_two_forms.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from segcal.compiled import agreed
from segcal.metrics.bins import BinTable
from segcal.metrics.fixed_point import UNITS_PER_ONE

PROBABILITY_FLOOR = agreed.SMALLEST_NORMAL
"""Smallest normal float32: q below it is raised to it and counted, so one voxel costs at most 87.3 nats."""


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums of the proper scores, the losses in units of segcal.metrics.fixed_point."""

    voxels: int
    nll: int
    brier: int
    floored: int
    floored_outside: int

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.voxels + other.voxels,
            self.nll + other.nll,
            self.brier + other.brier,
            self.floored + other.floored,
            self.floored_outside + other.floored_outside,
        )


@dataclass(frozen=True, slots=True)
class FlipCounts:
    """Voxels of one case against one reference decision."""

    voxels: int
    flipped: int
    harmful: int
    beneficial: int

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.voxels + other.voxels,
            self.flipped + other.flipped,
            self.harmful + other.harmful,
            self.beneficial + other.beneficial,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ClassTables:
    """(class, B) whole numbers: voxels, sum of p_c in units of segcal.metrics.fixed_point, voxels labelled c.

    int64 holds the sums up to 2^29 voxels a bin.
    """

    counts: NDArray[np.int64]
    units: NDArray[np.int64]
    positives: NDArray[np.int64]

    def __add__(self, other: Self) -> Self:
        return type(self)(self.counts + other.counts, self.units + other.units, self.positives + other.positives)

    def as_bin_table(self) -> BinTable:
        return BinTable(self.counts, self.units / float(UNITS_PER_ONE), self.positives)


class VoxelSums(Protocol):
    """The sums of one batch."""

    @property
    def scores(self) -> ScoreSums:
        """Negative log-likelihood and Brier score of the true class."""

    @property
    def confusion(self) -> NDArray[np.int64]:
        """(label, prediction) voxel counts."""

    @property
    def flips(self) -> FlipCounts | None:
        """Against the pooled decision; None without one."""

    @property
    def flips_deployed(self) -> FlipCounts | None:
        """Against the segmentation in use; None without one."""

    @property
    def top_label(self) -> Mapping[int, BinTable]:
        """For every number of bins B of the settings, the table (band, B) of the winning class."""

    @property
    def fine(self) -> BinTable:
        """(cell,) table of the winning class in the cells of `segcal.metrics.fine_cells`, in float32."""

    @property
    def classwise(self) -> ClassTables:
        """(class, `ece_bins`) tables of every class's own probability."""
