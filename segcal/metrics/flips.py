"""Label flips: how many voxels change their class, and whether that helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from segcal.metrics.base import NO_VOXELS, Direction, Metric, Score, Undefined
from segcal.metrics.voxel_sums import FlipCounts
from segcal.metrics.voxels import VoxelBatch


@dataclass(frozen=True, slots=True)
class CaseFlips:
    """Counts against the pooled decision and against the deployed file; None where there is nothing to compare with."""

    pooled: FlipCounts | None
    deployed: FlipCounts | None

    def __add__(self, other: Self) -> Self:
        return type(self)(_add(self.pooled, other.pooled), _add(self.deployed, other.deployed))


class Flips(Metric[CaseFlips]):
    """Share of voxels whose class differs from a reference decision, and what became of them.

    harmful: right before, wrong now; beneficial: wrong before, right now; neutral: wrong before and after, differently.
    `flip` compares with the pooled uncalibrated decision, `flip_deployed` with the segmentation file in use.
    """

    directions: ClassVar[Mapping[str, Direction]] = {
        "flip": "lower",
        "flip_harmful": "lower",
        "flip_beneficial": "higher",
        "flip_deployed": "lower",
        "flip_deployed_harmful": "lower",
        "flip_deployed_beneficial": "higher",
    }

    def measure(self, batch: VoxelBatch) -> CaseFlips:
        return CaseFlips(batch.sums.flips, batch.sums.flips_deployed)

    def score(self, state: CaseFlips) -> dict[str, Score]:
        pooled = _shares("flip", state.pooled, "no pooled decision was given")
        return pooled | _shares("flip_deployed", state.deployed, "no deployed segmentation was given")


def _shares(name: str, counts: FlipCounts | None, reason: str) -> dict[str, Score]:
    columns = (name, f"{name}_harmful", f"{name}_beneficial", f"{name}_neutral")
    if counts is None or not counts.voxels:
        missing = NO_VOXELS if counts else Undefined(reason)
        return dict.fromkeys(columns, missing)
    neutral = counts.flipped - counts.harmful - counts.beneficial
    parts = (counts.flipped, counts.harmful, counts.beneficial, neutral)
    return {column: part / counts.voxels for column, part in zip(columns, parts, strict=True)}


def _add(one: FlipCounts | None, other: FlipCounts | None) -> FlipCounts | None:
    return None if one is None or other is None else one + other
