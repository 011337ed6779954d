"""Region-based (sigmoid) models: every channel is a binary problem of its own on its log-odds."""

from __future__ import annotations

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
        for index, calibrator in enumerate(self.channels):
            two = binary_logits(log_odds[index])
            probs[index] = calibrator.volume_probs(two, decision[index].to(torch.int64))[1]
        return keep_region_decision(probs, decision) if self.preserves else probs


def binary_logits(log_odds: Tensor) -> Tensor:
    """(...) log-odds to (2, ...) logits of "outside" and "inside" the region."""
    return torch.stack([torch.zeros_like(log_odds), log_odds])
