"""AU_Pχτ: the area under the risk-coverage curve of the low-confidence region."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.scores import ScoreName, score_function
from segcal.classification.losses.smoothed_cdf import bin_counts, survival
from segcal.classification.losses.voxels import Voxels, mean
from segcal.errors import ParameterError


class LowConfidenceAURC(CalibrationLoss):
    """(1/n) Σ β_i CE_i, β_i = -ln(1 - Ĝ(min(g_i, τ))) (reweighted-risk paper, Eq. 15-17).

    g is the confidence score and Ĝ its smoothed bin distribution over the batch. τ is the score below which the
    fraction `coverage` of the batch lies; samples above it share one constant weight.

    The paper (Appendix C.4) also differentiates β_i through g_i, with the counts and τ as constants. That term rewards
    lowering the confidence of every sample with a loss, while the distribution it is ranked in follows: in our runs
    networks then stay near uniform predictions (docs/training_losses.md). So weights are constants here, as the ranks
    of AURC are; `weight_gradient=True` is the paper's form.

    Differences to the released code, where the paper is followed: it applies softmax twice, so that scores lie in
    [0.10, 0.23] for ten classes; its negative entropy is constant (see `scores`); it adds up counts over an epoch, ours
    are the batch's, so that the loss has no state. Ĝ is kept within [1/(n+1), n/(n+1)] for n voxels. As in the paper
    the constant factor 1/P(g < τ) is left out.

    Args:
        score: msp, margin or negative_entropy.
        coverage: fraction of the batch treated as low-confidence, in (0, 1]; 0.9 and 0.8 in the paper for CIFAR,
            0.2 and 0.4 for transformers. 1 is AURC with a binned distribution.
        nu: smoothing ν; 0.1 is the paper's for CIFAR-10, 0.01 for CIFAR-100.
        n_bins: bins on [0, 1]; 64 in the released code.
        threshold: a fixed τ instead of `coverage`.
        weight_gradient: differentiate the weights through the scores as well.
        ignore_index: voxels with this label do not count.
    """

    def __init__(
        self,
        score: ScoreName = "msp",
        *,
        coverage: float = 0.9,
        nu: float = 0.1,
        n_bins: int = 64,
        threshold: float | None = None,
        weight_gradient: bool = False,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.score = score_function(score)
        if not 0 < coverage <= 1:
            raise ParameterError(f"au_p: coverage is a fraction in (0, 1], got {coverage!r}")
        if not 0 < nu < math.inf:
            raise ParameterError(f"au_p: nu must be finite and > 0, got {nu!r}")
        if n_bins < 1:
            raise ParameterError(f"au_p: n_bins must be >= 1, got {n_bins!r}")
        self.coverage, self.nu, self.n_bins, self.threshold = coverage, nu, n_bins, threshold
        self.weight_gradient = weight_gradient

    def compute(self, voxels: Voxels) -> Tensor:
        with torch.set_grad_enabled(self.weight_gradient and torch.is_grad_enabled()):
            scores = self.score(voxels)
        n = scores.numel()
        tau = self._threshold(scores.detach())
        capped = torch.where(scores.detach() < tau, scores, tau)
        beyond = survival(capped, bin_counts(scores, self.n_bins), self.nu)
        weights = -beyond.clamp(1 / (n + 1), n / (n + 1)).log()
        return mean(weights * -voxels.log_prob_of_label())

    def _threshold(self, scores: Tensor) -> Tensor:
        if self.threshold is not None:
            return scores.new_tensor(self.threshold)
        below = math.floor(self.coverage * scores.numel())
        if below == scores.numel():
            return scores.new_tensor(math.inf)
        # kthvalue and not quantile, which refuses more than 16 million values.
        return scores.kthvalue(below + 1).values
