"""Words the whole library shares: what a file holds, how members are pooled, where a grid lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["logits", "probabilities"]
"""What a member file holds; declared by the manifest or the file's key, never guessed from values."""

Pooling: TypeAlias = Literal["logits", "probabilities"]
"""Mean of logits (nnU-Net's folds) or mean of probabilities (`nnUNetv2_ensemble`)."""

AppliedPooling: TypeAlias = Literal["logits", "probabilities", "members-probabilities"]
"""How a calibrator is applied: to the pooled members, or to each of them before their probabilities are averaged."""

Box: TypeAlias = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Half-open box ((z0, z1), (y0, y1), (x0, x1)) in array order."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as progress(stage, done, total) by everything that takes long."""

IGNORED = -1
"""Class index of a voxel that never counts (the manifest's `ignore_label`)."""

GRID_TOLERANCE_MM = 1e-2
"""How far apart the corners of two grids may lie that are called the same: affines are stored in single precision."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Where an array lies in space.

    Attributes:
        shape: (z, y, x).
        affine: (4, 4) float64, voxel (x, y, z) to world in RAS+ millimetres as nibabel has it;
            None for images without geometry (PNG).
    """

    shape: tuple[int, int, int]
    affine: NDArray[np.float64] | None = None

    def agrees_with(self, other: Grid) -> bool:
        """Same shape and, where both have one, the same affine at every corner of the volume."""
        if self.shape != other.shape:
            return False
        if self.affine is None or other.affine is None:
            return True
        z, y, x = (n - 1 for n in self.shape)
        corners = np.array([[i, j, k, 1.0] for i in (0, x) for j in (0, y) for k in (0, z)])
        apart = (self.affine - other.affine) @ corners.T
        return bool(np.abs(apart[:3]).max() <= GRID_TOLERANCE_MM)


def box_slices(box: Box) -> tuple[slice, slice, slice]:
    """What an array (z, y, x) is indexed with to get the box."""
    z, y, x = (slice(low, high) for low, high in box)
    return z, y, x
