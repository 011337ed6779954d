"""From the grid a network predicts on back to the grid of the image: resample, undo the crop, undo the transpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.nnunet.model import ModelPlan
from segcal.types import Box


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """How one preprocessed case lies in its image.

    Attributes:
        plan: knows axis order, spacing, how to resample.
        properties: nnU-Net's record of what preprocessing did.
    """

    plan: ModelPlan
    properties: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """(z, y, x) of the image, in the order of nnU-Net's reader."""
        before = self.properties["shape_before_cropping"]
        return tuple(int(before[axis]) for axis in self._backward)

    @property
    def crop(self) -> Box:
        """Box of the image in which the network predicted, in image order (z, y, x)."""
        box = self.properties["bbox_used_for_cropping"]
        z, y, x = ((int(box[axis][0]), int(box[axis][1])) for axis in self._backward)
        return z, y, x

    def resampled(self, logits: Tensor) -> NDArray[Any]:
        """Logits on the voxels of the crop, still in the network's axis order, in the dtype of `logits`."""
        plans, configuration = self.plan.plans_manager, self.plan.configuration_manager
        spacing = [self.properties["spacing"][axis] for axis in plans.transpose_forward]
        shape = self.properties["shape_after_cropping_and_before_resampling"]
        current = list(configuration.spacing)
        if len(current) < len(shape):
            current = [spacing[0], *current]  # a 2-D configuration keeps the distance of the slices
        values = configuration.resampling_fn_probabilities(logits, shape, current, spacing)
        return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)

    def placed(self, values: NDArray[Any]) -> NDArray[Any]:
        """Put (channel, *crop) values into an array of the whole image, (channel, z, y, x); 0 outside the crop.

        0 is only a filling: a logit outside the crop has no meaning, and whoever reads the array needs `crop`.
        """
        whole = np.zeros((values.shape[0], *self.properties["shape_before_cropping"]), dtype=values.dtype)
        box = tuple(slice(int(low), int(high)) for low, high in self.properties["bbox_used_for_cropping"])
        whole[:, *box] = values
        return np.ascontiguousarray(whole.transpose(0, *(axis + 1 for axis in self._backward)))

    def member(self, logits: Tensor) -> NDArray[np.float16]:
        """One member's logits in image geometry, (class, z, y, x) float16.

        With nnU-Net's default resampling, which goes from half precision over doubles to half precision, these are to
        the bit the numbers nnU-Net itself computes for that fold.
        """
        return self.placed(self.resampled(logits).astype(np.float16, copy=False))

    def decision(self, pooled: Tensor) -> Tensor:
        """nnU-Net's own decision from its half precision mean over folds.

        Args:
            pooled: (class, *preprocessed shape) float16 mean of the folds' logits, summed in half precision.

        Returns:
            (z, y, x) int64 class index, or (region, z, y, x) bool for region models.
        """
        labels = self.plan.label_manager
        values = self.resampled(pooled)
        if labels.has_regions:
            chosen = np.asarray(labels.apply_inference_nonlin(values)) > 0.5
            return torch.from_numpy(self.placed(chosen)).to("cpu")
        index = np.asarray(labels.convert_logits_to_segmentation(values)).astype(np.int64)
        return torch.from_numpy(self.placed(index[None])[0]).to("cpu")

    @property
    def _backward(self) -> tuple[int, ...]:
        return tuple(self.plan.plans_manager.transpose_backward)
