"""Proper scores: negative log-likelihood and Brier score of the true class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score
from segcal.metrics.fixed_point import from_units
from segcal.metrics.voxel_sums import ScoreSums
from segcal.metrics.voxels import VoxelBatch


class ProperScores(Metric[ScoreSums]):
    """Mean over voxels of -log q_y (nats) and of sum_c (q_c - 1[y = c])^2.

    `n_floored` counts the voxels whose q_y was raised to the floor, `n_floored_outside` those of them outside the crop
    the network predicted in, where everything counts as certain background: labelled foreground that cropping cut off.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"nll": "lower", "brier": "lower"}

    def measure(self, batch: VoxelBatch) -> ScoreSums:
        return batch.sums.scores

    def score(self, state: ScoreSums) -> dict[str, Score]:
        n = state.voxels
        return {
            "nll": from_units(state.nll) / n if n else NO_VOXELS,
            "brier": from_units(state.brier) / n if n else NO_VOXELS,
            "n_voxels": float(n),
            "n_floored": float(state.floored),
            "n_floored_outside": float(state.floored_outside),
        }
