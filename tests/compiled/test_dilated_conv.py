"""The compiled convolutions are torch's, and a slice is convolved alike whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows

from segcal.calibrators import local_temperature
from segcal.calibrators.local_temperature import N_MAPS, tree_temperature
from segcal.compiled import dilated_conv as loop


def convolved(slices: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    n, _, height, width = slices.shape
    out = torch.empty(n, len(bias), height - 8, width - 8)
    loop.dilated_conv(slices.numpy(), weight.numpy(), bias.numpy(), out.numpy())
    return out


@pytest.mark.parametrize("shape", [(1, 2, 9, 9), (3, 5, 30, 17), (2, 1, 10, 60)])
def test_the_loop_convolves_as_torch_does(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    slices = torch.randn(shape, generator=generator) * 5
    weight, bias = torch.randn(N_MAPS, shape[1], 5, 5, generator=generator), torch.randn(N_MAPS, generator=generator)
    exact = F.conv2d(slices.double(), weight.double(), bias.double(), dilation=loop.DILATION)
    torch.testing.assert_close(convolved(slices, weight, bias).double(), exact, rtol=1e-5, atol=1e-4)


def test_a_slice_is_convolved_alike_whatever_stands_beside_it() -> None:
    generator = torch.Generator().manual_seed(1)
    slices, weight = torch.randn(4, 3, 21, 33, generator=generator), torch.randn(N_MAPS, 3, 5, 5, generator=generator)
    bias = torch.zeros(N_MAPS)
    together = convolved(slices, weight, bias)
    assert torch.equal(together, torch.cat([convolved(one[None], weight, bias) for one in slices]))


def test_the_loop_is_made_for_the_taps_of_the_method() -> None:
    assert (loop.KERNEL, loop.DILATION) == (local_temperature.KERNEL, local_temperature.DILATION)


def test_where_a_gradient_is_wanted_torch_convolves() -> None:
    slices = torch.randn(1, 2, 12, 12, generator=torch.Generator().manual_seed(2))
    weight = torch.zeros(N_MAPS, 2, 5, 5, requires_grad=True)
    bias = torch.zeros(N_MAPS, requires_grad=True)
    tree_temperature(slices, weight, bias).sum().backward()
    assert bias.grad is not None
    assert bool(bias.grad.abs().sum() > 0)
