"""Region-based (sigmoid) models: every channel is a binary problem of its own on its log-odds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from segcal.calibrators import Calibrator
from segcal.calibrators.base import Preserves
from segcal.preserve import keep_region_decision


@dataclass(frozen=True, slots=True)
class RegionCalibrator:
    """One binary calibrator per region.

    Attributes:
        channels: in the order of the manifest's regions; all of one method.
    """

    channels: tuple[Calibrator, ...]

    @property
    def preserves(self) -> Preserves:
        return self.channels[0].preserves

    def volume_probabilities(self, log_odds: Tensor, decision: Tensor) -> Tensor:
        """Calibrated probability of every region.

        Args:
            log_odds: (R, z, y, x), pooled.
            decision: (R, z, y, x) bool, the pooled decision p > 0.5; kept by preserving methods.
        """
        probs = torch.empty_like(log_odds)
        for own, pair in zip(probs, self.pairs(log_odds, decision), strict=True):
            own.copy_(pair[1])
        return probs

    def pairs(self, log_odds: Tensor, decision: Tensor) -> Iterator[Tensor]:
        """Region by region the (2, z, y, x) probabilities of lying outside and inside it; see `volume_probabilities`.

        Where the probability inside rounds to 1, only the one outside says how far from 1 it is.
        """
        for calibrator, own, decided in zip(self.channels, log_odds, decision, strict=True):
            pair = calibrator.volume_probs(binary_logits(own), decided.to(torch.int64))
            outside, inside = pair
            if self.preserves:
                keep_region_decision(inside, decided)
            # Near one half the difference is exact, and the larger of the two then says what `inside > 0.5` says.
            torch.where(inside > 0.75, outside, 1.0 - inside, out=outside)
            yield pair


def binary_logits(log_odds: Tensor) -> Tensor:
    """(...) log-odds to (2, ...) logits of "outside" and "inside" the region."""
    return torch.stack([torch.zeros_like(log_odds), log_odds])
