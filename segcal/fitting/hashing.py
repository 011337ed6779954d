"""Random numbers that belong to a voxel: the same for any batching, order of cases or number of workers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from segcal.compiled.agreed import GOLDEN, MIX_1, MIX_2


def voxel_uniforms(seed: int, case_id: str, indices: Tensor) -> Tensor:
    """One number in (0, 1) per voxel, a pure function of (seed, case, voxel).

    The splitmix64 generator at position `index` of a stream that (seed, case) selects.

    Args:
        seed: the run's seed.
        case_id: the case.
        indices: (n,) int64 position of each voxel in its volume.

    Returns:
        (n,) float64 on the CPU or wherever `indices` are, in steps of 2^-53 and never 0 or 1.
    """
    state = (indices * _signed(GOLDEN)).add_(_signed(stream_of(seed, case_id)))
    state.bitwise_xor_(_shift_right(state, 30)).mul_(_signed(MIX_1))
    state.bitwise_xor_(_shift_right(state, 27)).mul_(_signed(MIX_2))
    state.bitwise_xor_(_shift_right(state, 31))
    return _shift_right(state, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)


def stream_of(seed: int, case_id: str) -> int:
    """Where the stream of a case begins, from 0 to 2^64 - 1; `segcal.compiled.scores` goes on from it too."""
    digest = hashlib.blake2b(f"{seed}/{case_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _signed(value: int) -> int:
    """The int64 with the same bits as a uint64 (torch multiplies int64 modulo 2^64)."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)
