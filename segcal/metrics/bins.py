"""Bin tables: how often, how confident and how often right, bin by bin. All binned errors are read off them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class BinTable:
    """Equal-width bins [k/B, (k+1)/B), the last closed, over the last axis; leading axes are bands or classes.

    Counts are int64 and sums float64, because float32 stops counting at 2^24 voxels. The sum of float32 confidences of
    one bin is exact in float64 up to 2^28 voxels (they are whole multiples of one power of two), so tables of parts add
    up to the table of the whole, bit for bit.

    Attributes:
        counts: (..., B) voxels in the bin.
        confidence: (..., B) sum of their confidences.
        hits: (..., B) how many of them were right.
    """

    counts: NDArray[np.int64]
    confidence: NDArray[np.float64]
    hits: NDArray[np.int64]

    def __add__(self, other: Self) -> Self:
        return type(self)(self.counts + other.counts, self.confidence + other.confidence, self.hits + other.hits)

    @property
    def n_bins(self) -> int:
        return int(self.counts.shape[-1])

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def fold(self, n_bins: int) -> Self:
        """The table with fewer, wider bins; `n_bins` has to divide the present number."""
        shape = (*self.counts.shape[:-1], n_bins, self.n_bins // n_bins)
        return type(self)(*(part.reshape(shape).sum(axis=-1) for part in (self.counts, self.confidence, self.hits)))

    def over_first_axis(self) -> Self:
        """All bands (or classes) thrown together."""
        return type(self)(*(part.sum(axis=0) for part in (self.counts, self.confidence, self.hits)))

    def first(self, n_bins: int) -> Self:
        """The first bins alone."""
        return type(self)(self.counts[..., :n_bins], self.confidence[..., :n_bins], self.hits[..., :n_bins])

    def over_bins(self) -> Self:
        """One bin in all, for each leading index."""
        return self.fold(1)

    def as_array(self) -> NDArray[np.float64]:
        """(..., 3, B) float64 of counts, confidence sums and hits, for a file or a bootstrap."""
        parts = [part.astype(np.float64) for part in (self.counts, self.confidence, self.hits)]
        return np.stack(parts, axis=-2)

    @classmethod
    def from_array(cls, array: NDArray[np.float64]) -> Self:
        """The inverse of `as_array`."""
        counts, confidence, hits = np.moveaxis(array, -2, 0)
        return cls(np.rint(counts).astype(np.int64), confidence, np.rint(hits).astype(np.int64))

    def gaps(self) -> NDArray[np.float64]:
        """(..., B) |mean confidence - accuracy|, NaN in empty bins."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.abs(self.confidence - self.hits) / self.counts

    def reliability(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(..., B) mean confidence and accuracy of each bin, NaN in empty bins: the axes of a reliability diagram."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.confidence / self.counts, self.hits / self.counts

    def ece(self) -> float:
        """Expected calibration error: gaps weighted by the share of voxels; NaN without voxels."""
        return float(np.abs(self.confidence - self.hits).sum() / self.total) if self.total else math.nan

    def mce(self) -> float:
        """Maximum calibration error: the largest gap of a non-empty bin; NaN without voxels."""
        return float(np.nanmax(self.gaps())) if self.total else math.nan

    def ace(self) -> float:
        """Average calibration error: unweighted mean gap of the non-empty bins; NaN without voxels."""
        return float(np.nanmean(self.gaps())) if self.total else math.nan
