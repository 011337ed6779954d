"""Calibrated probabilities as they lie on disk: rounded to the storage type, the decision still in them.

Rounding is where a calibrated map loses its decision: two classes that differ in float32 become equal in
float16 or in 1/65535 steps. So the map is rounded first and its decision restored afterwards, in the numbers
a reader will see.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.chunks import chunk_slices, chunk_voxels
from segcal.errors import UsageError
from segcal.preserve import keep_decision, keep_region_decision

MapFormat: TypeAlias = Literal["nnunet", "nifti"]
"""nnU-Net's own `.npz` with key `probabilities`, or 4-D NIfTI."""

StorageType: TypeAlias = Literal["float32", "float16", "uint16"]

UINT16_STEPS = 65535
"""A uint16 map stores p as the nearest multiple of 1/65535."""

_HALF_STEPS = UINT16_STEPS // 2
"""32767/65535 reads as at most one half, 32768/65535 as more."""

_NO_TIE_ABOVE = 0.51
"""A class with a larger probability than this is further above all others than float16 rounds."""

_WHY_NOT: dict[tuple[str, str], str] = {
    ("nnunet", "uint16"): "nnU-Net would average the raw integers; use float32 or float16, or --format nifti",
    ("nifti", "float16"): "NIfTI has no 16-bit floats; use float32 or uint16, or --format nnunet",
}


def check_storage(format: str, dtype: str) -> None:
    """Refuse combinations of format and type that no reader would understand."""
    if format not in get_args(MapFormat):
        raise UsageError(f"unknown format `{format}`; known: {', '.join(get_args(MapFormat))}")
    if dtype not in get_args(StorageType):
        raise UsageError(f"unknown dtype `{dtype}`; known: {', '.join(get_args(StorageType))}")
    if (format, dtype) in _WHY_NOT:
        raise UsageError(f"--format {format} cannot hold {dtype}: {_WHY_NOT[format, dtype]}")


def store_classes(probs: Tensor, decision: Tensor, dtype: StorageType) -> NDArray[np.generic]:
    """Round class probabilities to the storage type and keep the decision in the result.

    Args:
        probs: (C, ...) float32, every voxel summing to 1.
        decision: (...) class index, the argmax of `probs`; that of the result, first index on ties, is the same.
        dtype: float32, float16, or uint16 in steps of 1/65535.

    Returns:
        Like `probs` in the storage type. Voxels sum to 1 within its resolution: uint16 voxels to 65535, or 65536
        where a tie had to be broken.
    """
    if dtype == "float32":
        return _to_numpy(probs)  # nothing is rounded
    flat, winners = probs.reshape(probs.shape[0], -1), decision.reshape(-1)
    stored = np.empty(flat.shape, dtype=dtype)
    for where in chunk_slices(flat.shape[1], chunk_voxels(flat.shape[0])):
        part, wanted = flat[:, where], winners[where]
        if dtype == "float16":
            _store_half(part, wanted, torch.from_numpy(stored[:, where]).to("cpu"))
        else:
            stored[:, where] = _to_numpy(keep_decision(_steps_summing_to_one(part, wanted), wanted))
    return stored.reshape(probs.shape)


def store_regions(probs: Tensor, decision: Tensor, dtype: StorageType) -> NDArray[np.generic]:
    """Round region probabilities to the storage type and keep `p > 0.5` as decided.

    Args:
        probs: (R, z, y, x) float32; regions are independent, so they need not sum to 1.
        decision: (R, z, y, x) bool, `probs > 0.5`; it is the same for the result.
        dtype: as for `store_classes`.
    """
    if dtype == "float32":
        return _to_numpy(probs)
    if dtype == "float16":
        return _to_numpy(keep_region_decision(probs.to(torch.float16), decision))
    steps = (probs * UINT16_STEPS).round_().to(torch.int32)
    return _to_numpy(keep_region_decision(steps, decision, half=_HALF_STEPS)).astype(np.uint16)


def _store_half(probs: Tensor, decision: Tensor, target: Tensor) -> None:
    """Round (C, ...) probabilities into `target`, float16 on the host."""
    target.copy_(probs)
    # Rounding keeps the order, so only a tie can unmake the decision, and two classes that tie have half of all each.
    doubtful = probs.amax(0) < _NO_TIE_ABOVE
    if bool(doubtful.any()):
        target[:, doubtful.cpu()] = keep_decision(probs[:, doubtful].to(torch.float16), decision[doubtful]).cpu()


def _steps_summing_to_one(probs: Tensor, decision: Tensor) -> Tensor:
    """Probabilities as int32 multiples of 1/65535 whose sum over the classes is 65535.

    Rounded alone, C classes miss the sum by up to C/2 steps. A surplus is taken from rivals that were rounded up, a
    step each, so that none is off by a whole step; what is missing goes to the winner, which can only help it.
    """
    exact = probs * UINT16_STEPS
    steps = exact.round().to(torch.int32)
    missing = UINT16_STEPS - steps.sum(0, dtype=torch.int32)
    for index, channel in enumerate(steps):
        rounded_up = channel > exact[index]
        taken = (missing < 0) & (decision != index) & rounded_up
        channel -= taken.to(torch.int32)
        missing += taken.to(torch.int32)
    for index, channel in enumerate(steps):
        wins = decision == index
        channel += torch.where(wins, missing.clamp(min=0), 0)
        # One step is left free above every rival, so that keep_decision can always put the winner on top.
        channel.clamp_(0, UINT16_STEPS).sub_((~wins & (channel == UINT16_STEPS)).to(torch.int32))
    return steps


def _to_numpy(values: Tensor) -> NDArray[np.generic]:
    array: NDArray[np.generic] = values.cpu().numpy()
    return array
