"""Fine cells of confidence: enough to find equally filled groups without keeping the confidences.

Cells are spaced by the logarithm of 1 - confidence, 256 to each power of two, because nearly all voxels of a good
segmentation lie close to 1; confidence exactly 1 has a cell of its own. Cells run from confidence 1 downwards.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.compiled import agreed

# A float32 is sign, 8 bits of exponent, 23 of mantissa: dropping 15 of them leaves 256 cells to each power of two.
_DROPPED_BITS = agreed.DROPPED_BITS
_SMALLEST = 2.0**-24  # the gap between 1 and the float32 below it
FIRST_CELL = (int(np.float32(_SMALLEST).view(np.int32)) >> _DROPPED_BITS) - 1
"""What the leading bits of 1 - confidence begin with: cells are counted from there."""


def _cell(distance: float) -> int:
    return (int(np.float32(distance).view(np.int32)) >> _DROPPED_BITS) - FIRST_CELL


N_CELLS = _cell(1.0) + 1

SETTLED = agreed.SETTLED
"""Voxels above this confidence are all but certain. They fill the cells below `N_SETTLED_CELLS`, nothing else does."""

N_SETTLED_CELLS = _cell(2.0**-10)

LARGEST_COMMON_GRID = round(1.0 / (1.0 - SETTLED))
"""Up to this many bins of equal width all settled voxels are in the last one."""


def cell_index(confidence: Tensor) -> Tensor:
    """(n,) int32 cell of every float32 confidence."""
    distance = (1.0 - confidence).clamp_(min=0.0)
    return (distance.view(torch.int32) >> _DROPPED_BITS).sub_(FIRST_CELL).clamp_(min=0)


def cell_widths() -> NDArray[np.float64]:
    """(cell,) how far apart two confidences in a cell can be; 1 - p itself may be rounded by 2^-24."""
    bits = (np.arange(N_CELLS + 1, dtype=np.int32) + FIRST_CELL) << _DROPPED_BITS
    return np.diff(bits.view(np.float32).astype(np.float64)) + _SMALLEST
