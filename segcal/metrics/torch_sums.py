"""The sums of a batch by torch operations: on any device, for any type; what the compiled loop is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.metrics.bins import BinTable
from segcal.metrics.fine_cells import LARGEST_COMMON_GRID, N_CELLS, N_SETTLED_CELLS, SETTLED, cell_index
from segcal.metrics.fixed_point import exact_sum, in_units
from segcal.metrics.voxel_sums import PROBABILITY_FLOOR, ClassTables, FlipCounts, ScoreSums

if TYPE_CHECKING:
    from segcal.metrics.voxels import VoxelBatch


class TorchSums:
    """`VoxelSums` of a batch, each counted when it is asked for."""

    def __init__(self, batch: VoxelBatch) -> None:
        self._batch = batch

    @cached_property
    def scores(self) -> ScoreSums:
        batch = self._batch
        # A class that was predicted is far from the floor.
        below = batch.misses[batch.label_probs[batch.misses] < PROBABILITY_FLOOR]
        floored = len(below)
        outside = int(batch.outside[below].sum()) if floored and batch.outside is not None else 0
        return ScoreSums(batch.n_voxels, nll_units(batch.label_log_probs), exact_sum(_brier(batch)), floored, outside)

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        batch = self._batch
        missed, size = batch.misses, batch.n_classes
        index = batch.labels[missed].long() * size + batch.prediction[missed]
        counts = torch.bincount(index, minlength=size**2).view(size, size).cpu().numpy()
        return counts + np.diag(batch.label_counts - counts.sum(axis=1))

    @cached_property
    def flips(self) -> FlipCounts | None:
        return _flips(self._batch, self._batch.reference)

    @cached_property
    def flips_deployed(self) -> FlipCounts | None:
        return _flips(self._batch, self._batch.deployed)

    @cached_property
    def top_label(self) -> Mapping[int, BinTable]:
        """A float32 times a whole number is exact in float64, so bins of width 1/B are whole runs of bins of width 1/L
        for every multiple L of B: one count with the least common multiple serves all B without changing any bin.
        Settled voxels all fall into the last bin; the fine cells have counted them already.
        """
        batch, n_bins = self._batch, self._batch.settings.n_bins
        common = math.lcm(*n_bins)
        if batch.probs.dtype != torch.float32 or common > LARGEST_COMMON_GRID:
            return {n: self._count(_bin_index(batch.confidence, n), n, batch.confidence) for n in n_bins}
        confidence = batch.confidence[batch.doubtful]
        table = self._count(_bin_index(confidence, common), common, confidence, batch.doubtful)
        settled = self._fine_by_band.first(N_SETTLED_CELLS).over_bins()
        table.counts[:, -1:] += settled.counts
        table.confidence[:, -1:] += settled.confidence
        table.hits[:, -1:] += settled.hits
        return {n: table.fold(n) for n in n_bins}

    @cached_property
    def fine(self) -> BinTable:
        return self._fine_by_band.over_first_axis()

    @cached_property
    def classwise(self) -> ClassTables:
        return ClassTables(*(part.cpu().numpy() for part in _class_tables(self._batch, self.confusion)))

    @cached_property
    def _fine_by_band(self) -> BinTable:
        """(band, cell)."""
        top = self._batch.top.float()
        return self._count(cell_index(top), N_CELLS, top.double())

    def _count(self, index: Tensor, n_bins: int, confidence: Tensor, where: Tensor | None = None) -> BinTable:
        """(band, B) table of voxels (those at `where`) from the int32 bin and the confidence of each."""
        hit, band = self._batch.hit, self._batch.band
        index = index.mul_(2).add_(hit if where is None else hit[where])
        if band is not None:
            index += (band if where is None else band[where]).to(torch.int32) * (2 * n_bins)
        shape = (self._batch.n_bands, n_bins, 2)
        counts = torch.bincount(index, minlength=math.prod(shape)).view(shape).cpu().numpy()
        sums = torch.bincount(index, confidence, minlength=math.prod(shape)).double().view(shape).cpu().numpy()
        return BinTable(counts[..., 0] + counts[..., 1], sums[..., 0] + sums[..., 1], counts[..., 1])


def nll_units(label_log_probs: Tensor) -> int:
    """Sum of -log q_y in units, q_y raised to the floor, from (voxel,) float64 logarithms."""
    return exact_sum(label_log_probs.clamp(min=math.log(PROBABILITY_FLOOR)).neg_())


def _brier(batch: VoxelBatch) -> Tensor:
    """(voxel,) sum_c (q_c - 1[y = c])^2 = sum_c q_c^2 - 2 q_y + 1."""
    total = batch.probs[0].double().square()
    for channel in batch.probs[1:]:  # one after the other: `sum` adds in another order at the ends of a piece
        total += channel.double().square()
    return total.sub_(batch.label_probs, alpha=2.0).add_(1.0)


def _flips(batch: VoxelBatch, reference: Tensor | None) -> FlipCounts | None:
    if reference is None:
        return None
    # Preserving methods flip nothing: comparing bytes is far cheaper than counting.
    if torch.equal(batch.prediction, reference):
        return FlipCounts(batch.n_voxels, 0, 0, 0)
    flipped = (batch.prediction != reference).nonzero()[:, 0]
    labels = batch.labels[flipped]
    harmful = int((reference[flipped] == labels).sum())
    beneficial = int((batch.prediction[flipped] == labels).sum())
    return FlipCounts(batch.n_voxels, len(flipped), harmful, beneficial)


def _bin_index(confidence: Tensor, n_bins: int) -> Tensor:
    """min(int(confidence * B), B - 1), computed in float64."""
    return (confidence * n_bins).to(torch.int32).clamp_(max=n_bins - 1)


def _class_tables(batch: VoxelBatch, confusion_counts: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
    """Three (class, B) int64 tables of one batch.

    Where one class is all but certain, it falls into the last bin and every other class into the first, so those
    voxels (most of a medical volume) are counted by totals; only the others are binned class by class.
    """
    n_classes, n_bins = batch.n_classes, batch.settings.ece_bins
    certain_above = batch.settings.certain_above
    doubtful = batch.doubtful if certain_above <= SETTLED else (batch.confidence <= certain_above).nonzero()[:, 0]
    probs = batch.probs.index_select(1, doubtful).double()  # (class, doubtful voxel)
    labels, predicted = (part.index_select(0, doubtful).long() for part in (batch.labels, batch.prediction))
    units = in_units(probs)

    index = (probs * n_bins).long().clamp_(max=n_bins - 1)
    index += torch.arange(n_classes, device=index.device)[:, None] * n_bins
    cells = n_classes * n_bins
    counts = torch.bincount(index.view(-1), minlength=cells).view(n_classes, n_bins)
    sums = torch.bincount(index.view(-1), units.view(-1), minlength=cells).long().view(n_classes, n_bins)
    positives = torch.bincount(index.gather(0, labels[None])[0], minlength=cells).view(n_classes, n_bins)

    confusion = torch.from_numpy(confusion_counts).to(index.device)
    confusion = confusion - torch.bincount(labels * n_classes + predicted, minlength=n_classes**2).view_as(confusion)
    all_units = in_units(batch.probs).double().sum(1)
    top = _units_of_winners(batch, int(confusion_counts.sum(axis=0).argmax()))
    top -= torch.bincount(predicted, units.gather(0, predicted[None])[0], minlength=n_classes)
    certain = confusion.sum(dim=0)  # by predicted class
    counts[:, -1] += certain
    counts[:, 0] += certain.sum() - certain
    sums[:, -1] += top.long()
    sums[:, 0] += (all_units - units.sum(dim=1) - top).long()
    positives[:, -1] += confusion.diagonal()
    positives[:, 0] += confusion.sum(dim=1) - confusion.diagonal()
    return counts, sums, positives


def _units_of_winners(batch: VoxelBatch, main: int) -> Tensor:
    """(class,) sum of the confidences of the voxels each class wins, in units.

    One class, `main`, wins nearly all voxels of a batch: it gets what the others leave of the total.
    """
    others = (batch.prediction != main).nonzero()[:, 0]
    sums = torch.bincount(
        batch.prediction[others].long(), in_units(batch.confidence[others]), minlength=batch.n_classes
    ).double()
    sums[main] = in_units(batch.confidence).sum() - sums.sum()
    return sums
