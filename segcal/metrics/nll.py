"""Proper scores: negative log-likelihood and Brier score of the true class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score
from segcal.metrics.fixed_point import exact_sum, from_units
from segcal.metrics.voxels import VoxelBatch

PROBABILITY_FLOOR = float(torch.finfo(torch.float32).tiny)
"""Smallest normal float32: q below it is raised to it and counted, so one voxel costs at most 87.3 nats."""


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums of one case, the losses in units of segcal.metrics.fixed_point."""

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


class ProperScores(Metric[ScoreSums]):
    """Mean over voxels of -log q_y (nats) and of sum_c (q_c - 1[y = c])^2.

    `n_floored` counts the voxels whose q_y was raised to the floor, `n_floored_outside` those of them outside the crop
    the network predicted in, where everything counts as certain background: labelled foreground that cropping cut off.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"nll": "lower", "brier": "lower"}

    def measure(self, batch: VoxelBatch) -> ScoreSums:
        # A class that was predicted is far from the floor.
        below = batch.misses[batch.label_probs[batch.misses] < PROBABILITY_FLOOR]
        floored = len(below)
        outside = int(batch.outside[below].sum()) if floored and batch.outside is not None else 0
        losses = batch.label_log_probs.clamp(min=math.log(PROBABILITY_FLOOR)).neg_()
        return ScoreSums(batch.n_voxels, exact_sum(losses), exact_sum(_brier(batch)), floored, outside)

    def score(self, state: ScoreSums) -> dict[str, Score]:
        n = state.voxels
        return {
            "nll": from_units(state.nll) / n if n else NO_VOXELS,
            "brier": from_units(state.brier) / n if n else NO_VOXELS,
            "n_voxels": float(n),
            "n_floored": float(state.floored),
            "n_floored_outside": float(state.floored_outside),
        }


def _brier(batch: VoxelBatch) -> torch.Tensor:
    """(voxel,) sum_c (q_c - 1[y = c])^2 = sum_c q_c^2 - 2 q_y + 1."""
    return batch.probs.double().square().sum(0).sub_(batch.label_probs, alpha=2.0).add_(1.0)
