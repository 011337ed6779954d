"""Class-wise calibration error: every class's probability against its frequency, not only the winner's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score
from segcal.metrics.voxel_sums import ClassTables
from segcal.metrics.voxels import VoxelBatch


class ClasswiseError(Metric[ClassTables]):
    """ECE of the binary question "is it class c?" on p_c for each c, and their plain mean (`ece_bins` bins).

    Also called static calibration error (Nixon et al. 2019); background counts like any class.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"classwise_ece": "lower"}

    def measure(self, batch: VoxelBatch) -> ClassTables:
        return batch.sums.classwise

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
