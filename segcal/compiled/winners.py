"""The largest class of every voxel, the first of equals; and where it is not the wanted one."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.build import compiled, inlined

_BLOCK = 512

Floats: TypeAlias = NDArray[np.floating]


@compiled
def find_largest(rows: Floats, stride: int, n_classes: int, largest: NDArray[np.integer]) -> None:
    """Write the first largest class of every voxel into `largest`.

    Args:
        rows: values of class c and voxel i at c * stride + i; see `flat_rows`.
        stride: from one class to the next.
        n_classes: how many there are; `largest` must have room for their indices.
        largest: (n,) room for the answer.
    """
    top, winner = np.empty(_BLOCK, rows.dtype), np.empty(_BLOCK, np.int32)
    for begin in range(0, len(largest), _BLOCK):
        size = min(_BLOCK, len(largest) - begin)
        _first_largest(rows, stride, n_classes, begin, size, top, winner)
        answer = largest[begin : begin + size]
        for i in range(size):
            answer[i] = winner[i]


@compiled
def find_differing(
    rows: Floats, stride: int, n_classes: int, wanted: NDArray[np.integer], found: NDArray[np.int64]
) -> int:
    """Write the positions at which the first largest class is not the wanted one into `found`.

    Args:
        rows: values of class c and voxel i at c * stride + i; see `flat_rows`.
        stride: from one class to the next.
        n_classes: how many there are.
        wanted: (n,) class indices.
        found: (n,) room for the positions.

    Returns:
        How many there are.
    """
    top, winner = np.empty(_BLOCK, rows.dtype), np.empty(_BLOCK, np.int32)
    n_found = 0
    for begin in range(0, len(wanted), _BLOCK):
        size = min(_BLOCK, len(wanted) - begin)
        chosen = wanted[begin : begin + size]
        if _all_won(rows, stride, n_classes, begin, size, chosen):
            continue
        _first_largest(rows, stride, n_classes, begin, size, top, winner)
        n_wrong = 0
        for i in range(size):
            n_wrong += chosen[i] != winner[i]
        if n_wrong > 0:
            for i in range(size):
                if chosen[i] != winner[i]:
                    found[n_found] = begin + i
                    n_found += 1
    return n_found


@compiled
def _all_won(rows: Floats, stride: int, n_classes: int, begin: int, size: int, chosen: NDArray[np.integer]) -> bool:
    """Whether `size` voxels from `begin` are all wanted as one class, and it is the first largest of each; quick."""
    one, n_others = np.intp(chosen[0]), 0
    for i in range(size):
        n_others += chosen[i] != chosen[0]
    if n_others > 0:
        return False
    own = rows[one * stride + begin : one * stride + begin + size]
    for c in range(n_classes):
        row = rows[c * stride + begin : c * stride + begin + size]
        n_behind = 0
        if c < one:
            for i in range(size):
                n_behind += row[i] < own[i]
        else:
            for i in range(size):
                n_behind += row[i] <= own[i]
        if n_behind < size:
            return False
    return True


@inlined
def _first_largest(
    rows: Floats, stride: int, n_classes: int, begin: int, size: int, top: Floats, winner: NDArray[np.int32]
) -> None:
    """Of `size` voxels from `begin`: the largest value and its class."""
    first = rows[begin : begin + size]
    for i in range(size):
        top[i] = first[i]
        winner[i] = 0
    for c in range(1, n_classes):
        row = rows[c * stride + begin : c * stride + begin + size]
        for i in range(size):
            ahead = row[i] > top[i]
            winner[i] = c if ahead else winner[i]
            top[i] = row[i] if ahead else top[i]
