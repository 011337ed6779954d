"""Inverse focal loss: confident samples weigh more."""

from __future__ import annotations

from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.focal import checked_gamma
from segcal.classification.losses.voxels import Voxels, mean
from segcal.errors import ParameterError

GAMMA_LIMIT = 3.5911214766686221
"""The largest γ for which the loss never rises with p_y: the minimum over p of (1 + p) / (-p ln p).

d/dp [-(1+p)^γ ln p] = -(1+p)^(γ-1) [(1+p)/p + γ ln p] is positive where γ > (1+p)/(-p ln p). That quotient is
stationary where ln p + 1 + p = 0, so p = W(1/e) = 0.2785, and its value there is 1/p. The paper says "greater than 4"
(App. C.2) and "γ > 3.5" (Section 5).
"""


class InverseFocal(CalibrationLoss):
    """-(1 + p_y)^γ ln p_y, mean over voxels (reweighted-risk paper, Def. 3.2).

    Above γ = 3.591 the loss *rises* with p_y in a range around p_y = 0.28: gradient descent then pushes such voxels
    away from their label, and they stay wrong.

    Args:
        gamma: >= 0; the default 1 is what the paper selected in five of its ten settings (the others: 1.5 to 3).
        forced: take a γ above the limit all the same.
        ignore_index: voxels with this label do not count.

    Raises:
        ParameterError: γ above the limit and not forced.
    """

    def __init__(self, gamma: float = 1.0, *, forced: bool = False, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        self.gamma = checked_gamma(gamma)
        if self.gamma > GAMMA_LIMIT and not forced:
            raise ParameterError(
                f"inverse_focal: with gamma {gamma:g} the loss rises with the probability of the true class for some "
                f"voxels (around p = 0.28), so training would push them away from their label. Expected gamma <= "
                f"{GAMMA_LIMIT:.3f}; to use it all the same, say forced=True."
            )

    def compute(self, voxels: Voxels) -> Tensor:
        log_p = voxels.log_prob_of_label()
        return mean((1 + log_p.exp()).pow(self.gamma) * -log_p)
