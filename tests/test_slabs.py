"""Runs of voxels cut out of slabs of slices: the values of the volume, every slice made once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from segcal.calibrators import CALIBRATORS, local_temperature
from segcal.chunks import chunk_slices
from segcal.fitted import FittedCalibrator
from segcal.slabs import BySlabs
from segcal.types import Box
from tests.apply_data import drawn_case, make_fitted
from tests.conformance.drawn import draw_calibrator

SLABS = [slice(0, 1), slice(1, 4), slice(4, 6), slice(6, 11)]
VOLUME = torch.arange(2 * 11 * 3 * 5).reshape(2, 11, 3, 5)
FLAT = VOLUME.flatten(1)


def by_slabs(made: list[slice]) -> BySlabs:
    def make(z: slice) -> Tensor:
        made.append(z)
        return VOLUME[:, z]

    return BySlabs(make, SLABS, 15)


@pytest.mark.parametrize("step", [1, 4, 15, 17, 64, 165, 500])
def test_runs_one_after_the_other_make_every_slab_once(step: int) -> None:
    made: list[slice] = []
    values = by_slabs(made)
    for where in chunk_slices(165, step):
        assert torch.equal(values(where), FLAT[:, where])
    assert made == SLABS


@given(st.lists(st.tuples(st.integers(0, 164), st.integers(1, 80)), max_size=6))
def test_any_run_has_the_values_of_the_volume(runs: list[tuple[int, int]]) -> None:
    values = by_slabs([])
    for begin, size in runs:
        where = slice(begin, min(begin + size, 165))
        assert torch.equal(values(where), FLAT[:, where])


def test_no_more_is_held_than_what_was_asked_for_last_and_its_slabs() -> None:
    values = by_slabs([])
    for where in chunk_slices(165, 10):
        values(where)
        assert sum(part.shape[1] for part in values._held) <= 10 + 5 * 15


@pytest.mark.parametrize("name", list(CALIBRATORS))
@pytest.mark.parametrize("crop", [None, ((2, 6), (1, 9), (0, 7)), ((0, 7), (0, 9), (3, 11)), ((3, 4), (8, 9), (0, 1))])
def test_every_calibrator_by_runs_of_voxels_gives_the_bits_of_its_volume(
    name: str, crop: Box | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_temperature, "VALUES_PER_CHUNK", 2 * 17 * 15 * 10)  # two slices at a time, or three
    fitted = FittedCalibrator(draw_calibrator(name, 3), make_fitted(name).info)
    case = drawn_case(crop)
    whole = fitted.volume_probs(case).flatten(1)
    values = fitted.probs_by_voxels(case)
    for where in chunk_slices(whole.shape[1], 128):
        # A voxel-wise map may round the last voxels of a run otherwise, and a crop has other runs.
        tolerance = 0.0 if CALIBRATORS[name].spatial else 2e-7
        assert torch.allclose(values(where), whole[:, where], rtol=0, atol=tolerance)


@pytest.mark.parametrize("crop", [((6, 7), (0, 9), (0, 11)), ((0, 1), (0, 9), (0, 11)), ((3, 4), (2, 8), (3, 9))])
def test_slices_beside_a_crop_are_no_more_at_once_than_those_of_a_volume(
    crop: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_temperature, "VALUES_PER_CHUNK", 2 * 17 * 19 * 10)  # two whole slices at a time
    values = FittedCalibrator(draw_calibrator("lts", 3), make_fitted("lts").info).probs_by_voxels(drawn_case(crop))
    assert isinstance(values, BySlabs)
    depths = [slab.stop - slab.start for slab, _, _ in values._slabs]
    assert max(depths) <= 2
    assert sum(depths) == 7
