"""Softmax over the classes of every voxel, each with a temperature of its own or one for all.

Voxels are taken in blocks that fit the nearest cache, so memory is read and written once. What is in a block is worked
on in place by `normalise`, which other loops end with too.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.build import compiled
from segcal.compiled.elementary import exp_of_negative32, log_of_positive32

BLOCK = 512
PROBS, LOG_PROBS = 0, 1

Floats: TypeAlias = NDArray[np.float32]


class Sums(NamedTuple):
    """Room for what a block's voxels have in common over the classes.

    Attributes:
        top: the largest value.
        total: the sum of exponentials.
    """

    top: Floats
    total: Floats


@compiled
def softmax_rows(rows: Floats, stride: int, temperatures: Floats, gives: int, out: Floats) -> None:
    """Fill `out` with softmax(z / T) of every voxel.

    Args:
        rows: values of class c and voxel i at c * stride + i; see `flat_rows`.
        stride: from one class to the next.
        temperatures: (n,) or (1,), positive.
        gives: PROBS or LOG_PROBS.
        out: (class, n).
    """
    n_classes, n_voxels = out.shape
    values, sums = np.empty((n_classes, BLOCK), np.float32), new_sums()
    sharpness = np.full(BLOCK, np.float32(1) / temperatures[0], np.float32)
    for begin in range(0, n_voxels, BLOCK):
        size = min(BLOCK, n_voxels - begin)
        if len(temperatures) > 1:
            own = temperatures[begin : begin + size]
            for i in range(size):
                sharpness[i] = np.float32(1) / own[i]
        for c in range(n_classes):
            copy(rows[c * stride + begin : c * stride + begin + size], values[c])
        take_out_largest(values, size, sums.top)  # before the scaling: what all classes share costs no digits
        for c in range(n_classes):
            value = values[c]
            for i in range(size):
                value[i] *= sharpness[i]
        _share_out(values, size, sums.total[:size], gives)
        for c in range(n_classes):
            copy(values[c, :size], out[c, begin : begin + size])


@compiled
def new_sums() -> Sums:
    """Room for one block."""
    return Sums(np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32))


@compiled
def normalise(values: Floats, size: int, sums: Sums, gives: int) -> None:
    """Softmax, or its logarithm, of the first `size` voxels of (class, BLOCK) values, in place."""
    take_out_largest(values, size, sums.top)
    _share_out(values, size, sums.total[:size], gives)


@compiled
def _share_out(values: Floats, size: int, total: Floats, gives: int) -> None:
    """The same of values of which the largest is 0."""
    total[:] = 0
    for c in range(len(values)):
        if gives == PROBS:
            _exponentials(values[c], total)
        else:
            _add_exponentials(values[c], total)
    for i in range(size):
        total[i] = np.float32(1) / total[i] if gives == PROBS else log_of_positive32(total[i])
    for c in range(len(values)):
        value = values[c]
        if gives == PROBS:
            for i in range(size):
                value[i] *= total[i]
        else:
            for i in range(size):
                value[i] -= total[i]


@compiled
def take_out_largest(values: Floats, size: int, top: Floats) -> None:
    """Subtract from the first `size` voxels of (class, BLOCK) values the largest of each, which goes into `top`."""
    copy(values[0, :size], top)
    for c in range(1, len(values)):
        value = values[c]
        for i in range(size):
            top[i] = top[i] if value[i] <= top[i] else value[i]
    for c in range(len(values)):
        value = values[c]
        for i in range(size):
            value[i] -= top[i]  # NaN stays


@compiled
def copy(source: Floats, target: Floats) -> None:
    """One row into another."""
    for i in range(len(source)):
        target[i] = source[i]


@compiled
def _exponentials(value: Floats, total: Floats) -> None:
    """Values to their exponentials, which are added to `total`."""
    for i in range(len(total)):
        value[i] = exp_of_negative32(value[i])
        total[i] += value[i]


@compiled
def _add_exponentials(value: Floats, total: Floats) -> None:
    for i in range(len(total)):
        total[i] += exp_of_negative32(value[i])
