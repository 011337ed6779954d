"""The compiled temperature map is torch's, and a slice is mapped alike whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from segcal.calibrators.local_temperature import LEAF_BIAS_OF_ONE, N_LEAVES, N_MAPS, tree_temperature
from segcal.compiled.temperatures import BLOCK, tree_temperatures


def by_loop(slices: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    n, _, height, width = slices.shape
    out = torch.empty(n, height - 8, width - 8)
    tree_temperatures(slices.numpy(), weight.numpy(), bias.numpy(), out.numpy())
    return out


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# The last one is longer than a block, with rows that begin in the middle of one.
SHAPES = [(1, 2, 9, 9), (3, 5, 30, 17), (2, 1, 10, 60), (1, 3, 40, 2 * BLOCK // 30), (1, 2, 9, BLOCK + 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [0.05, 1.0], ids=["smooth", "steep"])
def test_the_loop_gives_the_temperatures_of_the_torch_form(shape: tuple[int, ...], scale: float) -> None:
    slices, weight = drawn(*shape, seed=0, scale=5.0), drawn(N_MAPS, shape[1], 5, 5, seed=1, scale=scale)
    bias = drawn(N_MAPS, seed=2)
    exact = tree_temperature(slices.double(), weight.double(), bias.double())
    found = by_loop(slices, weight, bias).double()
    # Scores of up to 200 are rounded by some 1e-5, a relative error of a small temperature; nothing else may get lost.
    torch.testing.assert_close(found, exact, rtol=1e-5 if scale < 1 else 5e-4, atol=0)


def test_a_slice_is_mapped_alike_whatever_stands_beside_it() -> None:
    slices, weight, bias = drawn(4, 3, 21, 33, seed=3), drawn(N_MAPS, 3, 5, 5, seed=4), drawn(N_MAPS, seed=5)
    together = by_loop(slices, weight, bias)
    assert torch.equal(together, torch.cat([by_loop(one[None], weight, bias) for one in slices]))


def test_leaves_of_one_are_one_whatever_the_gates_say() -> None:
    weight, bias = drawn(N_MAPS, 2, 5, 5, seed=6), drawn(N_MAPS, seed=7)
    weight[:N_LEAVES], bias[:N_LEAVES] = 0.0, LEAF_BIAS_OF_ONE
    tau = by_loop(drawn(2, 2, 20, 20, seed=8), weight, bias)
    assert bool((tau == tau[0, 0, 0]).all())
    assert float(tau[0, 0, 0]) == pytest.approx(1.0, rel=1e-6)


def test_equal_leaves_are_kept_to_the_last_bit_whatever_the_gates_say() -> None:
    weight, bias = drawn(N_MAPS, 2, 5, 5, seed=11), drawn(N_MAPS, seed=12)
    weight[:N_LEAVES], bias[:N_LEAVES] = 0.0, -1.0
    tau = by_loop(drawn(1, 2, 30, 30, seed=13, scale=3.0), weight, bias)
    assert bool((tau == tau[0, 0, 0]).all())
    assert float(tau[0, 0, 0]) == pytest.approx(0.3132617, rel=1e-6)


@pytest.mark.parametrize("other", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("gate", [50.0, -50.0])
def test_a_large_leaf_that_is_not_chosen_costs_the_other_no_digits(other: float, gate: float) -> None:
    bias = torch.full((N_MAPS,), gate)
    bias[:N_LEAVES] = torch.tensor([1.0, other, 1.0, other] if gate > 0 else [other, 1.0, other, 1.0])
    tau = by_loop(drawn(1, 2, 12, 12, seed=14), torch.zeros(N_MAPS, 2, 5, 5), bias)
    torch.testing.assert_close(tau, torch.full_like(tau, 1.3132617), rtol=1e-6, atol=0)


def test_nan_goes_to_every_pixel_that_sees_it() -> None:
    slices = drawn(1, 2, 30, 30, seed=15)
    slices[0, 1, 15, 15] = torch.nan
    tau = by_loop(slices, drawn(N_MAPS, 2, 5, 5, seed=16), drawn(N_MAPS, seed=17))
    assert int(tau.isnan().sum()) == 25


@pytest.mark.parametrize(("leaf", "expected"), [(-30.0, 0.01), (500.0, 100.0)])
def test_temperatures_are_kept_within_their_bounds(leaf: float, expected: float) -> None:
    bias = torch.zeros(N_MAPS)
    bias[:N_LEAVES] = leaf
    tau = by_loop(drawn(1, 2, 12, 12, seed=9), torch.zeros(N_MAPS, 2, 5, 5), bias)
    torch.testing.assert_close(tau, torch.full_like(tau, expected))


def test_where_a_gradient_is_wanted_torch_maps() -> None:
    weight = torch.zeros(N_MAPS, 2, 5, 5, requires_grad=True)
    bias = torch.zeros(N_MAPS, requires_grad=True)
    tree_temperature(drawn(1, 2, 12, 12, seed=10), weight, bias).sum().backward()
    assert bias.grad is not None
    assert bool(bias.grad.abs().sum() > 0)
