"""Focal loss and its sample-dependent form FL-53."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.voxels import Voxels, mean
from segcal.errors import ParameterError


class Focal(CalibrationLoss):
    """-(1 - p_y)^γ ln p_y, mean over voxels (reweighted-risk paper, Def. 3.1). γ = 0 is cross-entropy.

    Args:
        gamma: focusing parameter, >= 0; the default 3 is ours (what FL-53 uses for all but the hardest samples).
        ignore_index: voxels with this label do not count.
    """

    def __init__(self, gamma: float = 3.0, *, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        self.gamma = checked_gamma(gamma)

    def compute(self, voxels: Voxels) -> Tensor:
        log_p = voxels.log_prob_of_label()
        return mean(power(one_minus(log_p), self.gamma) * -log_p)


class FocalFiveThree(CalibrationLoss):
    """Focal loss with γ = 5 where p_y < 0.2 and γ = 3 elsewhere. It jumps up at p_y = 0.2, from 0.53 to 0.82."""

    threshold = 0.2
    gamma_below = 5.0
    gamma_above = 3.0

    def compute(self, voxels: Voxels) -> Tensor:
        log_p = voxels.log_prob_of_label()
        rest = one_minus(log_p)
        hard = log_p.detach() < math.log(self.threshold)
        weight = torch.where(hard, power(rest, self.gamma_below), power(rest, self.gamma_above))
        return mean(weight * -log_p)


def one_minus(log_p: Tensor) -> Tensor:
    """1 - p from ln p, without the cancellation of the subtraction near p = 1."""
    return -torch.expm1(log_p)


def power(base: Tensor, exponent: float) -> Tensor:
    """base^exponent for base >= 0 with a finite gradient: below the smallest normal number it is flat.

    The slope of x^γ at 0 is infinite for γ < 1. In the losses a factor ln p that is 0 there stands beside it, and
    0 x inf would be NaN.
    """
    return base.clamp_min(torch.finfo(base.dtype).tiny).pow(exponent)


def checked_gamma(gamma: float) -> float:
    if not 0 <= gamma < math.inf:
        raise ParameterError(f"gamma must be finite and >= 0, got {gamma!r}")
    return float(gamma)
