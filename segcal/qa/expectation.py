"""What calibrated probabilities expect of a segmentation: its Dice score and the volumes, without a ground truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segcal.metrics.base import Score, Undefined
from segcal.types import Grid

NOT_SEGMENTED = Undefined("the class is segmented nowhere")
NOTHING_SEGMENTED = Undefined("no foreground class is segmented")


@dataclass(frozen=True, slots=True)
class ClassSums:
    """Sums of one class (or region) over all voxels of a case.

    Attributes:
        hard: number of voxels segmented as the class.
        expected: sum of its probability, the expected number of voxels.
        overlap: sum of its probability over the segmented voxels.
    """

    hard: int
    expected: float
    overlap: float

    @property
    def expected_dsc(self) -> Score:
        """2 sum p·1[seg=c] / (sum 1[seg=c] + sum p).

        The ratio of expectations; the expectation of the ratio differs from it by the order of one over the number
        of voxels when errors are independent, and by more when they go together. A class that is segmented nowhere
        has no value: its true Dice would be 0 if the class is there and undefined if not, which is not for a ratio
        of sums to say.
        """
        return NOT_SEGMENTED if self.hard == 0 else 2.0 * self.overlap / (self.hard + self.expected)

    @property
    def volume_gap(self) -> Score:
        """(expected - segmented) / segmented volume."""
        return NOT_SEGMENTED if self.hard == 0 else (self.expected - self.hard) / self.hard


def class_sums(probs: Tensor, masks: Tensor) -> tuple[ClassSums, ...]:
    """Sums of every channel, in float64.

    Args:
        probs: (K, z, y, x) probabilities of the foreground classes or of the regions.
        masks: (K, z, y, x) bool, where each is segmented.
    """
    return tuple(
        ClassSums(
            hard=int(mask.sum()),
            expected=float(p.sum(dtype=torch.float64)),
            overlap=float(p[mask].sum(dtype=torch.float64)),
        )
        for p, mask in zip(probs, masks, strict=True)
    )


def foreground_mean(scores: tuple[Score, ...], otherwise: Undefined = NOTHING_SEGMENTED) -> Score:
    """Mean over the classes that have a value, as the Dice score of a case is averaged."""
    values = [score for score in scores if not isinstance(score, Undefined)]
    return sum(values) / len(values) if values else otherwise


def voxel_ml(grid: Grid | None) -> float | None:
    """Volume of a voxel in millilitres; None without geometry."""
    if grid is None or grid.affine is None:
        return None
    return abs(float(np.linalg.det(grid.affine[:3, :3]))) / 1000.0
