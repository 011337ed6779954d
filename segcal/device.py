"""Choosing where tensors live."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.errors import UsageError

DEVICE_NAMES = ("auto", "cpu", "cuda", "mps")

LOOP_DEVICES = frozenset({"cpu"})
"""Where `segcal.compiled` has loops for; everywhere else the same is done by torch operations (ADR 8)."""


def takes_loop(*values: Tensor) -> bool:
    """Whether a compiled loop works on these values; otherwise torch operations do.

    A loop expects float32 on the CPU, and gives no gradients. The one place where the two part: whatever asks here
    gives the same answer either way.
    """
    gradients = torch.is_grad_enabled()
    return all(
        value.device.type in LOOP_DEVICES and value.dtype == torch.float32 and not (gradients and value.requires_grad)
        for value in values
    )


def resolve_device(wanted: str | torch.device = "auto", *, sums: bool = False) -> torch.device:
    """Turn the value of `--device` into a device that exists; a device is taken as it is.

    `auto` takes CUDA, else Apple's MPS, else the CPU.

    Args:
        wanted: as given by the user.
        sums: float64 sums over voxels will be kept there, which MPS cannot do: `auto` passes it over.

    Raises:
        UsageError: the name is unknown, or the device asked for is absent or cannot do what is needed.
    """
    if isinstance(wanted, torch.device) and not (sums and wanted.type == "mps"):
        return wanted
    name = wanted.type if isinstance(wanted, torch.device) else wanted
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        able = (device for device, there in available.items() if there and not (sums and device == "mps"))
        return torch.device(next(able))
    if name == "mps" and sums:
        raise UsageError("device 'mps' has no float64, which sums over voxels need here; use `--device cpu`.")
    if name not in available:
        raise UsageError(f"unknown device {name!r}: expected one of {', '.join(DEVICE_NAMES)}.")
    if not available[name]:
        present = ", ".join(device for device, there in available.items() if there)
        raise UsageError(f"device {name!r} is not available to torch here, only {present}; use `--device auto`.")
    return torch.device(name)
