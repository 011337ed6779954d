"""Each member calibrated on its own, then the mean of their probabilities: `--pooling members-probabilities`.

For calibrators of single models (out-of-fold predictions) that are applied to an ensemble. Every member keeps its own
decision when the method preserves it; their mean need not agree with the decision of the pooled members, so promises
about the segmentation do not hold for this map, and `segcal.applying.maps.member_maps` counts where it differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.errors import DataError
from segcal.fitted import FittedCalibrator
from segcal.io.members import Member
from segcal.pooling import Pool, pooled_decision


class CalibratedMembers:
    """Adds the calibrated probabilities of members one after the other and keeps nothing but the sum.

    Args:
        fitted: its pooling says how a single member becomes logits: as it is, or by way of probabilities.
        device: where to compute.
    """

    def __init__(self, fitted: FittedCalibrator, *, device: torch.device) -> None:
        self._fitted = fitted
        self._device = device
        self._sum: Tensor | None = None
        self._n_members = 0

    def add(self, member: Member) -> None:
        """Calibrate one member and add its probabilities; the same checks as in `Pool.add`."""
        info = self._fitted.info
        pool = Pool(info.pooling, regions=info.regions, device=self._device)
        pool.add(member)
        alone = pool.result()
        decision = pooled_decision(alone.logits, regions=info.regions)
        probs = self._fitted.cropped_probs(alone.logits, decision, alone.crop)
        self._sum = probs if self._sum is None else self._sum.add_(probs)
        self._n_members += 1

    def mean(self) -> Tensor:
        """(C, z, y, x) float32 mean probabilities. The sum is handed over, so this ends the collection."""
        if self._sum is None:
            raise DataError("there is no member to average: the case lists none, or the mean was already taken.")
        total, self._sum = self._sum, None
        return total.div_(self._n_members)
