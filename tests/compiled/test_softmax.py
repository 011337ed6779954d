"""The compiled softmax is the exact one to rounding, for every voxel by itself and however far classes are apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from segcal.errors import ParameterError
from segcal.softmax import log_softmax, softmax


def drawn(n_classes: int, n_voxels: int, spread: float = 6.0) -> Tensor:
    return torch.randn(n_classes, n_voxels, generator=torch.Generator().manual_seed(n_classes)) * spread


@pytest.mark.parametrize("n_classes", [1, 2, 5, 150])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 7.0])
def test_it_is_the_exact_softmax_as_closely_as_that_of_torch(n_classes: int, temperature: float) -> None:
    values = drawn(n_classes, 2001)
    log_exact = torch.log_softmax(values.double() / temperature, 0)
    exact = log_exact.exp()
    seen = exact > 1e-35

    def error(found: Tensor) -> float:
        return float(((found.double() - exact).abs() / exact)[seen].max())

    def log_error(found: Tensor) -> float:
        return float(((found.double() - log_exact).abs() / (1 + log_exact.abs())).max())

    rounding = 2.0**-23
    tempered = values / temperature
    assert error(softmax(values, temperature)) <= 2 * error(torch.softmax(tempered, 0)) + rounding
    assert log_error(log_softmax(values, temperature)) <= 2 * log_error(torch.log_softmax(tempered, 0)) + rounding


def test_every_voxel_may_have_its_own_temperature() -> None:
    values, temperature = drawn(4, 1300), torch.linspace(0.05, 30, 1300)
    for given in (softmax, log_softmax):
        together = given(values, temperature)
        alone = torch.cat([given(values[:, i : i + 1], temperature[i : i + 1]) for i in range(0, 1300, 61)], 1)
        assert torch.equal(together[:, ::61], alone)


@pytest.mark.parametrize("step", [1, 7, 512, 600])
def test_a_voxel_has_the_same_bits_wherever_it_stands(step: int) -> None:
    values = drawn(5, 1300)
    for given in (softmax, log_softmax):
        assert torch.equal(given(values), torch.cat([given(part) for part in values.split(step, 1)], 1))


def test_rows_cut_out_of_a_volume_are_read_as_they_lie_and_left_alone() -> None:
    volume = drawn(3, 5000)
    before = volume.clone()
    for cut in (volume[:, 1000:2000], volume[:, ::3], volume.T.contiguous().T[:, :900]):
        assert torch.equal(softmax(cut), softmax(cut.contiguous()))
    assert torch.equal(volume, before)


def test_equal_values_have_equal_probabilities_and_the_order_of_others_is_kept() -> None:
    values = torch.tensor([[2.0, 1.0], [2.0, 1.0 - 1e-6], [-3.0, 1.0 - 2e-6]])
    found = softmax(values)
    assert found[0, 0] == found[1, 0]
    assert bool((found[0] >= found[1]).all())
    assert bool((found[1] >= found[2]).all())


def test_a_smaller_value_never_has_the_larger_probability() -> None:
    values = torch.tensor([[0.0], [-0.031080088], [-0.03108009]])  # neighbours in float32
    for given in (softmax, log_softmax):
        found = given(values)[:, 0]
        assert found[0] > found[1] >= found[2]


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_what_all_classes_share_costs_no_digits(temperature: float) -> None:
    values = (drawn(4, 1300) * 64).round() / 64
    for given in (softmax, log_softmax):
        assert torch.equal(given(values + 4096, temperature), given(values, temperature))


@pytest.mark.parametrize("n_temperatures", [0, 3, 9, 11])
def test_another_number_of_temperatures_is_refused(n_temperatures: int) -> None:
    with pytest.raises(ParameterError, match="temperatures for 10 voxels"):
        softmax(drawn(3, 10), torch.ones(n_temperatures))


def test_where_a_gradient_is_wanted_torch_works_it_out() -> None:
    values, temperature = drawn(3, 10).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    softmax(values, temperature)[0].sum().backward()
    assert values.grad is not None
    assert temperature.grad is not None
    with torch.no_grad():
        assert torch.equal(softmax(values, temperature), softmax(values.detach(), 2.0))


@pytest.mark.parametrize(("apart", "smallest"), [(80.0, 1e-36), (87.0, 1e-39), (90.0, 0.0), (1e7, 0.0)])
def test_classes_far_behind_end_at_zero_and_never_below(apart: float, smallest: float) -> None:
    values = torch.tensor([[0.0], [-apart]])
    found = softmax(values)
    assert found[0, 0] == 1.0
    assert smallest <= float(found[1, 0]) <= np.exp(-apart) * (1 + 1e-5)
    assert float(log_softmax(values)[1, 0]) == pytest.approx(-apart, rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_where_torch_gives_nan_so_does_the_loop(where: int, bad: float) -> None:
    values = drawn(3, 40)
    values[where, 30] = bad
    for given in (softmax, log_softmax):
        assert torch.equal(given(values).isnan(), given(values.double()).isnan())
        assert bool(given(values)[:, 30].isnan().all())


def test_other_types_go_through_torch() -> None:
    values = drawn(3, 10).double()
    assert torch.equal(softmax(values, 2.0), torch.softmax(values / 2.0, 0))
    assert torch.equal(log_softmax(values), torch.log_softmax(values, 0))
