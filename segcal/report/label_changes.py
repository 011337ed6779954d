"""Sentences on what a pipeline does to the segmentation, and whether that hurts."""

from __future__ import annotations

from typing import Any

from segcal.report.comparisons import Compared
from segcal.report.roles import PipelineEntry
from segcal.report.wording import difference_interval, share, signed


def label_sentences(pipeline: PipelineEntry, dice: Compared | None) -> list[str]:
    """How many voxels change their label, against the pooled decision and against the files in use."""
    sentences = []
    flips = _mean(pipeline, "flip")
    if flips is not None:
        sentences.append(_against_pooled(pipeline, flips, dice))
    deployed = _mean(pipeline, "flip_deployed")
    if deployed is not None:
        sentences.append(_against_deployed(pipeline, deployed))
    return sentences


def _against_pooled(pipeline: PipelineEntry, flips: float, dice: Compared | None) -> str:
    if pipeline.get("preserves"):
        if flips == 0:
            return "The segmentation stays the same in every voxel: the method guarantees it, and it was counted."
        return (
            f"The method promises to keep every label, yet {share(flips)} of voxels changed theirs. "
            "This is a defect; do not use these results before it is found."
        )
    if flips == 0:
        return "No voxel of these cases changes its label, but the method does not guarantee that for others."
    kinds = _kinds(pipeline, "flip")
    return f"{share(flips)} of voxels change their label{kinds}. {_does_it_hurt(dice)}"


def _against_deployed(pipeline: PipelineEntry, flips: float) -> str:
    if flips == 0:
        return "Its labels are those of the deployed segmentation files in every voxel."
    kinds = _kinds(pipeline, "flip_deployed")
    return f"Against the deployed segmentation files {share(flips)} of voxels have another label{kinds}."


def _kinds(pipeline: PipelineEntry, name: str) -> str:
    parts = {
        "right before and wrong now": _mean(pipeline, f"{name}_harmful"),
        "wrong before and right now": _mean(pipeline, f"{name}_beneficial"),
        "wrong before and after": _mean(pipeline, f"{name}_neutral"),
    }
    known = [f"{share(value)} {words}" for words, value in parts.items() if value is not None]
    return f" ({', '.join(known)})" if known else ""


def _does_it_hurt(dice: Compared | None) -> str:
    if dice is None or dice.difference is None:
        return "What that does to the Dice score is not known."
    change = f"{signed(dice.difference, 'dsc')} points (interval {difference_interval(dice.low, dice.high, 'dsc')})"
    if dice.state == "worse":
        return f"This hurts: the mean Dice score changes by {change}."
    if dice.state == "better":
        return f"This helps: the mean Dice score changes by {change}."
    if dice.state == "few":
        return f"The mean Dice score changes by {change}; too few cases to tell whether that hurts."
    return f"Neither harm nor benefit is shown: the mean Dice score changes by {change}."


def _mean(pipeline: PipelineEntry, column: str) -> float | None:
    values: dict[str, Any] = pipeline["metrics"].get(column, {})
    return values.get("mean")
