"""Voxels of one pipeline on one case: what several metrics need of them is computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import DataError
from segcal.metrics.base import SUM_TOLERANCE, MetricSettings
from segcal.metrics.compiled_sums import compiled_sums, takes
from segcal.metrics.fine_cells import SETTLED
from segcal.metrics.torch_sums import TorchSums
from segcal.metrics.voxel_sums import VoxelSums


@dataclass(frozen=True, slots=True, eq=False)
class FramePart:
    """Some voxels of a case, at most `segcal.chunks.MOST_VOXELS`; ignored ones are already left out of the tensors.

    Attributes:
        where: the part's place among the flattened voxels.
        keep: positions inside the part that are not ignored; None when all are counted.
        labels, reference, deployed: (voxel,) class index in the smallest type that holds it; in `deployed` also the
            value beyond all classes that IGNORED becomes in that type.
        label_counts: (C,) voxels of every label.
        reference_hit: (voxel,) bool, whether the reference is the label.
        outside: (voxel,) bool, outside the crop the network predicted in.
        band, band_distance: distance band of each voxel; sum of distances in each band, in units of `fixed_point`.
    """

    where: slice
    keep: Tensor | None
    labels: Tensor
    label_counts: NDArray[np.int64]
    reference: Tensor | None
    reference_hit: Tensor | None
    deployed: Tensor | None
    outside: Tensor | None
    band: Tensor | None
    band_distance: tuple[int, ...] | None


class VoxelBatch:
    """Counted voxels of one pipeline on one case.

    What the metrics of the registry count is in `sums`; a metric that needs something else takes it from the tensors,
    each of which is computed once, when asked for.

    Attributes:
        probs: (C, voxel) float32 or float64 probabilities.
        labels, label_counts, reference, deployed, outside, band, band_distance: as in `FramePart`.
        sums: exact sums over the voxels.
    """

    def __init__(
        self, case_id: str, settings: MetricSettings, part: FramePart, probs: Tensor, *, as_decided: bool
    ) -> None:
        self.settings = settings
        self._part, self._as_decided = part, as_decided
        self.probs = probs
        self.labels, self.reference, self.deployed = part.labels, part.reference, part.deployed
        self.label_counts, self.outside = part.label_counts, part.outside
        self.band, self.band_distance = part.band, part.band_distance
        # One loop on the CPU counts everything.
        counted = compiled_sums(self) if takes(self) else None
        if counted is None:
            _check_probabilities(case_id, self.probs, self.top)
        self.sums: VoxelSums = counted or TorchSums(self)

    @property
    def n_voxels(self) -> int:
        return int(self.probs.shape[1])

    @property
    def n_classes(self) -> int:
        return int(self.probs.shape[0])

    @property
    def n_bands(self) -> int:
        return 1 if self.band is None else len(self.settings.band_edges)

    @cached_property
    def top(self) -> Tensor:
        """(voxel,) the largest probability, in the type of `probs`."""
        return self.probs.amax(dim=0)

    @cached_property
    def confidence(self) -> Tensor:
        """(voxel,) float64, the largest probability."""
        return self.top.double()

    @cached_property
    def prediction(self) -> Tensor:
        """(voxel,) class of the largest probability, the first on ties, in the type of `labels`.

        It counts the classes passed before the first one that reaches the maximum: a few byte operations a class,
        several times faster than an argmax over the strided class axis.
        """
        if self._as_decided and self.reference is not None:
            return self.reference
        passed = torch.ones(self.n_voxels, dtype=torch.bool, device=self.probs.device)
        predicted = torch.zeros_like(self.labels)
        for channel in self.probs[:-1]:
            passed &= channel != self.top
            predicted += passed
        return predicted

    @cached_property
    def hit(self) -> Tensor:
        """(voxel,) bool, whether the prediction is the label."""
        if self._as_decided and self._part.reference_hit is not None:
            return self._part.reference_hit
        return self.prediction == self.labels

    @cached_property
    def misses(self) -> Tensor:
        """Positions of the voxels whose prediction is not the label; few, in a segmentation worth calibrating."""
        return (~self.hit).nonzero()[:, 0]

    @cached_property
    def doubtful(self) -> Tensor:
        """Positions of the voxels whose confidence is not above `fine_cells.SETTLED`."""
        return (self.top <= SETTLED).nonzero()[:, 0]

    @cached_property
    def label_probs(self) -> Tensor:
        """(voxel,) float64 probability of the true class: the confidence wherever that class was predicted."""
        missed = self.misses
        of_label = self.probs[self.labels[missed].long(), missed].double()
        return self.confidence.index_copy(0, missed, of_label)

    @cached_property
    def label_log_probs(self) -> Tensor:
        """(voxel,) float64 logarithm of the probability of the true class, -inf where that is 0."""
        return self.label_probs.log()


def _check_probabilities(case_id: str, probs: Tensor, top: Tensor) -> None:
    """Refuse NaN, logits and unnormalised values: every metric would otherwise give a plausible wrong number."""
    if not probs.shape[1]:
        return
    low, high = float(probs.amin()), float(top.max())
    # Written so that NaN, which compares as false, is refused too.
    if not (low >= 0.0 and high <= 1.0 + SUM_TOLERANCE):
        raise DataError(
            f"{case_id}: probabilities reach from {low:g} to {high:g}, expected 0 to 1; "
            "logits have to go through a calibrator (or softmax) first"
        )
    total = probs[0].clone()
    for channel in probs[1:]:  # in this order everywhere, so that all forms refuse the same voxels
        total += channel
    least, most = (float(bound) for bound in total.aminmax())
    furthest = max(1.0 - least, most - 1.0)
    if not furthest <= SUM_TOLERANCE:
        raise DataError(
            f"{case_id}: the class probabilities of a voxel sum to 1 only within {furthest:.3g}, expected "
            f"{SUM_TOLERANCE:g}; region (sigmoid) channels are evaluated one by one"
        )
