"""Tensors as the loops want them."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def flat_rows(values: Tensor) -> tuple[NDArray[Any], int]:
    """(C, n) values on the CPU as one contiguous array, in which class c and voxel i stand at c * stride + i.

    A run of voxels cut out of a volume is taken as it lies, without a copy. Loops over such an array are vectorised;
    over one with strides that are known at run time only they are not, and each kind of strides would be compiled anew.

    Returns:
        The array and the stride.
    """
    n_classes, n_voxels = values.shape
    if values.stride(1) != 1:
        values = values.contiguous()
    stride = values.stride(0)
    span = (n_classes - 1) * stride + n_voxels if n_voxels else 0
    return torch.as_strided(values, (span,), (1,)).numpy(), stride
