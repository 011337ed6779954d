"""One pass over a member's values: everything the checks want to know about them, counted a few planes at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.io.members import Member
from segcal.types import Box, box_slices

FLOAT16_MAX = 65504.0
FINE_SUM = 1e-3
"""Sums of probabilities further from 1 than this are counted."""
_CHUNK_VALUES = 2**21


@dataclass(slots=True)
class ValueCounts:
    """What one pass over a member's values inside its crop counted; everything is a number of voxels unless said.

    Attributes:
        n_nan, n_infinite: Values, not voxels.
        low, high: Range of the finite values.
        n_off_sum: Probabilities that do not sum to 1; worst_sum is the sum furthest from it.
        n_at_limit: A logit at or beyond the end of float16.
        n_like_probabilities: In a file of logits, values from 0 to 1 that sum to 1.
        n_certain: A probability of exactly 1.
        n_unit, n_zero: Exactly (1, 0, ..., 0) and all zeros.
        n_corner: The vector of the first or of the last voxel, whichever is more frequent. Padding on any side of
            any axis reaches one of the two.
    """

    n_voxels: int = 0
    n_nan: int = 0
    n_infinite: int = 0
    low: float = math.inf
    high: float = -math.inf
    n_off_sum: int = 0
    worst_sum: float = 1.0
    n_at_limit: int = 0
    n_like_probabilities: int = 0
    n_certain: int = 0
    n_unit: int = 0
    n_zero: int = 0
    n_corner: int = 0

    def share(self, count: int) -> float:
        """Part of the voxels."""
        return count / max(self.n_voxels, 1)


def inside(member: Member) -> NDArray[Any]:
    """The values the network predicted, (class, z, y, x); a view."""
    if member.crop is None:
        return member.values
    return member.values[:, *box_slices(member.crop)]


def count_values(member: Member) -> ValueCounts:
    """Count everything the checks need in one pass, a few planes at a time."""
    values, counts = inside(member), ValueCounts()
    stored = torch.from_numpy(values)
    first, last = stored[:, 0, 0, 0].clone(), stored[:, -1, -1, -1].clone()
    n_first = n_last = 0
    for part in _parts(stored):
        _count_part(part, member.kind == "probabilities", counts)
        n_first += n_equal(part, first)
        n_last += n_equal(part, last)
    counts.n_corner = max(n_first, n_last)
    return counts


def _parts(stored: Tensor) -> Iterator[Tensor]:
    n_classes, depth, height, width = stored.shape
    step = max(1, _CHUNK_VALUES // (n_classes * height * width))
    for start in range(0, depth, step):
        wide = stored[:, start : start + step]
        yield (wide if wide.dtype == torch.float64 else wide.to(torch.float32)).reshape(n_classes, -1)


def _count_part(part: Tensor, probabilities: bool, counts: ValueCounts) -> None:
    counts.n_voxels += part.shape[1]
    low, high = (float(bound) for bound in part.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        counts.n_nan += int(part.isnan().sum())
        counts.n_infinite += int(part.isinf().sum())
        part = part.nan_to_num(0.0, 0.0, 0.0)
        low, high = (float(bound) for bound in part.aminmax())
    counts.low, counts.high = min(counts.low, low), max(counts.high, high)
    counts.n_unit += n_equal(part, torch.eye(part.shape[0])[0])
    counts.n_zero += n_equal(part, torch.zeros(part.shape[0]))
    if not probabilities:
        if low >= 0 and high <= 1:
            counts.n_like_probabilities += int(((part.sum(dim=0) - 1).abs() <= FINE_SUM).sum())
        if max(-low, high) >= FLOAT16_MAX:
            counts.n_at_limit += int((part.abs() >= FLOAT16_MAX).any(dim=0).sum())
        return
    counts.n_certain += int((part == 1).any(dim=0).sum())
    sums = part.sum(dim=0)
    off = (sums - 1).abs()
    counts.n_off_sum += int((off > FINE_SUM).sum())
    worst = float(sums[off.argmax()])
    if abs(worst - 1) > abs(counts.worst_sum - 1):
        counts.worst_sum = worst


def n_equal(part: Tensor, vector: Tensor) -> int:
    """Number of voxels whose vector is exactly `vector`; later classes are looked at only where all before fit."""
    vector = vector.to(part.dtype)
    equal = part[0] == vector[0]
    count = int(equal.sum())
    for k in range(1, part.shape[0]):
        if count == 0:
            return 0
        equal &= part[k] == vector[k]
        count = int(equal.sum())
    return count


def box_around_others(member: Member, vector: NDArray[np.float64]) -> Box | None:
    """Smallest half-open box, in the whole array, around the voxels whose vector is not `vector`; None if all are."""
    values = inside(member)
    differs = np.zeros(values.shape[1:], dtype=np.bool_)
    for k, value in enumerate(vector):
        differs |= values[k] != values.dtype.type(value)
    if not differs.any():
        return None
    start = [0, 0, 0] if member.crop is None else [low for low, _ in member.crop]
    bounds = []
    for axis in range(3):
        line = np.flatnonzero(differs.any(axis=tuple(other for other in range(3) if other != axis)))
        bounds.append((start[axis] + int(line[0]), start[axis] + int(line[-1]) + 1))
    return bounds[0], bounds[1], bounds[2]
