"""Dual focal loss, as it is written down and as it was released."""

from __future__ import annotations

from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.focal import checked_gamma, one_minus, power
from segcal.classification.losses.voxels import Voxels, mean


class DualFocal(CalibrationLoss):
    """-(1 - p_y + p_j)^γ ln p_y with p_j the largest probability of another class (reweighted-risk paper, Eq. 24).

    Mean over voxels; the authors' release sums and has γ = 0 by default.

    Args:
        gamma: >= 0; the default 5 is the paper's for ResNet-50 on CIFAR-10 and CIFAR-100 (others: 1 to 6.1).
        ignore_index: voxels with this label do not count.
    """

    def __init__(self, gamma: float = 5.0, *, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        self.gamma = checked_gamma(gamma)

    def compute(self, voxels: Voxels) -> Tensor:
        log_p = voxels.log_prob_of_label()
        return mean(power(one_minus(log_p) + self.competitor(voxels).exp(), self.gamma) * -log_p)

    def competitor(self, voxels: Voxels) -> Tensor:
        """(m,) ln p_j."""
        return voxels.log_competitor()


class DualFocalReleased(DualFocal):
    """The released code's form: p_j is the largest probability *strictly below* p_y, 0 where there is none.

    The same as `DualFocal` where the prediction is right. Where it is wrong the strongest competitor is left out, so
    hard samples weigh less, against the idea of the loss, and the loss jumps where p_y = p_j. It is here because
    published results, good ones among them, were obtained with it.
    """

    def competitor(self, voxels: Voxels) -> Tensor:
        return voxels.log_below_label()
