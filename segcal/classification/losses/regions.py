"""Losses for region-based (sigmoid) models: each channel is a binary problem of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segcal.errors import DataError


class BinaryRegions(nn.Module):
    """The mean, over regions, of a loss on the two classes "outside" and "inside".

    sigmoid(z) is the softmax of (0, z), so any loss for classes applies. Targets are nnU-Net's for regions: one channel
    of 0 and 1 per region and, with an ignore label, one more that is 1 where the voxel does not count.

    Args:
        loss: any loss of this package.
        has_ignore_channel: the last target channel marks voxels to ignore.
        ignore_index: what the loss itself takes as the label of voxels to ignore.
    """

    def __init__(self, loss: nn.Module, *, has_ignore_channel: bool = False, ignore_index: int = -100) -> None:
        super().__init__()
        self.loss, self.has_ignore_channel, self.ignore_index = loss, has_ignore_channel, ignore_index

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        n_regions = logits.shape[1]
        if target.shape != (len(logits), n_regions + self.has_ignore_channel, *logits.shape[2:]):
            raise DataError(
                f"target {tuple(target.shape)} does not belong to logits {tuple(logits.shape)}: expected one channel "
                f"per region{' and one to ignore' if self.has_ignore_channel else ''}"
            )
        ignored = target[:, -1] > 0 if self.has_ignore_channel else None
        losses = [self._one(logits[:, region], target[:, region], ignored) for region in range(n_regions)]
        return torch.stack(losses).mean()

    def _one(self, logits: Tensor, inside: Tensor, ignored: Tensor | None) -> Tensor:
        labels = (inside > 0).long()
        if ignored is not None:
            labels = labels.masked_fill(ignored, self.ignore_index)
        value: Tensor = self.loss(torch.stack([torch.zeros_like(logits), logits], dim=1), labels)
        return value
