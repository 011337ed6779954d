"""One case under all pipelines: read once, pooled every way that is needed, measured, and let go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from segcal.calibrated_members import CalibratedMembers
from segcal.calibrators import Calibrator
from segcal.case_labels import load_deployed
from segcal.cases import CaseData, Want, load_poolings
from segcal.checks.tell_tales import TellTales
from segcal.errors import UsageError
from segcal.evaluation.pictures import BySlice, CasePicture, case_picture
from segcal.evaluation.pipelines import Pipeline
from segcal.freed_memory import give_back
from segcal.io.members import Member
from segcal.label_values import region_masks
from segcal.manifest import Manifest, ManifestCase
from segcal.metrics import (
    CaseFrame,
    CaseResult,
    FreeEnergy,
    MetricSettings,
    RegionFrame,
    make_metrics,
    make_region_metrics,
)
from segcal.threads import one_thread, side_by_side
from segcal.volumes import space_of


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCase:
    """What is left of one case.

    Attributes:
        case_id: which.
        results: by pipeline name.
        energy: free-energy statistics by pooling symbol, of all members.
        n_floored: stored values raised to keep logarithms finite, each counted once however often it was pooled.
        outside_share: share of the volume outside the crop.
        picture: one slice for the report, if a pipeline was chosen for it.
        fill: share of the voxels that look like padding in a file of logits, 0 when there are few.
        turned: how the prediction would fit the label clearly better, if turning it helps.
        odd: the member that lies otherwise than the others, if there is one.
    """

    case_id: str
    results: Mapping[str, CaseResult]
    energy: Mapping[str, Mapping[str, float]]
    n_floored: int
    outside_share: float
    picture: CasePicture | None
    fill: float = 0.0
    turned: str | None = None
    odd: str | None = None


@one_thread()
def measure_case(
    manifest: Manifest,
    case: ManifestCase,
    pipelines: Sequence[Pipeline],
    settings: MetricSettings,
    *,
    device: torch.device,
    pictured: str | None = None,
    count_outside: bool = True,
) -> MeasuredCase:
    """Measure every pipeline on one case; a pure function of its arguments with a small result.

    Args:
        pictured: name of the pipeline whose maps are kept for the report.
        count_outside: voxels outside the crop count as certain background; False leaves them out.
    """
    wanted = list(dict.fromkeys(Want(p.pooling, p.n_members) for p in pipelines))
    averaged = {p.name: CalibratedMembers(p.fitted, device=device) for p in pipelines if p.each_member}

    def calibrate_alone(_: int, member: Member) -> None:
        for members in averaged.values():
            members.add(member)

    found = load_poolings(
        manifest, case, wanted, device=device, with_labels=True, on_member=calibrate_alone, narrow=True
    )
    n_floored = max(data.n_floored for data in found)  # the pooling of all members has seen every stored value
    pooled = dict(zip(wanted, _with_short_labels(found), strict=True))
    del found
    first = pooled[wanted[0]]
    deployed = load_deployed(manifest, case, device=device, shape=space_of(first.logits))
    frame = case_frame(manifest, first, deployed, settings, count_outside=count_outside)
    outside_share = 0.0 if first.inside is None else float((~first.inside).double().mean())
    noticed = TellTales()
    noticed.look(_with_whole_numbers(first))
    del first
    results, energy, picture = dict[str, CaseResult](), dict[str, Mapping[str, float]](), None
    for want in wanted:
        data = pooled.pop(want)  # taken out, so that its memory is free for the poolings after it
        if want.n_members is None:
            energy[want.pooling] = _energy(data)
        chosen = [pipeline for pipeline in pipelines if Want(pipeline.pooling, pipeline.n_members) == want]
        seen = frame.with_decision(data.decision)
        results |= _measure_by_voxels([p for p in chosen if _by_voxels(p)], data, seen, settings)
        for pipeline in chosen:
            if _by_voxels(pipeline):
                probs = _by_slice(pipeline, data)
            else:
                results[pipeline.name], probs = _measure_volume(pipeline, data, averaged, seen, settings)
            if pipeline.name == pictured:
                picture = case_picture(manifest, case, data, probs, can_flip=pipeline.can_flip)
            del probs
    del data, seen, frame, deployed
    give_back()
    return MeasuredCase(
        case_id=case.id,
        results={pipeline.name: results[pipeline.name] for pipeline in pipelines},
        energy=energy,
        n_floored=n_floored,
        outside_share=outside_share,
        picture=picture,
        fill=noticed.fill.get(case.id, 0.0),
        turned=noticed.turned.get(case.id),
        odd=noticed.odd.get(case.id),
    )


def _with_short_labels(found: Sequence[CaseData]) -> list[CaseData]:
    """All poolings share the label; int64 takes 71 MB at BraTS size."""
    labels = found[0].labels
    short = None if labels is None else labels.to(torch.int16)
    return [replace(data, labels=short) for data in found]


def _with_whole_numbers(data: CaseData) -> CaseData:
    """The same with labels and decision in a type that products of class indices fit into."""
    if data.labels is None:
        return data
    return replace(data, labels=data.labels.int(), decision=data.decision.int())


def case_frame(
    manifest: Manifest,
    data: CaseData,
    deployed: Tensor | None,
    settings: MetricSettings,
    *,
    count_outside: bool = True,
    spatial: bool = True,
) -> CaseFrame | RegionFrame:
    """A labelled case as every pipeline is measured on it; without `spatial`, no distances to the boundary."""
    ignored = None if data.valid is None else ~data.valid
    if not count_outside and data.inside is not None:
        ignored = ~data.inside if ignored is None else ignored | ~data.inside
    if data.region_labels is not None:
        in_use = None if deployed is None else region_masks(manifest, deployed)
        return RegionFrame.build(
            data.case_id,
            data.region_labels,
            settings,
            deployed=in_use,
            inside=data.inside,
            ignored=ignored,
            spatial=spatial,
        )
    if data.labels is None:
        raise UsageError(f"{data.case_id}: evaluation needs labels")
    labels = data.labels if ignored is None else data.labels.masked_fill(ignored, -1)
    return CaseFrame.build(data.case_id, labels, settings, deployed=deployed, inside=data.inside, spatial=spatial)


def _by_voxels(pipeline: Pipeline) -> bool:
    """Whether runs of voxels can be measured one after the other, without a volume of probabilities."""
    return not pipeline.each_member and isinstance(pipeline.fitted.calibrator, Calibrator)


def _measure_by_voxels(
    pipelines: Sequence[Pipeline], data: CaseData, frame: CaseFrame | RegionFrame, settings: MetricSettings
) -> dict[str, CaseResult]:
    """Results by name; the pipelines run side by side and none of them makes a volume of its own."""

    def measured(pipeline: Pipeline) -> CaseResult:
        assert isinstance(frame, CaseFrame)
        metrics = make_metrics(settings)
        # A preserving calibrator compares every voxel with the decision before it hands the probabilities out.
        metrics.update(frame, pipeline.fitted.probs_by_voxels(data), as_decided=not pipeline.can_flip)
        return metrics.take(frame.case_id)

    return dict(zip((p.name for p in pipelines), side_by_side(measured, pipelines), strict=True))


def _by_slice(pipeline: Pipeline, data: CaseData) -> BySlice:
    """A slice of a pipeline that needs no volume."""
    by_voxels = pipeline.fitted.probs_by_voxels(data)
    n_classes, _, height, width = data.logits.shape
    size = height * width
    return lambda z: by_voxels(slice(z * size, (z + 1) * size)).reshape(n_classes, height, width)


def _measure_volume(
    pipeline: Pipeline,
    data: CaseData,
    averaged: dict[str, CalibratedMembers],
    frame: CaseFrame | RegionFrame,
    settings: MetricSettings,
) -> tuple[CaseResult, BySlice]:
    """One that needs a whole volume has the memory to itself; the volume goes with the slices that are returned."""
    if pipeline.each_member:
        volume = averaged.pop(pipeline.name).mean()
        return _measure(frame, volume, settings), partial(volume.select, 1)
    pairs = pipeline.fitted.region_pairs(data)
    return _measure(frame, pairs, settings), partial(pairs[:, 1].select, 1)


def _measure(frame: CaseFrame | RegionFrame, probs: Tensor, settings: MetricSettings) -> CaseResult:
    if isinstance(frame, RegionFrame):
        region_metrics = make_region_metrics(settings)
        region_metrics.update(frame, probs)
        return region_metrics.take(frame.case_id)
    metrics = make_metrics(settings)
    metrics.update(frame, probs)
    return metrics.take(frame.case_id)


def _energy(data: CaseData) -> dict[str, float]:
    energy = FreeEnergy()
    energy.update(data.case_id, data.logits, inside=data.inside)
    return energy.compute()[data.case_id]
