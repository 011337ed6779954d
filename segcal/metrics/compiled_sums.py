"""The sums of a batch by the compiled loop, and which batches it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.device import takes_loop
from segcal.metrics.base import SUM_TOLERANCE, MetricSettings
from segcal.metrics.bins import BinTable
from segcal.metrics.fine_cells import FIRST_CELL, LARGEST_COMMON_GRID, N_CELLS, SETTLED, cell_index
from segcal.metrics.fixed_point import UNITS_PER_ONE, in_units
from segcal.metrics.torch_sums import nll_units
from segcal.metrics.voxel_sums import ClassTables, FlipCounts, ScoreSums

if TYPE_CHECKING:
    from segcal.compiled.voxel_tables import Steps, Tables
    from segcal.metrics.voxels import VoxelBatch


@dataclass(frozen=True, eq=False)
class CompiledSums:
    """`VoxelSums` of a batch, counted at once; logarithms and class tables, each for one metric, when asked for."""

    confusion: NDArray[np.int64]
    flips: FlipCounts | None
    flips_deployed: FlipCounts | None
    top_label: Mapping[int, BinTable]
    fine: BinTable
    add_scores: Callable[[], ScoreSums]
    count_classes: Callable[[], ClassTables]

    @cached_property
    def scores(self) -> ScoreSums:
        return self.add_scores()

    @cached_property
    def classwise(self) -> ClassTables:
        return self.count_classes()


def takes(batch: VoxelBatch) -> bool:
    """Whether the loop can count a batch: float32 on the CPU, labels in a byte, bins of a usual width."""
    settings = batch.settings
    return (
        takes_loop(batch.probs)
        and batch.labels.dtype == torch.uint8
        and math.lcm(*settings.n_bins) <= LARGEST_COMMON_GRID
        and settings.certain_above <= SETTLED
    )


def compiled_sums(batch: VoxelBatch) -> CompiledSums | None:
    """Count a batch that `takes` accepts; None if some voxel does not hold probabilities."""
    from segcal.compiled.voxel_counts import count_voxels  # brings numba, which only those who measure wait for
    from segcal.compiled.voxel_tables import Seen

    seen = Seen(
        *(_bytes(values) for values in (batch.labels, batch.reference, batch.deployed, batch.outside, batch.band))
    )
    tables = _empty_tables(batch.settings, batch.n_bands)
    open_probs = torch.empty(batch.n_voxels, dtype=torch.float64, device="cpu")
    probs = batch.probs.contiguous().numpy()
    doubtful = np.empty(batch.n_voxels, dtype=np.int64)
    n_open, n_doubtful = count_voxels(
        probs, seen, tables, _steps(), FIRST_CELL, SUM_TOLERANCE, open_probs.numpy(), doubtful
    )
    if n_open < 0:
        return None
    missed, hit = tables.fine_counts.T  # added as they are: `sum` over two columns is slow
    hits = np.diag(batch.label_counts - tables.missed.sum(axis=1))
    return CompiledSums(
        confusion=tables.missed + hits,
        flips=_flips(batch.n_voxels, batch.reference, tables.flips[0]),
        flips_deployed=_flips(batch.n_voxels, batch.deployed, tables.flips[1]),
        top_label=_top_label(tables, batch.settings),
        fine=BinTable(missed + hit, tables.fine_sums, hit),
        add_scores=partial(_scores, batch.n_voxels, tables, open_probs[:n_open]),
        count_classes=partial(_classwise, probs, seen.labels, doubtful[:n_doubtful], tables),
    )


def _bytes(values: Tensor | None) -> NDArray[np.uint8]:
    if values is None:
        return np.empty(0, dtype=np.uint8)
    return values.contiguous().numpy().view(np.uint8)


def _empty_tables(settings: MetricSettings, n_bands: int) -> Tables:
    from segcal.compiled.voxel_tables import Tables

    def counts(*shape: int) -> NDArray[np.int64]:
        return np.zeros(shape, dtype=np.int64)

    n_classes, n_common, n_bins = settings.n_classes, math.lcm(*settings.n_bins), settings.ece_bins
    return Tables(
        fine_counts=counts(N_CELLS, 2),
        fine_sums=np.zeros(N_CELLS),
        settled_counts=counts(n_bands, n_classes, 2),
        settled_sums=np.zeros((n_bands, n_classes)),
        settled_missed=counts(n_classes),
        bin_counts=counts(n_bands, n_common, 2),
        bin_sums=np.zeros((n_bands, n_common)),
        class_counts=counts(n_classes, n_bins),
        class_units=counts(n_classes, n_bins),
        class_positives=counts(n_classes, n_bins),
        total_units=counts(n_classes),
        missed=counts(n_classes, n_classes),
        flips=counts(2, 3),
        scores=counts(4),
    )


@cache
def _steps() -> Steps:
    """Fine cell and loss of the settled confidences, by the functions that serve all others."""
    from segcal.compiled.voxel_counts import STEPS_PER_ONE
    from segcal.compiled.voxel_tables import Steps

    n_steps = round((1.0 - SETTLED) * STEPS_PER_ONE)
    confidence = 1.0 - torch.arange(n_steps, dtype=torch.float64, device="cpu") / STEPS_PER_ONE
    losses = in_units(confidence.log().neg_()).long()
    return Steps(cell_index(confidence.float()).long().numpy(), losses.numpy())


def _scores(n_voxels: int, tables: Tables, open_probs: Tensor) -> ScoreSums:
    """The loop has added the losses of plain voxels; the logarithms of the others are torch's."""
    brier, plain_nll, floored, floored_outside = (int(total) for total in tables.scores)
    return ScoreSums(n_voxels, plain_nll + nll_units(open_probs.log()), brier, floored, floored_outside)


def _flips(n_voxels: int, reference: Tensor | None, counts: NDArray[np.int64]) -> FlipCounts | None:
    return None if reference is None else FlipCounts(n_voxels, *(int(count) for count in counts))


def _top_label(tables: Tables, settings: MetricSettings) -> dict[int, BinTable]:
    """Doubtful voxels were counted with bins that all wanted ones are runs of; settled ones fall into the last."""
    tables.bin_counts[:, -1] += tables.settled_counts.sum(axis=1)
    tables.bin_sums[:, -1] += tables.settled_sums.sum(axis=1)
    common = BinTable(tables.bin_counts.sum(axis=2), tables.bin_sums, tables.bin_counts[..., 1])
    return {n: common.fold(n) for n in settings.n_bins}


def _classwise(
    probs: NDArray[np.float32], labels: NDArray[np.uint8], doubtful: NDArray[np.int64], tables: Tables
) -> ClassTables:
    """Doubtful voxels are binned class by class; of a settled one the winner is in the last bin, the others first."""
    from segcal.compiled.voxel_counts import count_classes

    count_classes(probs, labels, doubtful, tables)
    certain = tables.settled_counts.sum(axis=(0, 2))  # by winner
    winners = (tables.settled_sums.sum(axis=0) * UNITS_PER_ONE).astype(np.int64)
    others = tables.total_units - tables.class_units.sum(axis=1) - winners
    tables.class_counts[:, -1] += certain
    tables.class_counts[:, 0] += certain.sum() - certain
    tables.class_units[:, -1] += winners
    tables.class_units[:, 0] += others
    tables.class_positives[:, -1] += tables.settled_counts[..., 1].sum(axis=0)
    tables.class_positives[:, 0] += tables.settled_missed
    return ClassTables(tables.class_counts, tables.class_units, tables.class_positives)
