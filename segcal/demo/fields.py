"""Smooth random fields: the raw material of the phantom's shapes, ambiguity and network errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, zoom
from scipy.special import ndtr

Field = NDArray[np.float32]
Shape = tuple[int, int, int]
Spacing = tuple[float, float, float]


def smooth_field(rng: np.random.Generator, shape: Shape, spacing_mm: Spacing, length_mm: float) -> Field:
    """Gaussian random field (z, y, x) with mean 0 and standard deviation 1 that varies over about `length_mm`.

    Long lengths are drawn on a coarser grid and interpolated: the field is as smooth and several times cheaper.
    """
    sigma = np.array([length_mm / step for step in spacing_mm])
    factor = np.maximum(1.0, sigma / 1.5)  # 1.5 voxels of blur are enough for linear interpolation to look smooth
    coarse_shape = tuple(int(np.ceil(n / f)) + 3 for n, f in zip(shape, factor, strict=True))
    coarse = gaussian_filter(rng.standard_normal(coarse_shape, dtype=np.float32), sigma / factor, mode="wrap")
    fine = zoom(coarse, factor, order=1, grid_mode=True, mode="nearest")
    # Interpolation is flat within half a coarse voxel of the rim, so the field is cut out of the inside.
    field = fine[tuple(slice(int(f), int(f) + n) for n, f in zip(shape, factor, strict=True))]
    return np.asarray((field - field.mean()) / field.std(), dtype=np.float32)


def gumbel_fields(rng: np.random.Generator, n: int, shape: Shape, spacing_mm: Spacing, length_mm: float) -> Field:
    """`n` independent, spatially smooth fields (n, z, y, x) whose values follow the standard Gumbel distribution.

    `argmax_c(u_c + g_c)` then draws a label with probability softmax(u) at every voxel, and neighbouring voxels draw
    alike: contours wander as they do between human raters, instead of dissolving into salt and pepper.
    """
    normal = np.stack([smooth_field(rng, shape, spacing_mm, length_mm) for _ in range(n)])
    uniform = np.clip(ndtr(normal), 1e-7, 1 - 1e-7)
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float32)
