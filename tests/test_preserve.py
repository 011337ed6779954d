"""Keeping the decision in stored numbers: everywhere, by the smallest step, and nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from segcal.preserve import keep_decision, keep_region_decision

FLOATS = (np.float16, np.float32, np.float64)
WHOLE = (np.int32, np.uint8)
"""int32 carries the steps of 1/65535 that NIfTI stores as uint16."""
EVERY_DTYPE = pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])


def after(values: NDArray[np.generic], up: bool = True) -> NDArray[np.generic]:
    """The neighbouring number of the type, by numpy."""
    if values.dtype.kind == "f":
        return np.nextafter(values, values.dtype.type(2 if up else 0))
    return (values + (1 if up else -1 * (values > 0))).astype(values.dtype)


def top(dtype: type[np.generic]) -> float:
    return 1.0 if np.dtype(dtype).kind == "f" else float(np.iinfo(dtype).max)


def palette(dtype: type[np.generic]) -> NDArray[np.generic]:
    """Numbers that are equal, or one unit apart, at the bottom, in the middle and at the top of the type."""
    if np.dtype(dtype).kind == "f":
        middle = np.array([0.0, 1 / 3, 0.5, 1.0], dtype=dtype)
    else:
        middle = np.array([0, 84, 128, np.iinfo(dtype).max], dtype=dtype)
    neighbours = np.concatenate([middle, after(middle, up=False), after(middle[:-1])])
    return np.unique(neighbours)


@st.composite
def stored_and_decided(draw: st.DrawFn, dtype: type[np.generic]) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """(C, n) numbers from the palette and any decision at all."""
    n_classes, n = draw(st.integers(2, 5)), draw(st.integers(1, 12))
    some = palette(dtype)
    picked = draw(st.lists(st.integers(0, len(some) - 1), min_size=n_classes * n, max_size=n_classes * n))
    decision = draw(st.lists(st.integers(0, n_classes - 1), min_size=n, max_size=n))
    return some[np.array(picked)].reshape(n_classes, n), np.array(decision)


@EVERY_DTYPE
@given(data=st.data())
def test_the_decision_is_kept_by_the_smallest_step(dtype: type[np.generic], data: st.DataObject) -> None:
    before, decision = data.draw(stored_and_decided(dtype))
    kept = keep_decision(torch.tensor(before), torch.tensor(decision)).numpy()

    assert kept.dtype == before.dtype
    assert (kept.argmax(0) == decision).all()
    right = before.argmax(0) == decision
    assert (kept[:, right] == before[:, right]).all()
    for column in np.flatnonzero(~right):
        old, new, winner = before[:, column].copy(), kept[:, column], decision[column]
        rivals, rival = np.arange(len(old)) != winner, old.argmax()
        old[[winner, rival]] = old[[rival, winner]]  # a winner that trails trades places first
        if old.argmax() == winner:
            assert (new == old).all()
        elif old.max() < top(dtype):
            assert new[winner] == after(old.max()[None])[0]
            assert (new[rivals] == old[rivals]).all()
        else:  # nothing is above certainty: those who share it give way
            assert new[winner] == old.max()
            assert (new[rivals] == np.where(old == old.max(), after(old, up=False), old)[rivals]).all()


@EVERY_DTYPE
@pytest.mark.parametrize("value", [0.0, 1 / 3, 1.0])
def test_all_equal_rows(dtype: type[np.generic], value: float) -> None:
    stored = torch.tensor(np.full((3, 3), value * min(top(dtype), 65535)).astype(dtype))
    assert keep_decision(stored, torch.arange(3)).argmax(0).tolist() == [0, 1, 2]


def test_a_first_index_that_ties_already_wins() -> None:
    stored = torch.tensor([[0.25], [0.25], [0.25], [0.25]])
    before = stored.clone()
    assert torch.equal(keep_decision(stored, torch.tensor([0])), before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_volumes_that_are_not_contiguous_are_changed_in_place(dtype: type[np.generic]) -> None:
    owner = torch.tensor(np.full((4, 5, 6, 3), 1 / 3).astype(dtype))
    stored = owner.permute(3, 0, 1, 2)  # (C, z, y, x), the class innermost in memory
    decision = torch.arange(4 * 5 * 6).reshape(4, 5, 6) % 3
    assert keep_decision(stored, decision) is stored
    assert torch.equal(owner.argmax(3), decision)


def test_rounding_probabilities_to_half_precision_flips_nothing() -> None:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.choice([0.0, 5.0], (1, 20_000)) + rng.choice([0, 1e-6, 1e-4, 3e-4], (4, 20_000)))
    rounded = torch.softmax(logits, 0).half()
    assert (rounded.argmax(0) != logits.argmax(0)).sum() > 1000
    kept = keep_decision(rounded.clone(), logits.argmax(0))
    assert torch.equal(kept.argmax(0), logits.argmax(0))
    assert (kept.float() - rounded.float()).abs().max() <= 2**-11  # one unit below 1


@EVERY_DTYPE
@given(data=st.data())
def test_region_decisions_are_kept_and_nothing_else_moves(dtype: type[np.generic], data: st.DataObject) -> None:
    before, _ = data.draw(stored_and_decided(dtype))
    half = 0.5 if np.dtype(dtype).kind == "f" else 127
    inside = np.array(data.draw(st.lists(st.booleans(), min_size=before.size, max_size=before.size)))
    decision = inside.reshape(before.shape)
    kept = keep_region_decision(torch.tensor(before), torch.tensor(decision), half=half).numpy()

    assert kept.dtype == before.dtype
    assert ((kept > half) == decision).all()
    right = (before > half) == decision
    assert (kept[right] == before[right]).all()
    boundary = np.array(half, dtype=dtype)
    assert (kept[~right & decision] == after(boundary)).all()
    assert (kept[~right & ~decision] == boundary).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_decision_that_trails_trades_places_so_that_probabilities_still_sum_to_one(dtype: torch.dtype) -> None:
    stored = torch.tensor([[0.7, 0.2], [0.25, 0.3], [0.05, 0.5]], dtype=dtype)
    kept = keep_decision(stored.clone(), torch.tensor([1, 0]))
    assert kept.argmax(0).tolist() == [1, 0]
    assert torch.equal(kept.sum(0), stored.sum(0))
    assert torch.equal(kept.sort(0).values, stored.sort(0).values)


def test_a_volume_larger_than_a_piece_is_kept_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.rand(3, 4, 5, 7, generator=torch.Generator().manual_seed(0))
    decision = stored.argmin(0)
    whole = keep_decision(stored.clone(), decision)
    monkeypatch.setattr("segcal.preserve.chunk_voxels", lambda _: 11)
    assert torch.equal(keep_decision(stored.clone(), decision), whole)
    assert torch.equal(whole.argmax(0), decision)


def test_a_map_whose_voxels_lie_in_another_order_is_changed_in_place() -> None:
    stored = torch.full((2, 3, 4), 0.5).transpose(1, 2)  # (class, y, x), y along memory
    decision = torch.tensor([[1, 0, 1]]).expand(4, 3)
    assert keep_decision(stored, decision) is stored
    assert stored.argmax(0).tolist() == decision.tolist()
