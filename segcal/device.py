"""Choosing where tensors live."""

from __future__ import annotations

import torch

from segcal.errors import UsageError

DEVICE_NAMES = ("auto", "cpu", "cuda", "mps")


def resolve_device(name: str = "auto") -> torch.device:
    """Turn the value of `--device` into a device that exists.

    `auto` takes CUDA, else Apple's MPS, else the CPU.

    Raises:
        UsageError: the name is unknown or the device asked for is absent.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, present in available.items() if present))
    if name not in available:
        raise UsageError(f"unknown device {name!r}: expected one of {', '.join(DEVICE_NAMES)}.")
    if not available[name]:
        present = ", ".join(device for device, there in available.items() if there)
        raise UsageError(f"device {name!r} is not available to torch here, only {present}; use `--device auto`.")
    return torch.device(name)
