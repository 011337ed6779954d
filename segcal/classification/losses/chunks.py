"""Tables of voxels x bins, a piece at a time: the memory of a piece, whatever the number of voxels.

A table of 15 to 64 columns per voxel would be several times the logits, and automatic differentiation keeps every
intermediate of it. Pieces are instead computed again during the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 1 << 14


def sum_over_chunks(function: Callable[..., Tensor], *vectors: Tensor, size: int = CHUNK) -> Tensor:
    """function(v, w, …) of each piece of the equally long vectors, added up in order."""
    parts = _pieces(function, vectors, size)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def map_over_chunks(function: Callable[..., Tensor], *vectors: Tensor, size: int = CHUNK) -> Tensor:
    """function(v, w, …) of each piece, one value per element, put together again."""
    parts = _pieces(function, vectors, size)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pieces(function: Callable[..., Tensor], vectors: tuple[Tensor, ...], size: int) -> list[Tensor]:
    if vectors[0].numel() <= size:
        return [function(*vectors)]
    # `split` and not slices: the backward of each slice would write a vector of the full length.
    pieces = zip(*(vector.split(size) for vector in vectors), strict=True)
    if not any(vector.requires_grad for vector in vectors):
        return [function(*piece) for piece in pieces]
    return [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
