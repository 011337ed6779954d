"""Class-wise calibration error: every class's probability against its frequency, not only the winner's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score
from segcal.metrics.bins import BinTable
from segcal.metrics.fine_cells import SETTLED
from segcal.metrics.fixed_point import UNITS_PER_ONE, in_units
from segcal.metrics.voxels import SUM_TOLERANCE, VoxelBatch


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


class ClasswiseError(Metric[ClassTables]):
    """ECE of the binary question "is it class c?" on p_c for each c, and their plain mean (`ece_bins` bins).

    Also called static calibration error (Nixon et al. 2019); background counts like any class.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"classwise_ece": "lower"}

    def measure(self, batch: VoxelBatch) -> ClassTables:
        return ClassTables(*(part.cpu().numpy() for part in _tables(batch, self.settings.ece_bins)))

    def score(self, state: ClassTables) -> dict[str, Score]:
        table = state.as_bin_table()
        names = [f"classwise_ece:{name}" for name in self.settings.class_names]
        n = int(state.counts[0].sum())
        if not n:
            return dict.fromkeys(("classwise_ece", *names), NO_VOXELS)
        each = np.abs(table.confidence - table.hits).sum(axis=1) / n
        by_class: dict[str, Score] = {name: float(value) for name, value in zip(names, each, strict=True)}
        return {"classwise_ece": float(each.mean())} | by_class

    def tables(self, state: ClassTables) -> dict[str, NDArray[np.float64]]:
        """`classwise_<B>`: (class, 3, B)."""
        return {f"classwise_{self.settings.ece_bins}": state.as_bin_table().as_array()}


def _tables(batch: VoxelBatch, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three (class, B) int64 tables of one batch.

    Where one class is all but certain, it falls into the last bin and every other class into the first, so those
    voxels (most of a medical volume) are counted by totals; only the others are binned class by class.
    """
    n_classes = batch.n_classes
    certain_above = 1.0 + 2.0 * SUM_TOLERANCE - 1.0 / n_bins
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

    confusion = torch.from_numpy(batch.confusion).to(index.device)
    confusion = confusion - torch.bincount(labels * n_classes + predicted, minlength=n_classes**2).view_as(confusion)
    all_units = in_units(batch.probs).double().sum(1)
    top = _units_of_winners(batch)
    top -= torch.bincount(predicted, units.gather(0, predicted[None])[0], minlength=n_classes)
    certain = confusion.sum(dim=0)  # by predicted class
    counts[:, -1] += certain
    counts[:, 0] += certain.sum() - certain
    sums[:, -1] += top.long()
    sums[:, 0] += (all_units - units.sum(dim=1) - top).long()
    positives[:, -1] += confusion.diagonal()
    positives[:, 0] += confusion.sum(dim=1) - confusion.diagonal()
    return counts, sums, positives


def _units_of_winners(batch: VoxelBatch) -> Tensor:
    """(class,) sum of the confidences of the voxels each class wins, in units.

    One class wins nearly all voxels of a batch: it gets what the others leave of the total.
    """
    main = int(batch.confusion.sum(axis=0).argmax())
    others = (batch.prediction != main).nonzero()[:, 0]
    sums = torch.bincount(
        batch.prediction[others].long(), in_units(batch.confidence[others]), minlength=batch.n_classes
    ).double()
    sums[main] = in_units(batch.confidence).sum() - sums.sum()
    return sums
