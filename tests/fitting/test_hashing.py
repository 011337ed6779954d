"""Numbers that belong to a voxel: uniform, known, and the same however the voxels are batched."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from segcal.fitting.hashing import voxel_uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The reference generator (Steele, Lea & Flood 2014), one step from `state`, in Python's whole numbers."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_reference_itself_gives_the_published_sequence() -> None:
    state, found = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        found.append(splitmix64(state))
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("seed", "case_id"), [(0, "case_1"), (7, "hippocampus_017"), (0, "Müller/ä")])
def test_values_are_those_of_splitmix64(seed: int, case_id: str) -> None:
    start = int.from_bytes(hashlib.blake2b(f"{seed}/{case_id}".encode(), digest_size=8).digest(), "little")
    indices = [0, 1, 2, 1000, 2**31, 2**40]
    expected = [((splitmix64(start + i * 0x9E3779B97F4A7C15) >> 11) + 0.5) / 2**53 for i in indices]
    assert voxel_uniforms(seed, case_id, torch.tensor(indices)).tolist() == expected


def test_values_are_uniform() -> None:
    values = voxel_uniforms(0, "case", torch.arange(200_000)).numpy()
    assert ((values > 0) & (values < 1)).all()
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    # Neighbours in space do not resemble each other either.
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("other", [(1, "case"), (0, "case_2")])
def test_another_seed_or_case_gives_unrelated_values(other: tuple[int, str]) -> None:
    indices = torch.arange(50_000)
    values, others = voxel_uniforms(0, "case", indices).numpy(), voxel_uniforms(*other, indices).numpy()
    assert abs(np.corrcoef(values, others)[0, 1]) < 0.02
    assert stats.kstest((values + others) % 1, "uniform").pvalue > 1e-3


def test_a_value_belongs_to_its_voxel_not_to_the_batch() -> None:
    indices = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    whole = voxel_uniforms(3, "case", indices)
    parts = torch.cat([voxel_uniforms(3, "case", part) for part in indices.split(777)])
    assert torch.equal(whole, parts)
    assert torch.equal(whole, voxel_uniforms(3, "case", torch.arange(10_000))[indices])
