"""QA of one case: from its maps to a handful of numbers and, if it is flagged, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.cases import CaseData
from segcal.metrics.base import Score, Undefined
from segcal.qa.boundary import boundary_zone, mean_in_zone
from segcal.qa.expectation import ClassSums, class_sums, foreground_mean, voxel_ml
from segcal.qa.members import NEVER_PREDICTED, MemberTally, VolumeSpread
from segcal.qa.outlyingness import outlyingness
from segcal.qa.settings import QaSettings
from segcal.types import Grid

NO_MEMBERS = Undefined("the members are not at hand: give a manifest instead of an applied folder")


@dataclass(frozen=True, slots=True, eq=False)
class QaMaps:
    """What QA looks at in one case; made by a source, forgotten after `measure`.

    Attributes:
        case_id: name of the case.
        probs: (C, z, y, x) calibrated probabilities of all classes, or of the K regions.
        masks: (K, z, y, x) bool, where each is segmented.
        segmentation: (z, y, x) one label per voxel: 0, or 1 + the index among the K (regions: the last painted).
        confidence: (z, y, x) probability of the segmented class; regions: of the least sure region's decision.
        inside: (z, y, x) bool, where the network predicted; None for everywhere.
        grid: where the case lies.
        tally: of the members, None when they are not at hand.
        statistics: of the pooled logits, None likewise.
        image: file to show beside the segmentation.
        regions: whether the channels are regions.
        case: what the maps were made from; only when a source is asked to keep it.
    """

    case_id: str
    probs: Tensor = field(repr=False)
    masks: Tensor = field(repr=False)
    segmentation: NDArray[np.int16] = field(repr=False)
    confidence: Tensor = field(repr=False)
    inside: Tensor | None = field(default=None, repr=False)
    grid: Grid | None = None
    tally: MemberTally | None = None
    statistics: Mapping[str, float] | None = None
    image: Path | None = None
    regions: bool = False
    case: CaseData | None = field(default=None, repr=False)

    @property
    def foreground(self) -> Tensor:
        """(K, z, y, x) probabilities of the foreground classes, or of the regions."""
        return self.probs if self.regions else self.probs[1:]

    @classmethod
    def of_classes(cls, case_id: str, probs: Tensor, segmentation: Tensor, **rest: object) -> Self:
        """From (C, z, y, x) class probabilities and a (z, y, x) int64 segmentation by class index."""
        masks = torch.stack([segmentation == c for c in range(1, probs.shape[0])])
        confidence = probs.gather(0, segmentation[None])[0]
        labels = segmentation.to(torch.int16).cpu().numpy()
        return cls(case_id, probs, masks, labels, confidence, **rest)  # type: ignore[arg-type]

    @classmethod
    def of_regions(cls, case_id: str, probs: Tensor, decision: Tensor, **rest: object) -> Self:
        """From (R, z, y, x) region probabilities and decisions; regions may overlap, so each keeps its own mask."""
        painted = torch.zeros(decision.shape[1:], dtype=torch.int16, device=decision.device)
        for index, region in enumerate(decision):
            painted[region] = index + 1
        confidence = torch.where(decision, probs, 1 - probs).amin(0)
        rest["regions"] = True
        return cls(case_id, probs, decision, painted.cpu().numpy(), confidence, **rest)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ClassQa:
    """One foreground class or region of a case; volumes in voxels.

    Attributes:
        name: as the calibrator names it.
        sums: segmented and expected volume and their overlap.
        member_dice: agreement of the members on it.
        spread: expected volumes by the members on their own; None without members.
    """

    name: str
    sums: ClassSums
    member_dice: Score
    spread: VolumeSpread | None


@dataclass(frozen=True, slots=True)
class QaCase:
    """The numbers of one case.

    Attributes:
        case_id: name of the case.
        classes: the foreground classes or the regions.
        expected_dsc: mean over the classes that are segmented.
        boundary_confidence: mean confidence near the boundary of the segmentation.
        member_dice: mean over the classes that a member segments.
        disagreement: of the members near the boundary of the segmentation.
        outlyingness: robust z-score of each statistic of the logits against the calibration cases.
        voxel_ml: volume of a voxel in millilitres; None without geometry.
    """

    case_id: str
    classes: tuple[ClassQa, ...]
    expected_dsc: Score
    boundary_confidence: Score
    member_dice: Score
    disagreement: Score
    outlyingness: Mapping[str, Score]
    voxel_ml: float | None


def measure(
    maps: QaMaps, names: Sequence[str], settings: QaSettings, reference: Mapping[str, Sequence[float]]
) -> QaCase:
    """The numbers of one case; a pure function of its maps and the settings.

    Args:
        names: of the foreground classes or regions.
        reference: the calibrator's statistics of its calibration cases.
    """
    sums = class_sums(maps.foreground, maps.masks)
    zone = boundary_zone(maps.segmentation, settings.boundary_voxels, maps.inside)
    tally = maps.tally
    dice: tuple[Score, ...] = (NO_MEMBERS,) * len(sums) if tally is None else tally.dice()
    spreads: tuple[VolumeSpread | None, ...] = (None,) * len(sums) if tally is None else tally.volume_spreads()
    return QaCase(
        case_id=maps.case_id,
        classes=tuple(map(ClassQa, names, sums, dice, spreads)),
        expected_dsc=foreground_mean(tuple(each.expected_dsc for each in sums)),
        boundary_confidence=mean_in_zone(maps.confidence, zone),
        member_dice=foreground_mean(dice, dice[0] if isinstance(dice[0], Undefined) else NEVER_PREDICTED),
        disagreement=NO_MEMBERS if tally is None else tally.disagreement(zone),
        outlyingness=outlyingness(maps.statistics, reference, min_cases=settings.min_reference_cases),
        voxel_ml=voxel_ml(maps.grid),
    )
