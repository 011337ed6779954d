"""Pooling against an explicit double precision loop, and what pooling must refuse."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, log_softmax, logsumexp, softmax

from segcal.errors import DataError, GeometryError
from segcal.io.members import Member
from segcal.pooling import Pool, Pooled, pooled_decision
from segcal.types import Box, Kind, Pooling

CPU = torch.device("cpu")
POOLINGS: list[Pooling] = ["logits", "probabilities"]
KINDS: list[Kind] = ["logits", "probabilities"]
AnyArray = np.ndarray[Any, Any]


def pooled(members: list[Member], pooling: Pooling, *, regions: bool = False, device: torch.device = CPU) -> Pooled:
    pool = Pool(pooling, regions=regions, device=device)
    for member in members:
        pool.add(member)
    return pool.result()


def drawn(seed: int, kind: Kind, dtype: Any, *, regions: bool, n_members: int = 5, spread: float = 6.0) -> list[Member]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=spread, size=(n_members, 3, 4, 5, 6))
    values = logits if kind == "logits" else (expit(logits) if regions else softmax(logits, axis=1))
    return [Member(v.astype(dtype), kind, path=Path(f"member_{m}.npz")) for m, v in enumerate(values)]


def reference(arrays: list[AnyArray], kind: Kind, pooling: Pooling, *, regions: bool) -> AnyArray:
    """METHODS section 1 voxel by voxel in double precision."""
    info = np.finfo(arrays[0].dtype)
    floor, gap = np.float64(info.smallest_subnormal), np.float64(info.epsneg)
    out = np.empty(arrays[0].shape)
    for voxel in np.ndindex(*out.shape[1:]):
        rows = np.array([a[(slice(None), *voxel)] for a in arrays], dtype=np.float64)  # (member, class)
        if kind == "logits":
            log_p = -np.logaddexp(0, -rows) if regions else log_softmax(rows, axis=1)
            log_q = -np.logaddexp(0, rows)
            mean = rows.mean(0)
        else:
            log_p, log_q = np.log(np.maximum(rows, floor)), np.log(np.maximum(1 - rows, gap))
            mean = (log_p - log_q if regions else log_p).mean(0)
        by_probability = logsumexp(log_p, axis=0) - (logsumexp(log_q, axis=0) if regions else np.log(len(rows)))
        out[(slice(None), *voxel)] = mean if pooling == "logits" else by_probability
    return out


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_pooling_agrees_with_an_explicit_loop(kind: Kind, pooling: Pooling, regions: bool, dtype: Any) -> None:
    members = drawn(3, kind, dtype, regions=regions)
    expected = reference([m.values for m in members], kind, pooling, regions=regions)
    result = pooled(members, pooling, regions=regions)
    assert result.logits.dtype == torch.float32
    assert result.crop is None
    np.testing.assert_allclose(result.logits.numpy(), expected, rtol=1e-6, atol=2e-6)


@given(seed=st.integers(0, 10_000), n_members=st.integers(1, 7), spread=st.floats(0.1, 60))
def test_mean_probabilities_keep_their_digits_near_one_and_far_below_the_smallest_float(
    seed: int, n_members: int, spread: float
) -> None:
    members = drawn(seed, "logits", np.float32, regions=False, n_members=n_members, spread=spread)
    expected = reference([m.values for m in members], "logits", "probabilities", regions=False)
    result = pooled(members, "probabilities").logits.numpy()
    reached = expected > -160  # e^-167 is the documented reach
    np.testing.assert_allclose(result[reached], expected[reached], rtol=2e-6, atol=3e-7)
    assert np.isfinite(result).all()
    assert (result[~reached] <= -159).all()


def test_a_class_beyond_reach_gets_the_documented_floor_and_is_counted() -> None:
    values = np.zeros((2, 1, 1, 2), dtype=np.float32)
    values[1, 0, 0, 1] = -500
    result = pooled([Member(values, "logits")] * 2, "probabilities")
    assert result.n_floored == 1
    assert result.logits[1, 0, 0, 1].item() == pytest.approx(-167.7 - np.log(2), abs=0.5)
    assert result.logits[0, 0, 0, 1].item() == 0


@given(seed=st.integers(0, 1000), order=st.permutations(range(5)))
def test_the_order_of_members_matters_only_to_rounding(seed: int, order: list[int]) -> None:
    members = drawn(seed, "logits", np.float16, regions=False)
    for pooling in POOLINGS:
        straight = pooled(members, pooling).logits
        mixed = pooled([members[m] for m in order], pooling).logits
        torch.testing.assert_close(straight, mixed, rtol=1e-6, atol=1e-5)


@given(seed=st.integers(0, 1000))
def test_probability_pooling_ignores_shifts_of_the_logits(seed: int) -> None:
    members = drawn(seed, "logits", np.float64, regions=False)
    shift = np.random.default_rng(seed).normal(scale=20, size=(1, 4, 5, 6))
    moved = [Member(m.values + shift, "logits") for m in members]
    torch.testing.assert_close(
        pooled(members, "probabilities").logits, pooled(moved, "probabilities").logits, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_single_member_pools_to_itself(pooling: Pooling) -> None:
    (member,) = drawn(0, "logits", np.float32, regions=False, n_members=1)
    z = torch.from_numpy(member.values)
    expected = z if pooling == "logits" else z.log_softmax(0)
    torch.testing.assert_close(pooled([member], pooling).logits, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_zero_probabilities_are_raised_to_the_smallest_number_of_their_type_and_counted(
    dtype: Any, pooling: Pooling
) -> None:
    values = np.zeros((3, 1, 2, 2), dtype=dtype)
    values[0] = 1
    values[:, 0, 1, 1] = [0.5, 0.25, 0.25]
    result = pooled([Member(values, "probabilities"), Member(values.copy(), "probabilities")], pooling)
    smallest = np.log(np.float64(np.finfo(dtype).smallest_subnormal))
    assert result.n_floored == 2 * 6  # two classes in three voxels of two members
    np.testing.assert_allclose(result.logits[1:, 0, 0].numpy(), smallest, rtol=1e-6)
    np.testing.assert_allclose(result.logits[:, 0, 1, 1].numpy(), np.log([0.5, 0.25, 0.25]), rtol=1e-6)


def test_the_smallest_number_itself_is_not_counted() -> None:
    smallest = np.finfo(np.float32).smallest_subnormal
    values = np.array([1, smallest], dtype=np.float32).reshape(2, 1, 1, 1)
    for pooling in POOLINGS:
        result = pooled([Member(values, "probabilities")], pooling)
        assert result.n_floored == 0
        assert result.logits[1].item() == pytest.approx(np.log(np.float64(smallest)), rel=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_log_odds_are_bounded_on_both_sides_by_what_the_type_can_say(pooling: Pooling, dtype: Any) -> None:
    values = np.array([0, 1, 0.5], dtype=dtype).reshape(1, 1, 1, 3)
    result = pooled([Member(values, "probabilities")], pooling, regions=True)
    low = np.log(np.float64(np.finfo(dtype).smallest_subnormal))
    high = -np.log(np.float64(np.finfo(dtype).epsneg))
    assert result.n_floored == 2
    assert result.logits.flatten().tolist() == pytest.approx([low, high, 0], rel=1e-6)


def test_scaled_integers_are_raised_to_one_step() -> None:
    step = 1 / 65535
    values = np.array([1, 0], dtype=np.float32).reshape(2, 1, 1, 1)
    result = pooled([Member(values, "probabilities", step=step)], "logits")
    assert result.logits.flatten().tolist() == pytest.approx([0, np.log(step)], abs=1e-6)
    assert result.n_floored == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_values_outside_the_crop_do_not_leak(kind: Kind, regions: bool, pooling: Pooling) -> None:
    crop: Box = ((1, 3), (0, 4), (2, 5))
    box = (slice(None), *(slice(a, b) for a, b in crop))
    members = drawn(5, kind, np.float32, regions=regions)
    whole = pooled(members, pooling, regions=regions)
    outside = np.ones(members[0].values.shape, dtype=bool)
    outside[box] = False
    cropped = []
    for member, fill in zip(members, [np.nan, np.inf, -np.inf, 1e30, -5.0], strict=True):
        cropped.append(Member(np.where(outside, np.float32(fill), member.values), kind, crop))

    result = pooled(cropped, pooling, regions=regions)

    assert result.crop == crop
    torch.testing.assert_close(result.logits[box], whole.logits[box], rtol=0, atol=0)
    assert (result.logits[torch.from_numpy(outside)] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("crop", [None, ((1, 3), (0, 4), (2, 5))])
def test_values_that_are_not_finite_are_refused_and_the_file_is_named(bad: float, kind: Kind, crop: Box | None) -> None:
    members = drawn(1, kind, np.float16, regions=False, n_members=2)
    members = [Member(m.values, m.kind, crop, path=m.path) for m in members]
    members[1].values[2, 2, 3, 4] = bad
    with pytest.raises(DataError, match=r"member_1\.npz: 1 of [\d,]+ values .* NaN or Inf"):
        pooled(members, "logits")


@pytest.mark.parametrize(("dtype", "huge"), [(np.float32, 3e38), (np.float32, -1.1e7), (np.float64, 1e300)])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_logits_that_no_network_means_are_refused_before_they_overflow(
    dtype: Any, huge: float, pooling: Pooling
) -> None:
    members = drawn(1, "logits", dtype, regions=False, n_members=2)
    members[0].values[1, 2, 3, 4] = 6e4  # what half precision holds is believed
    assert torch.isfinite(pooled(members, pooling).logits).all()
    members[1].values[1, 2, 3, 4] = huge
    with pytest.raises(DataError, match=r"member_1\.npz: holds logits from .* expected at most 1e\+07"):
        pooled(members, pooling)


def test_logits_declared_as_probabilities_are_refused() -> None:
    members = [Member(m.values, "probabilities", path=m.path) for m in drawn(1, "logits", np.float32, regions=False)]
    for regions in (False, True):
        with pytest.raises(DataError, match=r"member_0\.npz: declared as probabilities.*`kind: logits`"):
            pooled(members, "logits", regions=regions)


def test_probabilities_stored_as_logits_are_refused() -> None:
    members = [replace(m, kind="logits") for m in drawn(0, "probabilities", np.float16, regions=False)]
    with pytest.raises(DataError, match=r"member_0\.npz: declared as logits but .* sums to 1, as probabilities do"):
        pooled(members, "logits")


def test_logits_of_which_only_a_part_looks_like_probabilities_are_pooled() -> None:
    (member, *_) = drawn(0, "logits", np.float32, regions=False)
    member.values[:, :2] = np.float32(1 / 3)
    assert np.array_equal(pooled([member], "logits").logits.numpy(), member.values)


def test_probabilities_that_do_not_sum_to_one_are_refused_unless_they_are_regions() -> None:
    members = drawn(1, "probabilities", np.float32, regions=True)
    with pytest.raises(DataError, match=r"member_0\.npz.*sum to"):
        pooled(members, "logits")
    assert pooled(members, "logits", regions=True).logits.isfinite().all()
    # The zeros some tools put around the predicted part.
    zeros = np.zeros((3, 2, 2, 2), dtype=np.float32)
    with pytest.raises(DataError, match="`crop`"):
        pooled([Member(zeros, "probabilities")], "logits")


@pytest.mark.parametrize(("excess", "fine"), [(0.008, True), (0.012, False), (-0.008, True), (-0.012, False)])
def test_probabilities_may_miss_one_by_a_hundredth(excess: float, fine: bool) -> None:
    values = np.full((3, 2, 2, 2), 1 / 3, dtype=np.float32)
    values[1] += excess
    if fine:
        assert pooled([Member(values, "probabilities")], "logits").logits.isfinite().all()
        return
    with pytest.raises(DataError, match=r"sum to 1 ± 0\.012"):
        pooled([Member(values, "probabilities")], "logits")


@pytest.mark.parametrize(("value", "fine"), [(1.0009, True), (1.0011, False), (-0.0009, True), (-0.0011, False)])
def test_a_probability_may_leave_0_to_1_by_a_thousandth(value: float, fine: bool) -> None:
    values = np.full((2, 2, 2, 2), value, dtype=np.float32)
    if fine:
        assert pooled([Member(values, "probabilities")], "logits", regions=True).logits.isfinite().all()
        return
    with pytest.raises(DataError, match="expected 0 to 1"):
        pooled([Member(values, "probabilities")], "logits", regions=True)


def test_half_precision_probabilities_of_many_classes_pass() -> None:
    values = softmax(np.random.default_rng(0).normal(size=(100, 2, 3, 4)), axis=0).astype(np.float16)
    assert pooled([Member(values, "probabilities")], "probabilities").logits.isfinite().all()


def test_members_that_do_not_belong_together_are_refused() -> None:
    first, second = drawn(0, "logits", np.float32, regions=False, n_members=2)
    with pytest.raises(GeometryError, match=r"member_1\.npz: shape \(3, 3, 5, 6\).*\(3, 4, 5, 6\) of member_0\.npz"):
        pooled([first, Member(second.values[:, :3], "logits", path=second.path)], "logits")
    with pytest.raises(GeometryError, match=r"member_1\.npz: crop .* differs from None of member_0\.npz"):
        pooled([first, Member(second.values, "logits", ((0, 1), (0, 1), (0, 1)), path=second.path)], "logits")
    with pytest.raises(DataError, match=r"member_1\.npz: holds probabilities but member_0\.npz holds logits"):
        pooled([first, Member(softmax(second.values, axis=0), "probabilities", path=second.path)], "logits")


def test_nothing_to_pool_is_an_error() -> None:
    with pytest.raises(DataError, match="no member"):
        pooled([], "logits")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_keeps_no_member_alive(pooling: Pooling, kind: Kind) -> None:
    pool = Pool(pooling, regions=False, device=CPU)
    (member,) = drawn(0, kind, np.float32, regions=False, n_members=1)
    alive, values_alive = weakref.ref(member), weakref.ref(member.values)
    before = member.values.copy()
    pool.add(member)
    np.testing.assert_array_equal(member.values, before)  # and it does not change it
    del member
    gc.collect()
    assert alive() is None
    assert values_alive() is None
    assert pool.result().logits.shape == (3, 4, 5, 6)


@pytest.mark.parametrize("chunk", [1, 7, 10**9])
def test_the_size_of_the_chunks_changes_no_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    for kind in KINDS:
        for pooling in POOLINGS:
            members = drawn(2, kind, np.float16, regions=False)
            usual = pooled(members, pooling).logits
            with monkeypatch.context() as patch:
                patch.setattr("segcal.pooling.chunk_voxels", lambda _: chunk)
                other = pooled(members, pooling).logits
            assert torch.equal(usual, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees_with_the_cpu() -> None:
    for kind in KINDS:
        for pooling in POOLINGS:
            members = drawn(2, kind, np.float16, regions=False)
            there = pooled(members, pooling, device=torch.device("cuda")).logits
            torch.testing.assert_close(there.cpu(), pooled(members, pooling).logits, rtol=1e-5, atol=1e-5)


def test_a_region_is_decided_above_one_half_and_not_at_it() -> None:
    """As nnU-Net does; logits outside the crop are 0, and no region is there."""
    logits = torch.tensor([-1e-9, 0.0, 1e-9]).reshape(1, 1, 1, 3)
    assert pooled_decision(logits, regions=True).flatten().tolist() == [False, False, True]
