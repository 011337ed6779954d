"""Maximum mean calibration error, plain and weighted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.laplacian import SMALLEST_BANDWIDTH, laplacian_form
from segcal.classification.losses.voxels import Voxels
from segcal.errors import ParameterError

TINY = 1e-10
"""Under the square root, as in the authors' code: its slope at 0 would be infinite."""


class MMCE(CalibrationLoss):
    """MMCE_m: (1/n²) Σ_ij (a_i - r_i)(a_j - r_j) exp(-|r_i - r_j|/0.4), r = max p, a = 1 where the prediction is right.

    All pairs, the diagonal included, exactly and in O(n log n): for this kernel the double sum is a running sum over
    sorted confidences. The authors' code returns the sum without a square root, netcal's metric the root.

    Args:
        bandwidth: of the Laplacian kernel; 0.4 in the authors' code (written 2 x 0.2).
        square_root: return the root of the sum.
        ignore_index: voxels with this label do not count.
    """

    role = "secondary"

    def __init__(self, *, bandwidth: float = 0.4, square_root: bool = False, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        if not SMALLEST_BANDWIDTH <= bandwidth < math.inf:
            raise ParameterError(f"mmce: bandwidth must be finite and >= {SMALLEST_BANDWIDTH}, got {bandwidth!r}")
        self.bandwidth, self.square_root = bandwidth, square_root

    def compute(self, voxels: Voxels) -> Tensor:
        confidence, hits = voxels.confidence(), voxels.hits()
        right = hits.to(confidence.dtype)
        weights = self.weights(right)
        if weights is None:
            return voxels.zero()
        form = laplacian_form((right - confidence) * weights, confidence, self.bandwidth)
        return (form.clamp_min(0) + TINY).sqrt() if self.square_root else form

    def weights(self, right: Tensor) -> Tensor | None:
        """Factor of each residual, (n,) or one for all; None where the loss is defined as 0."""
        return right.new_tensor(1 / right.numel())


class WeightedMMCE(MMCE):
    """MMCE_w, what the authors train with: correct and wrong samples each weigh as much as the other kind.

    sqrt(Σ_ij e_i e_j k(r_i, r_j) + 1e-10) with e_i = (1 - r_i)/m for the m correct and -r_i/m' for the m' wrong
    samples; 0 for a batch without correct or without wrong ones. In the released code each of the three double sums
    is a mean over pairs that is divided by the number of pairs once more, so its value shrinks with the batch.

    Args:
        bandwidth: of the Laplacian kernel.
        square_root: return the root of the sum, as the authors do.
        ignore_index: voxels with this label do not count.
    """

    def __init__(self, *, bandwidth: float = 0.4, square_root: bool = True, ignore_index: int = -100) -> None:
        super().__init__(bandwidth=bandwidth, square_root=square_root, ignore_index=ignore_index)

    def weights(self, right: Tensor) -> Tensor | None:
        n_correct = int(right.count_nonzero())
        n_wrong = right.numel() - n_correct
        if not n_correct or not n_wrong:
            return None
        return torch.where(right > 0, right.new_tensor(1 / n_correct), right.new_tensor(1 / n_wrong))
