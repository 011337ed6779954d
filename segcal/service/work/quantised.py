"""Volumes for the viewer in few bytes: shares in steps of 1/255, images in 16 bits, plane by plane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segcal.io.atomic import atomic_write
from segcal.io.nifti import write_nifti
from segcal.types import Grid

SHARE_STEPS = 255
_CHUNK_VALUES = 1 << 21
_WHOLE = np.iinfo(np.int16)
_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Integers (z, y, x) that stand for `slope * stored + intercept`."""

    values: NDArray[Any]
    slope: float = 1.0
    intercept: float = 0.0

    def save(self, path: Path, grid: Grid) -> None:
        """Write a NIfTI, whole or not at all; without geometry it gets the identity."""
        with atomic_write(path) as temporary:
            write_nifti(temporary, self.values, affine=grid.affine, slope_inter=(self.slope, self.intercept))


def planes_of(shape: tuple[int, ...], n_channels: int = 1) -> Iterator[slice]:
    """Cut the z axis into pieces of a bounded number of values."""
    step = max(1, _CHUNK_VALUES // max(1, n_channels * shape[1] * shape[2]))
    yield from (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def stored_share(shape: tuple[int, int, int], share: Callable[[slice], Tensor], n_channels: int = 1) -> Stored:
    """Numbers from 0 to 1 as bytes, never more than some planes of them as floats.

    Args:
        shape: (z, y, x).
        share: makes the planes asked for.
        n_channels: how many values a voxel `share` works with, for the size of the pieces.
    """
    values = np.empty(shape, dtype=np.uint8)
    for planes in planes_of(shape, n_channels):
        steps = (share(planes).double() * SHARE_STEPS).round_().clamp_(0, SHARE_STEPS)
        values[planes] = steps.cpu().numpy().astype(np.uint8)
    return Stored(values, 1 / SHARE_STEPS)


def stored_image(image: NDArray[np.float32]) -> Stored:
    """Intensities (z, y, x) as int16: exact when they are whole numbers in its range, else in 65,534 equal steps.

    What is not a number is shown as the lowest intensity there is. `image` is changed.
    """
    finite = np.isfinite(image)
    if not finite.all():
        image[~finite] = image[finite].min() if finite.any() else 0.0
    low, high = float(image.min()), float(image.max())
    whole = all(bool((np.rint(image[planes]) == image[planes]).all()) for planes in planes_of(image.shape))
    if whole and low >= _WHOLE.min and high <= _WHOLE.max:
        return Stored(image.astype(np.int16))
    # The header keeps float32, so the steps are made with what a reader will multiply by.
    slope = float(np.float32((high - low) / (2 * _WHOLE.max))) or 1.0
    middle = float(np.float32(low + (high - low) / 2))
    values = np.empty(image.shape, dtype=np.int16)
    for planes in planes_of(image.shape):
        steps = np.rint((image[planes].astype(np.float64) - middle) / slope)
        values[planes] = np.clip(steps, -_WHOLE.max, _WHOLE.max).astype(np.int16)
    return Stored(values, slope, middle)


def window(image: NDArray[np.float32]) -> tuple[float, float]:
    """Intensities between which an image is worth looking at: 0.5 to 99.5 per cent of about a million voxels."""
    flat = image.reshape(-1)
    low, high = (float(q) for q in np.percentile(flat[:: max(1, flat.size // _SAMPLE)], [0.5, 99.5]))
    if low == high:
        low, high = float(flat.min()), float(flat.max())
    return (low, high) if low < high else (low, low + 1.0)
