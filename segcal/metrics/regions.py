"""Region (sigmoid) models: every channel is a binary problem with its own frame and its own metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from segcal.errors import GeometryError
from segcal.metrics.base import MetricSettings
from segcal.metrics.frame import CaseFrame
from segcal.metrics.suite import CaseResult, MetricSet, mean_over_channels
from segcal.types import IGNORED


def binary_settings(settings: MetricSettings, region: str) -> MetricSettings:
    """The settings of one region's binary problem: outside the region or inside it."""
    # Of a yes/no problem the outside is never of interest, whatever counts as background elsewhere.
    return replace(settings, class_names=(f"not {region}", region), include_background=False)


@dataclass(frozen=True, slots=True, eq=False)
class RegionFrame:
    """One case of a region model as all pipelines see it: one binary frame a region."""

    case_id: str
    channels: tuple[CaseFrame, ...]

    @classmethod
    def build(
        cls,
        case_id: str,
        region_labels: Tensor,
        settings: MetricSettings,
        *,
        decision: Tensor | None = None,
        deployed: Tensor | None = None,
        inside: Tensor | None = None,
        ignored: Tensor | None = None,
        spatial: bool = True,
    ) -> RegionFrame:
        """Prepare a labelled case.

        Args:
            case_id: name of the case.
            region_labels: (R, z, y, x) bool.
            settings: `class_names` are the names of the R regions here.
            decision: (R, z, y, x) bool, the pooled decision p > 0.5.
            deployed: (R, z, y, x) bool, the regions of the segmentation in use.
            inside: (z, y, x) bool, where the network predicted.
            ignored: (z, y, x) bool, voxels that do not count.
            spatial: whether distances to the boundary are wanted.
        """
        names = settings.class_names
        if len(region_labels) != len(names):
            raise GeometryError(f"{case_id}: {len(region_labels)} region labels for the {len(names)} regions {names}")
        channels = []
        for k, region in enumerate(names):
            labels = region_labels[k].to(torch.int16)
            if ignored is not None:
                labels = labels.masked_fill(ignored, IGNORED)
            channels.append(
                CaseFrame.build(
                    case_id,
                    labels,
                    binary_settings(settings, region),
                    decision=None if decision is None else decision[k],
                    deployed=None if deployed is None else deployed[k],
                    inside=inside,
                    spatial=spatial,
                )
            )
        return cls(case_id, tuple(channels))

    def with_decision(self, decision: Tensor) -> RegionFrame:
        """The same case against another pooled decision, (R, z, y, x) bool."""
        pairs = zip(self.channels, decision, strict=True)
        return RegionFrame(self.case_id, tuple(channel.with_decision(one) for channel, one in pairs))


class RegionMetricSet:
    """The metrics of one pipeline of a region model; every number is the mean over regions."""

    def __init__(self, settings: MetricSettings, make: Callable[[MetricSettings], MetricSet]) -> None:
        self.names = settings.class_names
        self.channels = [make(binary_settings(settings, region)) for region in self.names]

    def update(self, frame: RegionFrame, probs: Tensor) -> None:
        """Measure one case; p = 0.5 counts as outside, as in nnU-Net.

        Args:
            frame: the case.
            probs: (R, 2, z, y, x) probabilities of being outside and inside each region; or (R, z, y, x) those of being
                inside alone, and a voxel outside whose p rounds to 1 then costs as much as any can.
        """
        for metrics, channel, own in zip(self.channels, frame.channels, probs, strict=True):
            alone = own.shape == channel.shape
            metrics.update(channel, torch.stack([1.0 - own, own]) if alone else own)

    def merge(self, other: Self) -> None:
        """Take over what another worker measured of this pipeline."""
        for mine, theirs in zip(self.channels, other.channels, strict=True):
            mine.merge(theirs)

    def take(self, case_id: str) -> CaseResult:
        """Results of a finished case; its state is dropped."""
        return mean_over_channels(self.names, [channel.take(case_id) for channel in self.channels])
