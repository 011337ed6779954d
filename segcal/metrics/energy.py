"""Statistics of logits without labels: how much their arbitrary offset varies in space, how sure they are.

F(v) = log sum_c exp z_c(v) is the part of the logits that softmax ignores. Calibrators that are not translation
invariant see it; its spatial spread says whether that can matter (the paper's Tables 3 and 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from segcal.errors import DataError
from segcal.metrics.fixed_point import CHUNK_VOXELS


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, mean and sum of squared deviations; adding two of them loses no digits (Chan et al. 1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Self) -> Self:
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + apart**2 * (self.count * other.count / count)
        return type(self)(count, mean, squares)

    @property
    def std(self) -> float:
        """Population standard deviation; NaN without values."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


@dataclass
class FreeEnergy:
    """Mean and spatial standard deviation of the pooled free energy of each case.

    Depends on the pooled logits only, so it is measured once a pooling and not once a pipeline. Parts of a case add up
    to the whole case within about 1e-12; the same call always gives the same bits.
    """

    states: dict[str, Moments] = field(default_factory=dict)

    def update(self, case_id: str, logits: Tensor, *, inside: Tensor | None = None) -> None:
        """Add voxels of a case.

        Args:
            case_id: name of the case.
            logits: (C, *grid) pooled logits.
            inside: (*grid) bool, where the network predicted; the fill outside it has no free energy.
        """
        flat = logits.reshape(logits.shape[0], -1)
        counted = None if inside is None else inside.reshape(-1)
        total = self.states.get(case_id, Moments())
        for start in range(0, flat.shape[1], CHUNK_VOXELS):
            chunk = flat[:, start : start + CHUNK_VOXELS]
            if counted is not None:
                chunk = chunk[:, counted[start : start + CHUNK_VOXELS]]
            total = total + _moments(case_id, chunk)
        self.states[case_id] = total

    def merge(self, other: Self) -> None:
        """Take over what another worker measured."""
        for case_id, state in other.states.items():
            self.states[case_id] = self.states.get(case_id, Moments()) + state

    def compute(self) -> dict[str, dict[str, float]]:
        """`free_energy_mean` and `free_energy_std` of every case, NaN for a case without voxels."""
        return {
            case_id: {
                "free_energy_mean": state.mean if state.count else math.nan,
                "free_energy_std": state.std,
            }
            for case_id, state in self.states.items()
        }


def _moments(case_id: str, logits: Tensor) -> Moments:
    """Moments of the free energy of (C, voxel) logits, in float64."""
    if not logits.shape[1]:
        return Moments()
    energy = torch.logsumexp(logits.double(), dim=0)
    mean = float(energy.mean())
    if not math.isfinite(mean):
        raise DataError(f"{case_id}: the logits hold NaN or infinity where the network predicted")
    return Moments(energy.numel(), mean, float((energy - mean).square_().sum()))


def mean_confidence(logits: Tensor, *, regions: bool, inside: Tensor | None = None) -> float:
    """Mean probability of the decision over the voxels the network predicted; regions: of their mean over the regions.

    Args:
        logits: (C, *grid) pooled logits, log-odds for region models.
        regions: whether the channels are regions.
        inside: (*grid) bool, where the network predicted.
    """
    flat = logits.reshape(logits.shape[0], -1)
    counted = None if inside is None else inside.reshape(-1)
    total = 0.0
    for begin in range(0, flat.shape[1], CHUNK_VOXELS):
        part = flat[:, begin : begin + CHUNK_VOXELS].double()
        confident = torch.sigmoid(part.abs()).mean(0) if regions else torch.softmax(part, 0).amax(0)
        if counted is not None:
            confident = confident[counted[begin : begin + CHUNK_VOXELS]]
        total += float(confident.sum())
    return total / max(flat.shape[1] if counted is None else int(counted.sum()), 1)
