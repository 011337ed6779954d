"""Calibration error by a Dirichlet kernel density, in log-space and float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BANDWIDTHS = (*(10 ** (-5 + 4 * k / 14) for k in range(15)), 0.2, 0.4, 0.6, 0.8, 1.0)
"""The grid of the authors' code: 15 values from 1e-5 to 1e-1, evenly in the logarithm, and five up to 1."""


def kernel_calibration_error(log_f: Tensor, targets: Tensor, bandwidth: float, p: float) -> Tensor:
    """(n, K) |π_jc - f_jc|^p with π_j = Σ_(i≠j) k(f_j; f_i) y_i / Σ_(i≠j) k(f_j; f_i), k = Dir(f_j | f_i/h + 1).

    Weights are a softmax of logarithms of kernels: no ratio can be 0/0, and nothing is clamped.

    Args:
        log_f: (n, K) logarithms of points of the simplex, n >= 2.
        targets: (n, K) y.
        bandwidth: h.
        p: the power, without a root.
    """
    pi = torch.softmax(_log_kernel(log_f, bandwidth), dim=0).T @ targets
    return (pi - log_f.exp()).abs().pow(p)


def most_likely_bandwidth(log_f: Tensor) -> float:
    """The bandwidth of `BANDWIDTHS` with the largest leave-one-out likelihood of the points themselves.

    The kernel is a density, so the mean over n - 1 kernels is one too. (The released code divides by h as well and
    can return -1 where no candidate has a positive log-likelihood.)
    """
    with torch.no_grad():
        likelihoods = [float(torch.logsumexp(_log_kernel(log_f, h), dim=0).mean()) for h in BANDWIDTHS]
    return BANDWIDTHS[max(range(len(BANDWIDTHS)), key=likelihoods.__getitem__)]


def _log_kernel(log_f: Tensor, bandwidth: float) -> Tensor:
    """(n, n) ln k(f_j; f_i), centres i down the rows; -inf on the diagonal leaves each point itself out."""
    scaled = log_f.exp() / bandwidth
    # lgamma(Σ α) would do as well; Σ f = 1 makes it a constant, and constants need no gradient.
    norm = math.lgamma(1 / bandwidth + log_f.shape[1]) - torch.lgamma(scaled + 1).sum(dim=1)
    kernel = scaled @ log_f.T + norm[:, None]
    return kernel.masked_fill(torch.eye(len(log_f), dtype=torch.bool, device=log_f.device), -torch.inf)
