"""Soft-binned expected calibration error."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.chunks import sum_over_chunks
from segcal.classification.losses.voxels import Voxels
from segcal.errors import ParameterError


class SoftBinnedECE(CalibrationLoss):
    """SB-ECE_bin,p = (Σ_j (S_j/n) |A_j - C_j|^p)^(1/p) with soft bins (SOFT paper, Eq. 8-11).

    A voxel of confidence c belongs to bin j, with centre ξ_j = (j - 1/2)/M, by softmax_j(-(c - ξ_j)²/T); S, A and C are
    the bins' mass, accuracy and mean confidence. T → 0 gives the ECE with M equal-width bins.

    Args:
        n_bins: M; 15 in the paper.
        temperature: T. The paper tunes it and lists no values. Ours, 0.001, leaves exp(-1/(M² T)) = 1 % in the next bin
            for a confidence at the centre of its own.
        p: order, >= 1; the default 2 is the norm in which the paper reports ECE.
        ignore_index: voxels with this label do not count.
    """

    role = "secondary"

    def __init__(
        self, *, n_bins: int = 15, temperature: float = 0.001, p: float = 2.0, ignore_index: int = -100
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        if n_bins < 1:
            raise ParameterError(f"sb_ece: n_bins must be >= 1, got {n_bins!r}")
        if not 0 < temperature < math.inf:
            raise ParameterError(f"sb_ece: temperature must be finite and > 0, got {temperature!r}")
        if not 1 <= p < math.inf:
            raise ParameterError(f"sb_ece: p must be finite and >= 1, got {p!r}")
        self.n_bins, self.temperature, self.p = n_bins, temperature, p

    def compute(self, voxels: Voxels) -> Tensor:
        confidence = voxels.confidence()
        right = voxels.hits().to(confidence.dtype)
        moment = self.moment(confidence, right)
        # The slope of the root at 0 is infinite; a perfect batch has nothing to learn, so there it is flat.
        return moment.clamp_min(torch.finfo(confidence.dtype).tiny).pow(1 / self.p).to(confidence.dtype)

    def moment(self, confidence: Tensor, right: Tensor) -> Tensor:
        """p-th power of the error, float64."""
        size, excess = sum_over_chunks(self._sums, confidence, right)
        gap = excess / _filled(size)
        moment: Tensor = (size / confidence.numel() * gap.abs().pow(self.p)).sum()
        return moment

    def membership(self, confidence: Tensor) -> Tensor:
        """(M, n) share of each bin in each voxel; columns add up to 1 (a softmax over short rows is far slower)."""
        place = torch.arange(self.n_bins, device=confidence.device, dtype=confidence.dtype)
        distance = confidence - ((place + 0.5) / self.n_bins)[:, None]
        return torch.softmax(-distance.square() / self.temperature, dim=0)

    def _sums(self, confidence: Tensor, right: Tensor) -> Tensor:
        """(2, M) float64 mass of the bins and hits minus confidence in them; pieces are short enough for float32."""
        columns = torch.stack([torch.ones_like(right), right - confidence])
        return (columns @ self.membership(confidence).T).double()

    def _hits(self, confidence: Tensor, right: Tensor) -> Tensor:
        """(2, M) float64 mass of the bins and hits in them."""
        return (torch.stack([torch.ones_like(right), right]) @ self.membership(confidence).T).double()


class SoftLabelBinnedECE(SoftBinnedECE):
    """SB-ECE_lb,p = ((1/n) Σ_i Σ_j u_j(c_i) |A_j - c_i|^p)^(1/p) (Eq. 12): what the SOFT paper trains with.

    Each voxel is compared with the accuracy of its bins itself, so the spread of confidence within a bin counts too.

    Args:
        n_bins: M.
        temperature: T.
        p: order, >= 1.
        ignore_index: voxels with this label do not count.
    """

    def moment(self, confidence: Tensor, right: Tensor) -> Tensor:
        size, hits = sum_over_chunks(self._hits, confidence, right)
        accuracy = (hits / _filled(size)).to(confidence.dtype)

        def piece(part: Tensor) -> Tensor:
            gaps: Tensor = (accuracy[:, None] - part).abs().pow(self.p)
            return (self.membership(part) * gaps).sum(dtype=torch.float64)

        return sum_over_chunks(piece, confidence) / confidence.numel()


def _filled(size: Tensor) -> Tensor:
    """A bin so far from every confidence that its mass underflows has no hits either: 0 / tiny instead of 0 / 0."""
    return size.clamp_min(torch.finfo(size.dtype).tiny)
