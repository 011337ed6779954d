"""Softmax over the classes of (C, n) values, and its logarithm: compiled where there are loops, torch's elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.device import takes_loop
from segcal.errors import ParameterError


def softmax(values: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """softmax(z / T) of (C, n) values; T is one positive number or (n,), one for every voxel."""
    if _takes_loop(values, temperature):
        return _by_loop(values, temperature, logarithm=False)
    return torch.softmax(values / temperature, 0)


def log_softmax(values: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The logarithm of `softmax`, finite wherever the values are."""
    if _takes_loop(values, temperature):
        return _by_loop(values, temperature, logarithm=True)
    return torch.log_softmax(values / temperature, 0)


def _takes_loop(values: Tensor, temperature: float | Tensor) -> bool:
    return takes_loop(values, temperature) if isinstance(temperature, Tensor) else takes_loop(values)


def _by_loop(values: Tensor, temperature: float | Tensor, *, logarithm: bool) -> Tensor:
    from segcal.compiled import softmax as loop  # brings numba, which only those who need it wait for
    from segcal.compiled.flat_rows import flat_rows

    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device="cpu").detach().reshape(-1)
    if len(temperatures) not in (1, values.shape[1]):
        raise ParameterError(
            f"{len(temperatures)} temperatures for {values.shape[1]} voxels: expected one, or one each"
        )
    out = torch.empty(values.shape, dtype=torch.float32, device="cpu")
    if out.numel():
        gives = loop.LOG_PROBS if logarithm else loop.PROBS
        loop.softmax_rows(*flat_rows(values), temperatures.contiguous().numpy(), gives, out.numpy())
    return out
