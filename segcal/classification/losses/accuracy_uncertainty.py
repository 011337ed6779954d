"""Accuracy versus uncertainty: AvUC, AvUC with stopped gradients, and soft AvUC."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.voxels import Voxels
from segcal.errors import ParameterError

FLOOR = 1e-5
"""Smallest share of good samples in the denominator: a batch without any gives a large and finite loss."""


class AvUC(CalibrationLoss):
    """ln(1 + (n_AU + n_IC)/(n_AC + n_IU)) of soft counts (SOFT paper, Eq. 13-14).

    With t = tanh H: an accurate sample counts r(1 - t) towards AC if it is certain (H <= κ) and r t towards AU if not;
    an inaccurate one (1 - r)(1 - t) towards IC or (1 - r) t towards IU; r = max p, H the entropy in nats.

    The factors r reward a *more* confident wrong and certain voxel; the SOFT paper finds that this loss makes networks
    without Bayesian layers worse. Entropy is computed in log-space; no smoothing of p as in Google's code.

    Args:
        kappa: κ in nats. None: in each batch the midpoint between the mean entropies of right and of wrong samples, and
            half of ln C where one kind is missing. (The original takes that midpoint on validation data after each of
            the first epochs and then freezes it; the SOFT paper tunes κ and lists no values.)
        ignore_index: voxels with this label do not count.
    """

    role = "secondary"
    stop_gradient = False

    def __init__(self, kappa: float | None = None, *, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        if kappa is not None and not 0 <= kappa < math.inf:
            raise ParameterError(f"avuc: kappa is an entropy in nats, finite and >= 0; got {kappa!r}")
        self.kappa = kappa

    def compute(self, voxels: Voxels) -> Tensor:
        entropy, hits, confidence = voxels.entropy(), voxels.hits(), voxels.confidence()
        if self.stop_gradient:
            confidence = confidence.detach()
        kappa = entropy_midpoint(entropy.detach(), hits, voxels.n_classes) if self.kappa is None else self.kappa
        certain = entropy.detach() <= kappa
        unsure = torch.tanh(entropy)
        soft = torch.where(hits, confidence, 1 - confidence) * torch.where(certain, 1 - unsure, unsure)
        return _uncertainty_loss(soft, good=hits == certain)


class AvUCStopped(AvUC):
    """AvUC-GS: the same value; no gradient through r, so certainty is judged by the entropy alone (App. F)."""

    stop_gradient = True


class SoftAvUC(CalibrationLoss):
    """S-AvUC: no hard cells; t(h) = σ((1/T) ln[h(1 - κ) / ((1 - h)κ)]) of h = H/ln C (SOFT paper, Eq. 15-16).

    Accurate samples count t tanh H towards AU and (1 - t)(1 - tanh H) towards AC; inaccurate ones the same towards IU
    and IC. h is kept within [1e-6, 1 - 1e-6]; beyond, t is constant.

    Args:
        kappa: κ in (0, 1), the normalised entropy at which a voxel is half uncertain.
        temperature: T > 0, sharpness. The paper lists no tuned values; with our defaults κ = 0.5, T = 1 it is t(h) = h.
        ignore_index: voxels with this label do not count.
    """

    role = "secondary"

    def __init__(self, kappa: float = 0.5, temperature: float = 1.0, *, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        if not 0 < kappa < 1:
            raise ParameterError(f"s_avuc: kappa is a normalised entropy in (0, 1), got {kappa!r}")
        if not 0 < temperature < math.inf:
            raise ParameterError(f"s_avuc: temperature must be finite and > 0, got {temperature!r}")
        self.kappa, self.temperature = kappa, temperature

    def compute(self, voxels: Voxels) -> Tensor:
        entropy, hits = voxels.entropy(), voxels.hits()
        level = (entropy / math.log(voxels.n_classes)).clamp(1e-6, 1 - 1e-6)
        soft = torch.sigmoid((torch.logit(level) - math.log(self.kappa / (1 - self.kappa))) / self.temperature)
        unsure = torch.tanh(entropy)
        uncertain, certain = soft * unsure, (1 - soft) * (1 - unsure)
        return _ratio(torch.where(hits, uncertain, certain), torch.where(hits, certain, uncertain))


def entropy_midpoint(entropy: Tensor, hits: Tensor, n_classes: int) -> float:
    """κ of the original AvUC: halfway between the mean entropies of right and wrong samples, in nats."""
    n_right = int(hits.sum())
    if n_right in {0, hits.numel()}:
        return math.log(n_classes) / 2
    right = float(entropy[hits].mean(dtype=torch.float64))
    wrong = float(entropy[~hits].mean(dtype=torch.float64))
    return (right + wrong) / 2


def _uncertainty_loss(soft: Tensor, good: Tensor) -> Tensor:
    return _ratio(soft.masked_fill(good, 0), soft.masked_fill(~good, 0))


def _ratio(bad: Tensor, good: Tensor) -> Tensor:
    """ln(1 + Σ bad / Σ good)."""
    n_bad, n_good = bad.mean(dtype=torch.float64), good.mean(dtype=torch.float64)
    return torch.log1p(n_bad / n_good.clamp_min(FLOOR)).to(bad.dtype)
