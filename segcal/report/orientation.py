"""Which way up a slice is shown: as radiologists expect it, whatever the order and direction of the stored axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.types import Grid

_PLANES = {"I": "axial", "P": "coronal", "L": "sagittal"}
_OPPOSITE = {"L": "R", "P": "A", "I": "S"}


@dataclass(frozen=True, slots=True)
class SliceView:
    """How an array slice (y, x) becomes a picture.

    Attributes:
        transpose: Swap rows and columns first.
        flip_rows: Then turn the picture upside down.
        flip_columns: Then mirror it.
        aspect: Height of a pixel over its width, in millimetres.
        plane: `axial`, `coronal`, `sagittal`; empty when the geometry is unknown.
        left: Letter of the body side at the left edge (`R` in an axial slice); empty when unknown.
        top: Letter at the upper edge.
    """

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False
    aspect: float = 1.0
    plane: str = ""
    left: str = ""
    top: str = ""

    def picture(self, values: NDArray[Any]) -> NDArray[Any]:
        """Turns an array slice (y, x) or (y, x, channel) the way it is shown."""
        shown = values.swapaxes(0, 1) if self.transpose else values
        return shown[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


def slice_view(grid: Grid | None) -> SliceView:
    """The radiological view of slices along array axis 0.

    Columns run to the patient's left, or to the back in sagittal slices; rows run down, or to the back in axial slices.
    Oblique axes are named after the direction they are closest to.
    """
    if grid is None or grid.affine is None:
        return SliceView()
    along_x, along_y, along_z = grid.affine[:3, 0], grid.affine[:3, 1], grid.affine[:3, 2]
    letters, signs = zip(*_nearest_directions(np.stack([along_x, along_y, along_z])), strict=True)
    size_x, size_y = float(np.linalg.norm(along_x)), float(np.linalg.norm(along_y))
    # The body's long axis goes down the page; without it (axial slices) front to back does.
    transpose = letters[0] == "I" or (letters[0] == "P" and letters[1] == "L")
    column, row = (1, 0) if transpose else (0, 1)
    return SliceView(
        transpose=transpose,
        flip_rows=signs[row] < 0,
        flip_columns=signs[column] < 0,
        aspect=size_x / size_y if transpose else size_y / size_x,
        plane=_PLANES[letters[2]],
        left=_OPPOSITE[letters[column]],
        top=_OPPOSITE[letters[row]],
    )


def _nearest_directions(axes: NDArray[np.float64]) -> list[tuple[str, float]]:
    """For each row of `axes` (array axis in RAS+ world) its letter among L, P, I and +1 or -1; each letter once."""
    towards = np.array([[-1.0, 0, 0], [0, -1.0, 0], [0, 0, -1.0]])  # L, P, I
    cosines = axes @ towards.T / np.linalg.norm(axes, axis=1, keepdims=True)
    named: list[tuple[str, float]] = [("", 0.0)] * 3
    left = np.abs(cosines)
    for _ in range(3):
        axis, letter = np.unravel_index(int(left.argmax()), left.shape)
        named[axis] = ("LPI"[letter], float(np.sign(cosines[axis, letter])))
        left[axis, :] = left[:, letter] = -1.0
    return named
