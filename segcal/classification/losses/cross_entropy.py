"""Plain cross-entropy, with the contract of the others: the yardstick, and the primary part of composites."""

from __future__ import annotations

from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.voxels import Voxels, mean


class CrossEntropy(CalibrationLoss):
    """-ln p_y, mean over voxels."""

    def compute(self, voxels: Voxels) -> Tensor:
        return mean(-voxels.log_prob_of_label())
