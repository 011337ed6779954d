"""Local calibration errors: how far probabilities are off among rows with similar features (LCE and MLCE).

Both are sums over pairs of rows within a bin: time grows with the square of the rows, memory does not (`ROWS_AT_ONCE`).
They are not additive: results of two batches cannot be merged, the rows have to be together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from segcal.errors import DataError, ParameterError

N_BINS = 15
BANDWIDTH = 10.0
ROWS_AT_ONCE = 512
"""Anchors whose kernel is held at once: 512 × n numbers."""
RELEASED_MIN_ROWS = 20
"""The released code counts only bins with more rows than this."""


@dataclass(frozen=True, slots=True)
class LocalErrors:
    """Attributes: lce, the mean local error; mlce, the largest (see the function for what is averaged)."""

    lce: float
    mlce: float


def local_errors(
    probs: Tensor, labels: Tensor, features: Tensor, *, bandwidth: float = BANDWIDTH, n_bins: int = N_BINS
) -> LocalErrors:
    """LCE and MLCE as VQ eq. 67-68 write them.

    With rows binned by confidence into B_b and g_i = Σ_{j in B_b} (p_j - y_j) k(x_i, x_j) / Σ_{j in B_b} k(x_i, x_j):
    LCE = (1 / C) Σ_b (1 / n) Σ_{i in B_b} ‖g_i‖₁ and MLCE = max_i ‖g_i‖₁ (no 1 / C, so up to 2). The kernel is
    Gaussian, exp(-‖x_i - x_j‖² / (2 bandwidth²)), and a row is its own neighbour.

    Args:
        probs: (n, C).
        labels: (n,) int64.
        features: (n, q), the space of "similar"; the papers take 50 principal components of standardised features.
            The same space for every method compared.
        bandwidth: of the kernel, in units of the features.
        n_bins: equal-width bins of the confidence, right-open but for the last.
    """
    probs, residual, points = _checked(probs, labels, features, bandwidth, n_bins)
    index = _bins(probs.amax(1), n_bins)
    total, largest = 0.0, 0.0
    for found in torch.unique(index).tolist():
        rows = (index == found).nonzero().squeeze(1)
        for part in rows.split(ROWS_AT_ONCE):
            kernel = _kernel(points[part], points[rows], bandwidth)
            norms = (kernel @ residual[rows] / kernel.sum(1, keepdim=True)).abs().sum(1)
            total += float(norms.sum())
            largest = max(largest, float(norms.max()))
    n_rows, n_classes = probs.shape
    return LocalErrors(total / (n_rows * n_classes), largest)


def released_local_errors(
    probs: Tensor,
    labels: Tensor,
    features: Tensor,
    *,
    bandwidth: float = BANDWIDTH,
    n_bins: int = N_BINS,
    min_rows: int = RELEASED_MIN_ROWS,
) -> LocalErrors:
    """LCE and MLCE as the released code behind the papers' tables computes them (DEFINITIONS 3).

    One class at a time: bins of p_c, g_ic as above for that class alone, only bins with more than `min_rows` rows;
    LCE_c and MLCE_c are the mean and the largest |g_ic|. The results are means over classes weighted by their
    frequency, so MLCE is no maximum over all rows. A class without a bin large enough counts 0.
    """
    probs, residual, points = _checked(probs, labels, features, bandwidth, n_bins)
    n_rows, n_classes = probs.shape
    index = _bins(probs, n_bins)  # (n, C)
    sizes = torch.stack([torch.bincount(column, minlength=n_bins) for column in index.unbind(1)], 1)  # (n_bins, C)
    counted = sizes.gather(0, index) > min_rows
    sums, largest = probs.new_zeros(n_classes), probs.new_zeros(n_classes)
    for part, kernel in _kernels(points, bandwidth):
        for c in range(n_classes):
            member = one_hot(index[:, c], n_bins).to(kernel.dtype)
            both = kernel @ torch.cat([member * residual[:, c : c + 1], member], 1)
            own = index[part, c].unsqueeze(1)
            gap = (both[:, :n_bins].gather(1, own) / both[:, n_bins:].gather(1, own)).abs().squeeze(1)
            gap = gap * counted[part, c]
            sums[c] += gap.sum()
            largest[c] = torch.maximum(largest[c], gap.max())
    share = torch.bincount(labels, minlength=n_classes).to(probs.dtype) / n_rows
    means = sums / counted.sum(0).clamp(min=1)
    return LocalErrors(float((share * means).sum()), float((share * largest).sum()))


def _checked(
    probs: Tensor, labels: Tensor, features: Tensor, bandwidth: float, n_bins: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, p - y and features in float64."""
    if not 0 < bandwidth < float("inf") or n_bins < 1:
        raise ParameterError(f"local errors need a bandwidth > 0 and a bin, got {bandwidth} and {n_bins}")
    n_rows = probs.shape[0]
    if n_rows == 0 or labels.shape != (n_rows,) or features.ndim != 2 or features.shape[0] != n_rows:
        raise DataError(
            f"local errors need rows that belong together, got probabilities {tuple(probs.shape)}, labels "
            f"{tuple(labels.shape)} and features {tuple(features.shape)}"
        )
    exact = probs.to(torch.float64)
    return exact, exact - one_hot(labels, probs.shape[1]), features.to(torch.float64)


def _bins(values: Tensor, n_bins: int) -> Tensor:
    return (values * n_bins).to(torch.int64).clamp(0, n_bins - 1)


def _kernels(points: Tensor, bandwidth: float) -> Iterator[tuple[Tensor, Tensor]]:
    for part in torch.arange(points.shape[0], device=points.device).split(ROWS_AT_ONCE):
        yield part, _kernel(points[part], points, bandwidth)


def _kernel(anchors: Tensor, points: Tensor, bandwidth: float) -> Tensor:
    """(m, n) weights. Distances are summed coordinate by coordinate: a row is at distance exactly 0 of itself."""
    apart = torch.cdist(anchors, points, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(apart.square() / (-2 * bandwidth**2))
