"""Which voxels a loss over pairs looks at."""

from __future__ import annotations

import torch
from torch import Tensor


def stratified_indices(n: int, n_wanted: int, seed: int, draw: int, device: torch.device) -> Tensor:
    """`n_wanted` different positions below n, one drawn from each of as many equal stretches; all where n is small.

    A pure function of its arguments, drawn on the host: the same on every device. Draws differ from one another.

    Args:
        n: how many voxels there are.
        n_wanted: how many to take at most.
        seed: of the loss.
        draw: number of the call.
        device: where the result is wanted.
    """
    if n <= n_wanted:
        return torch.arange(n, device=device)
    generator = torch.Generator(device="cpu").manual_seed((seed * 0x9E3779B1 + draw) % 2**63)
    offsets = torch.rand(n_wanted, generator=generator, dtype=torch.float64, device="cpu")
    edges = torch.arange(n_wanted + 1, device="cpu") * n // n_wanted
    return (edges[:-1] + (offsets * torch.diff(edges)).long()).to(device)
