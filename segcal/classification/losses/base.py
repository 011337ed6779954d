"""The contract of a training loss: `loss(logits, labels)`, a scalar to minimise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from segcal.classification.losses.voxels import Voxels

Role = Literal["primary", "secondary"]


class CalibrationLoss(nn.Module, ABC):
    """A scalar from logits (n, C, *spatial) and labels (n, *spatial) or (n, 1, *spatial).

    Promises: every voxel counts the same whatever its place; ignored voxels change nothing; a batch with nothing but
    ignored voxels gives 0; half precision and autocast are left behind before the softmax, so value and gradient are
    those of float32; the gradient is finite for every finite logit; memory is linear in the voxels.

    Args:
        ignore_index: voxels with this label do not count.
    """

    role: ClassVar[Role] = "primary"
    """A primary loss can train a network alone; a secondary one only judges calibration and needs a primary."""

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        with full_precision(logits.device.type):
            voxels = Voxels.of(logits, labels, self.ignore_index)
            return self.compute(voxels) if voxels.count else voxels.zero()

    @abstractmethod
    def compute(self, voxels: Voxels) -> Tensor:
        """The loss of at least one voxel."""


def full_precision(device_type: str) -> AbstractContextManager[object]:
    """No autocast inside; entered only where it is on, since some devices have none to switch off."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
