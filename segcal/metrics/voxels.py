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
from segcal.metrics.fine_cells import N_CELLS, N_SETTLED_CELLS, SETTLED, cell_index

SUM_TOLERANCE = 2e-3
"""How far the probabilities of a voxel may be from summing to 1; float16 files need about 5e-4."""

_LARGEST_COMMON_GRID = round(1.0 / (1.0 - SETTLED))


@dataclass(frozen=True, slots=True, eq=False)
class FramePart:
    """Up to CHUNK_VOXELS voxels of a case; ignored ones are already left out of the tensors.

    Attributes:
        where: the part's place among the flattened voxels.
        keep: positions inside the part that are not ignored; None when all are counted.
        labels, reference, deployed: (voxel,) class index in the smallest type that holds it.
        label_counts: (C,) voxels of every label.
        reference_hit: (voxel,) bool, whether the reference is the label.
        outside: (voxel,) bool, outside the crop the network predicted in.
        band, band_distance: distance band of each voxel; sum of distances in each band, in units of `fixed_point`.
    """

    where: slice
    keep: Tensor | None
    labels: Tensor
    label_counts: NDArray[np.int64]
    reference: Tensor | None
    reference_hit: Tensor | None
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

    def __init__(
        self, case_id: str, settings: MetricSettings, part: FramePart, values: Tensor, *, log: bool, as_decided: bool
    ) -> None:
        self.settings = settings
        self._part, self._as_decided = part, as_decided
        self.probs = values.exp() if log else values
        self._log_probs = values if log else None
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
        if self._as_decided and self.reference is not None:
            return self.reference
        passed = torch.ones(self.n_voxels, dtype=torch.bool, device=self.probs.device)
        predicted = torch.zeros_like(self.labels)
        for channel in self.probs[:-1]:
            passed &= channel != self._top
            predicted += passed
        return predicted

    @cached_property
    def hit(self) -> Tensor:
        """(voxel,) bool, whether the prediction is the label."""
        if self._as_decided and self._part.reference_hit is not None:
            return self._part.reference_hit
        return self.prediction == self.labels

    @cached_property
    def misses(self) -> Tensor:
        """Positions of the voxels whose prediction is not the label; few, in a segmentation worth calibrating."""
        return (~self.hit).nonzero()[:, 0]

    @cached_property
    def doubtful(self) -> Tensor:
        """Positions of the voxels whose confidence is not above `fine_cells.SETTLED`."""
        return (self._top <= SETTLED).nonzero()[:, 0]

    @cached_property
    def label_probs(self) -> Tensor:
        """(voxel,) float64 probability of the true class: the confidence wherever that class was predicted."""
        missed = self.misses
        of_label = self.probs[self.labels[missed].long(), missed].double()
        return self.confidence.index_copy(0, missed, of_label)

    @cached_property
    def label_log_probs(self) -> Tensor:
        """(voxel,) float64 logarithm of the probability of the true class, -inf where that is 0."""
        if self._log_probs is not None:
            return self._log_probs.gather(0, self.labels.long()[None])[0].double()
        return self.label_probs.log()

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        """(label, prediction) voxel counts."""
        missed, size = self.misses, self.n_classes
        index = self.labels[missed].long() * size + self.prediction[missed]
        counts = torch.bincount(index, minlength=size**2).view(size, size).cpu().numpy()
        return counts + np.diag(self._part.label_counts - counts.sum(axis=1))

    @cached_property
    def top_label(self) -> dict[int, BinTable]:
        """For every number of bins B of the settings, the table (band, B) of the winning class.

        A float32 times a whole number is exact in float64, so bins of width 1/B are whole runs of bins of width 1/L for
        every multiple L of B: one count with the least common multiple serves all B without changing any bin. Settled
        voxels all fall into the last bin; the fine cells have counted them already.
        """
        n_bins = self.settings.n_bins
        common = math.lcm(*n_bins)
        if self.probs.dtype != torch.float32 or common > _LARGEST_COMMON_GRID:
            return {n: self._count(_bin_index(self.confidence, n), n, self.confidence) for n in n_bins}
        confidence = self.confidence[self.doubtful]
        table = self._count(_bin_index(confidence, common), common, confidence, self.doubtful)
        settled = self.fine.first(N_SETTLED_CELLS).over_bins()
        table.counts[:, -1:] += settled.counts
        table.confidence[:, -1:] += settled.confidence
        table.hits[:, -1:] += settled.hits
        return {n: table.fold(n) for n in n_bins}

    @cached_property
    def fine(self) -> BinTable:
        """(band, cell) table of the winning class in the cells of `segcal.metrics.fine_cells`, in float32."""
        top = self._top.float()
        return self._count(cell_index(top), N_CELLS, top.double())

    def _count(self, index: Tensor, n_bins: int, confidence: Tensor, where: Tensor | None = None) -> BinTable:
        """(band, B) table of voxels (those at `where`) from the int32 bin and the confidence of each."""
        index = index.mul_(2).add_(self.hit if where is None else self.hit[where])
        n_bands, band = 1, self._part.band
        if band is not None:
            n_bands = len(self.settings.band_edges)
            index += (band if where is None else band[where]).to(torch.int32) * (2 * n_bins)
        shape = (n_bands, n_bins, 2)
        counts = torch.bincount(index, minlength=math.prod(shape)).view(shape).cpu().numpy()
        sums = torch.bincount(index, confidence, minlength=math.prod(shape)).double().view(shape).cpu().numpy()
        return BinTable(counts[..., 0] + counts[..., 1], sums[..., 0] + sums[..., 1], counts[..., 1])


def _bin_index(confidence: Tensor, n_bins: int) -> Tensor:
    """min(int(confidence * B), B - 1), computed in float64."""
    return (confidence * n_bins).to(torch.int32).clamp_(max=n_bins - 1)


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
    least, most = (float(bound) for bound in probs.sum(dim=0).aminmax())
    furthest = max(1.0 - least, most - 1.0)
    if not furthest <= SUM_TOLERANCE:
        raise DataError(
            f"{case_id}: the class probabilities of a voxel sum to 1 only within {furthest:.3g}, expected "
            f"{SUM_TOLERANCE:g}; region (sigmoid) channels are evaluated one by one"
        )
