"""Dice score from confusion counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from segcal.metrics.base import Direction, Metric, Score, Undefined
from segcal.metrics.voxels import VoxelBatch

ABSENT = Undefined("the class is in neither the label nor the segmentation")


class Dice(Metric[NDArray[np.int64]]):
    """DSC of each class, 2 TP / (2 TP + FP + FN), and their mean over the foreground (all with `include_background`).

    A class absent from both maps has no Dice and is left out of the mean of that case. The state is the confusion
    matrix (label, prediction).
    """

    directions: ClassVar[Mapping[str, Direction]] = {"dsc": "higher"}

    def measure(self, batch: VoxelBatch) -> NDArray[np.int64]:
        return batch.sums.confusion

    def score(self, state: NDArray[np.int64]) -> dict[str, Score]:
        each = dice_per_class(state)
        first = 0 if self.settings.include_background else 1
        counted = each[first:][np.isfinite(each[first:])]
        mean: Score = Undefined("no class that counts is in the label or the segmentation")
        if counted.size:
            mean = float(counted.mean())
        by_class: dict[str, Score] = {
            f"dsc:{name}": float(value) if np.isfinite(value) else ABSENT
            for name, value in zip(self.settings.class_names, each, strict=True)
        }
        return {"dsc": mean} | by_class

    def tables(self, state: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        return {"confusion": state.astype(np.float64)}


def dice_per_class(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """(C,) Dice of each class of a (label, prediction) confusion matrix, NaN for a class in neither map."""
    both = confusion.sum(axis=0) + confusion.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(2.0 * np.diag(confusion) / both)
