"""Memory for whole volumes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NUMPY_TYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


def empty_volume(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty` for arrays of many megabytes.

    On the CPU the memory comes from numpy, which asks the system for large pages: touching a volume of BraTS size for
    the first time then costs 0.02 CPU seconds instead of 0.1.
    """
    if device.type != "cpu" or dtype not in _NUMPY_TYPES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.empty(tuple(shape), dtype=_NUMPY_TYPES[dtype])).to(device)
