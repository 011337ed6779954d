"""Chunk sizes follow from a budget of bytes, and every voxel is in exactly one chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from segcal.apply import apply_calibrator
from segcal.chunks import CHUNK_BYTES, FEWEST_VOXELS, MOST_VOXELS, chunk_budget, chunk_slices, chunk_voxels
from segcal.errors import ParameterError, UsageError
from segcal.fitting.run import fit_many
from tests.fit_data import write_ensemble


@pytest.mark.parametrize("n_classes", [2, 5, 20, 150])
@pytest.mark.parametrize("n_bytes", [1 << 20, CHUNK_BYTES, 1 << 24])
def test_a_chunk_fills_its_budget_up_to_a_factor_of_two(n_classes: int, n_bytes: int) -> None:
    with chunk_budget(n_bytes):
        step = chunk_voxels(n_classes)
    assert step == MOST_VOXELS or n_bytes / 2 < step * n_classes * 4 <= n_bytes
    assert step & (step - 1) == 0


def test_a_chunk_is_never_smaller_than_what_calls_cost_nor_larger_than_exact_sums_allow() -> None:
    assert chunk_voxels(100_000) == FEWEST_VOXELS
    with chunk_budget(1 << 40):
        assert chunk_voxels(2) == MOST_VOXELS


def test_double_precision_halves_a_chunk() -> None:
    assert chunk_voxels(40, value_bytes=8) * 2 == chunk_voxels(40)


def test_the_budget_ends_with_its_block() -> None:
    with chunk_budget(1 << 16):
        assert chunk_voxels(5) < MOST_VOXELS
    assert chunk_voxels(5) == MOST_VOXELS


def test_blocks_that_overlap_are_refused_and_leave_nothing_behind() -> None:
    first, second = chunk_budget(1 << 13), chunk_budget(1 << 26)
    with first:
        inside = chunk_voxels(5)
        with pytest.raises(UsageError, match=r"8,192 bytes is in force.*one block around the whole run"), second:
            pass
        assert chunk_voxels(5) == inside
    assert chunk_voxels(5) == MOST_VOXELS


def test_a_block_that_ends_in_an_error_leaves_room_for_the_next() -> None:
    with pytest.raises(ZeroDivisionError), chunk_budget(1 << 13):
        _ = 1 / 0
    with chunk_budget(1 << 14):
        assert chunk_voxels(5) < MOST_VOXELS


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ParameterError, match="at least one byte, got 0"), chunk_budget(0):
        pass


@pytest.mark.parametrize("n_voxels", [0, 1, 9, 10, 11, 25])
def test_every_voxel_is_in_one_chunk(n_voxels: int) -> None:
    parts = list(chunk_slices(n_voxels, 10))
    assert [k for part in parts for k in range(part.start, part.stop)] == list(range(n_voxels))


BUDGETS = (1, 1 << 15, 1 << 18, 1 << 30)


def test_no_byte_of_a_fit_or_of_a_map_depends_on_the_budget(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=3, shape=(5, 33, 47))
    written = set()
    for n_bytes in BUDGETS:
        with chunk_budget(n_bytes):
            fitted = fit_many(manifest, ["cdc"], pooling="probabilities", trials=2)["cdc"]
            out = tmp_path / str(n_bytes)
            apply_calibrator(fitted, manifest, out, device=torch.device("cpu"), dtype="float16")
        maps = b"".join(path.read_bytes() for path in sorted(out.glob("*.n*")))
        assert len(maps) > 1000
        written.add((fitted.sha256, maps))
    assert len(written) == 1
