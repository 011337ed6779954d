"""The distribution function of a confidence score from a histogram, smooth in its argument."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.classification.losses.chunks import map_over_chunks


def bin_counts(scores: Tensor, n_bins: int) -> Tensor:
    """(n_bins,) int64: how many scores lie in [k/B, (k+1)/B), the last closed (reweighted-risk paper, Eq. 14)."""
    index = (scores.detach() * n_bins).long().clamp_(0, n_bins - 1)
    return torch.bincount(index, minlength=n_bins)


def survival(x: Tensor, counts: Tensor, nu: float) -> Tensor:
    """1 - Ĝ(x) = (1/n) Σ_k h_k σ((c_k - x)/ν), c_k the centres of the bins (Eq. 13 and 15).

    Summed as it stands and not as 1 - Ĝ, which loses everything where Ĝ is near 1. The counts are constants to the
    gradient, as in the paper's Appendix C.4. O(n B) time, memory of a piece.

    Args:
        x: (m,) scores.
        counts: (B,) histogram of n scores on [0, 1].
        nu: width of the smoothing.
    """
    filled = counts.nonzero()[:, 0]
    centres = ((filled.double() + 0.5) / counts.numel()).to(x.dtype)
    shares = (counts[filled].double() / counts.sum()).to(x.dtype)

    def piece(part: Tensor) -> Tensor:
        return torch.sigmoid((centres - part[:, None]) / nu) @ shares

    return map_over_chunks(piece, x)
