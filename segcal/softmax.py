"""Softmax over the classes of (C, n) values, and its logarithm: compiled where there are loops, torch's elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.device import takes_loop


def softmax(values: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """softmax(z / T) of (C, n) values; T is one positive number or (n,), one for every voxel."""
    if takes_loop(values):
        return _by_loop(values, temperature, logarithm=False)
    return torch.softmax(values / temperature, 0)


def log_softmax(values: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The logarithm of `softmax`, finite wherever the values are."""
    if takes_loop(values):
        return _by_loop(values, temperature, logarithm=True)
    return torch.log_softmax(values / temperature, 0)


def _by_loop(values: Tensor, temperature: float | Tensor, *, logarithm: bool) -> Tensor:
    from segcal.compiled import softmax as loop  # brings numba, which only those who need it wait for
    from segcal.compiled.flat_rows import flat_rows

    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device="cpu").reshape(-1)
    out = torch.empty(values.shape, dtype=torch.float32, device="cpu")
    if out.numel():
        gives = loop.LOG_PROBS if logarithm else loop.PROBS
        loop.softmax_rows(*flat_rows(values), temperatures.contiguous().numpy(), gives, out.numpy())
    return out
