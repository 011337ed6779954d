"""The quadratic form of a Laplacian kernel in one dimension, exact in O(n log n)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SMALLEST_BANDWIDTH = 0.01


def laplacian_form(weights: Tensor, points: Tensor, bandwidth: float) -> Tensor:
    """Σ_ij w_i w_j exp(-|r_i - r_j| / b) over all pairs, the diagonal included; differentiable in w and r.

    On sorted points exp(-(r_j - r_i)/b) is a product of one factor for each end, so the sum over all pairs is a running
    sum. Points lie in [0, 1], where those factors stay within exp(±1/b): no overflow in float64 for b >= 0.01. The
    slope of |r_i - r_j| between equal points is taken as 0, so duplicated samples have equal gradients.

    Args:
        weights: (n,) w.
        points: (n,) r within [0, 1].
        bandwidth: b >= `SMALLEST_BANDWIDTH`.
    """
    value: Tensor = _LaplacianForm.apply(weights, points, bandwidth)  # type: ignore[no-untyped-call]
    return value


class _LaplacianForm(torch.autograd.Function):
    """Written out because differentiating running sums would keep a dozen float64 vectors and favour one of equals."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, points: Tensor, bandwidth: float) -> Tensor:
        ordered, order = points.detach().sort()
        wide = weights.detach()[order].double()
        distinct, group, counts = torch.unique_consecutive(ordered.double(), return_inverse=True, return_counts=True)
        ends = wide.cumsum(0)[counts.cumsum(0) - 1]
        mass = torch.diff(ends, prepend=ends.new_zeros(1))
        rising, falling = (distinct / bandwidth).exp(), (-distinct / bandwidth).exp()
        below = _before(mass * rising) * falling
        above = _before((mass * falling).flip(0)).flip(0) * rising
        pull = below + mass + above
        slope_weights = 2 * pull[group]
        slope_points = 2 * wide * (above - below)[group] / bandwidth
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ctx.save_for_backward(slope_weights[back].to(weights.dtype), slope_points[back].to(points.dtype))
        value: Tensor = (mass * pull).sum().to(weights.dtype)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        slope_weights, slope_points = ctx.saved_tensors
        return gradient * slope_weights, gradient * slope_points, None


def _before(values: Tensor) -> Tensor:
    """Sum of all elements before each one."""
    return torch.cat([values.new_zeros(1), values[:-1].cumsum(0)])
