"""Area under the risk-coverage curve as a training loss."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.scores import ScoreName, score_function
from segcal.classification.losses.voxels import Voxels, mean
from segcal.errors import ParameterError

Estimator = Literal["harmonic", "log"]


class AURC(CalibrationLoss):
    """(1/n) Σ_r α_r CE_(r), samples ranked by confidence, r = 1 the least confident (reweighted-risk paper, Def. 3.3).

    `harmonic`: α_r = H_n - H_(n-r), which makes the loss the plain average, over all coverages, of the mean
    cross-entropy of the samples kept. `log`: α_r = -ln(1 - r/(n+1)). Ranks are constants to the gradient. Equally
    confident samples share the mean of their weights: saturated voxels are many, and their order means nothing.
    O(n log n) for the sort.

    Args:
        score: what ranks the samples: msp, margin or negative_entropy.
        estimator: harmonic or log.
        ignore_index: voxels with this label do not count.
    """

    def __init__(
        self, score: ScoreName = "msp", *, estimator: Estimator = "harmonic", ignore_index: int = -100
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.score = score_function(score)
        if estimator not in {"harmonic", "log"}:
            raise ParameterError(f"aurc: estimator {estimator!r}; expected harmonic or log")
        self.estimator = estimator

    def compute(self, voxels: Voxels) -> Tensor:
        log_p = voxels.log_prob_of_label()
        with torch.no_grad():
            weights = rank_weights(self.score(voxels), self.estimator).to(log_p.dtype)
        return mean(weights * -log_p)


def rank_weights(scores: Tensor, estimator: Estimator = "harmonic") -> Tensor:
    """(n,) float64 weight α of each sample; equal scores share the mean of their ranks' weights."""
    n = scores.numel()
    ordered, order = scores.sort()
    rank = torch.arange(1, n + 1, device=scores.device, dtype=torch.float64)
    if estimator == "harmonic":
        alpha = torch.digamma(rank[-1] + 1) - torch.digamma(n - rank + 1)
    else:
        alpha = -torch.log1p(-rank / (n + 1))
    group, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)[1:]
    ends = alpha.cumsum(0)[counts.cumsum(0) - 1]
    shared = torch.diff(ends, prepend=ends.new_zeros(1)) / counts
    # A group of one keeps its own weight, untouched by the rounding of the running sum.
    weights = torch.where(counts[group] == 1, alpha, shared[group])
    return torch.empty_like(weights).scatter_(0, order, weights)
