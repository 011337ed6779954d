"""Voxels of one pipeline on one case: what several metrics need of them (confidence, prediction, hits, bin tables) is
computed once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import DataError
from segcal.metrics.base import MetricSettings
from segcal.metrics.bins import BinTable

SUM_TOLERANCE = 2e-3
"""How far the probabilities of a voxel may be from summing to 1; float16 files need about 5e-4."""

_LARGEST_COMMON_GRID = 4096


@dataclass(frozen=True, slots=True, eq=False)
class FramePart:
    """Up to CHUNK_VOXELS voxels of a case; ignored ones are already left out of the tensors.

    Attributes:
        where: the part's place among the flattened voxels.
        keep: positions inside the part that are not ignored; None when all are counted.
        labels, reference, deployed: (voxel,) class index in the smallest type that holds it.
        outside: (voxel,) bool, outside the crop the network predicted in.
        band, band_distance: distance band of each voxel; sum of distances in each band, in units of `fixed_point`.
    """

    where: slice
    keep: Tensor | None
    labels: Tensor
    reference: Tensor | None
    deployed: Tensor | None
    outside: Tensor | None
    band: Tensor | None
    band_distance: tuple[int, ...] | None


class VoxelBatch:
    """Counted voxels of one pipeline on one case; everything several metrics need is computed once, when asked for.

    Attributes:
        probs: (C, voxel) float32 or float64 probabilities.
        labels, reference, deployed, outside, band_distance: as in `FramePart`.
    """

    def __init__(self, case_id: str, settings: MetricSettings, part: FramePart, values: Tensor, *, log: bool) -> None:
        self.settings = settings
        self.probs = values.exp() if log else values
        self._log_probs = values if log else None
        self._band = part.band
        self.labels, self.reference, self.deployed = part.labels, part.reference, part.deployed
        self.outside, self.band_distance = part.outside, part.band_distance
        _check_probabilities(case_id, self.probs, self._top)

    @property
    def n_voxels(self) -> int:
        return int(self.probs.shape[1])

    @property
    def n_classes(self) -> int:
        return int(self.probs.shape[0])

    @cached_property
    def _top(self) -> Tensor:
        return self.probs.amax(dim=0)

    @cached_property
    def confidence(self) -> Tensor:
        """(voxel,) float64, the largest probability."""
        return self._top.double()

    @cached_property
    def prediction(self) -> Tensor:
        """(voxel,) class of the largest probability, the first on ties, in the type of `labels`.

        It counts the classes passed before the first one that reaches the maximum: a few byte operations a class,
        several times faster than an argmax over the strided class axis.
        """
        passed = torch.ones(self.n_voxels, dtype=torch.bool, device=self.probs.device)
        predicted = torch.zeros_like(self.labels)
        for channel in self.probs[:-1]:
            passed &= channel != self._top
            predicted += passed
        return predicted

    @cached_property
    def hit(self) -> Tensor:
        """(voxel,) bool, whether the prediction is the label."""
        return self.prediction == self.labels

    @cached_property
    def label_probs(self) -> Tensor:
        """(voxel,) float64 probability of the true class."""
        return self.probs.gather(0, self.labels.long()[None])[0].double()

    @cached_property
    def label_log_probs(self) -> Tensor:
        """(voxel,) float64 logarithm of the probability of the true class, -inf where that is 0."""
        if self._log_probs is not None:
            return self._log_probs.gather(0, self.labels.long()[None])[0].double()
        return self.label_probs.log()

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        """(label, prediction) voxel counts."""
        index = self.labels.to(torch.int32) * self.n_classes + self.prediction
        counts = torch.bincount(index, minlength=self.n_classes**2)
        return counts.view(self.n_classes, self.n_classes).cpu().numpy()

    @cached_property
    def top_label(self) -> dict[int, BinTable]:
        """For every number of bins B of the settings, the table (band, B) of the winning class.

        A float32 times a whole number is exact in float64, so bins of width 1/B are whole runs of bins of width 1/L for
        every multiple L of B: one count with the least common multiple serves all B without changing any bin.
        """
        n_bins = self.settings.n_bins
        common = math.lcm(*n_bins)
        if self.probs.dtype != torch.float32 or common > _LARGEST_COMMON_GRID:
            return {n: self._count(n) for n in n_bins}
        table = self._count(common)
        return {n: table.fold(n) for n in n_bins}

    def _count(self, n_bins: int) -> BinTable:
        """(band, B) table with bin index min(int(confidence * B), B - 1), computed in float64."""
        index = (self.confidence * n_bins).to(torch.int32).clamp_(max=n_bins - 1)
        index.mul_(2).add_(self.hit)
        n_bands = 1
        if self._band is not None:
            n_bands = len(self.settings.band_edges)
            index += self._band.to(torch.int32) * (2 * n_bins)
        shape = (n_bands, n_bins, 2)
        counts = torch.bincount(index, minlength=math.prod(shape)).view(shape).cpu().numpy()
        sums = torch.bincount(index, self.confidence, minlength=math.prod(shape)).view(shape).cpu().numpy()
        return BinTable(counts[..., 0] + counts[..., 1], sums[..., 0] + sums[..., 1], counts[..., 1])


def _check_probabilities(case_id: str, probs: Tensor, top: Tensor) -> None:
    """Refuse NaN, logits and unnormalised values: every metric would otherwise give a plausible wrong number."""
    if not probs.shape[1]:
        return
    low, high = float(probs.amin()), float(top.max())
    # Written so that NaN, which compares as false, is refused too.
    if not (low >= 0.0 and high <= 1.0 + SUM_TOLERANCE):
        raise DataError(
            f"{case_id}: probabilities reach from {low:g} to {high:g}, expected 0 to 1; "
            "logits have to go through a calibrator (or softmax) first"
        )
    furthest = float((probs.sum(dim=0) - 1.0).abs().max())
    if not furthest <= SUM_TOLERANCE:
        raise DataError(
            f"{case_id}: the class probabilities of a voxel sum to 1 only within {furthest:.3g}, expected "
            f"{SUM_TOLERANCE:g}; region (sigmoid) channels are evaluated one by one"
        )
