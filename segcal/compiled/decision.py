"""The largest class of every voxel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.build import compiled

_PIECE = 1024


@compiled
def first_largest(values: NDArray[np.float32], found: NDArray[np.int64]) -> None:
    """Write the index of the largest of (class, voxel) into `found`, (voxel,): the first one on ties."""
    n_classes, n_voxels = values.shape
    top = np.empty(_PIECE, dtype=values.dtype)
    for begin in range(0, n_voxels, _PIECE):
        size = min(_PIECE, n_voxels - begin)
        index = found[begin : begin + size]
        first = values[0, begin : begin + size]
        for i in range(size):
            top[i] = first[i]
            index[i] = 0
        for k in range(1, n_classes):
            channel = values[k, begin : begin + size]
            for i in range(size):
                larger = channel[i] > top[i]
                index[i] = k if larger else index[i]
                top[i] = channel[i] if larger else top[i]
