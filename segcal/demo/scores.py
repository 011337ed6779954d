"""Measuring all pipelines of the demo on the test cases, each case read once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segcal.cases import CaseData, load_case
from segcal.evaluation.picture_maps import PictureMaps
from segcal.evaluation.pipelines import uncalibrated
from segcal.fitted import FittedCalibrator
from segcal.io.archive import read_npz_array
from segcal.io.images import read_image, read_labels
from segcal.manifest import Manifest, ManifestCase
from segcal.metrics import METRICS, CaseFrame, CaseResult, MetricSettings
from segcal.metrics.bins import BinTable
from segcal.metrics.suite import MetricSet
from segcal.types import Grid, Progress

BEFORE = "before"
"""Name of the pooled ensemble as it is, without calibration."""

_MEASURED = ("scores", "dice", "flips", "top_label")


@dataclass(frozen=True, slots=True)
class Shown:
    """A test case with the maps that its pictures need, one set for each pipeline asked for."""

    case_id: str
    group: str
    grid: Grid | None
    maps: Mapping[str, PictureMaps]


@dataclass(slots=True)
class DemoScores:
    """What was measured on the test cases.

    Attributes:
        groups: Test cases of each site, in the manifest's order.
        results: Numbers and bin tables by pipeline and case.
        shown: Cases kept for pictures, by id.
        n_voxels: Voxels whose applied files were compared with the pooled decision.
        n_moved_on_disk: How many of them have another class in the stored map or segmentation.
    """

    groups: dict[str, list[str]]
    results: dict[str, dict[str, CaseResult]]
    shown: dict[str, Shown] = field(default_factory=dict)
    n_voxels: int = 0
    n_moved_on_disk: int = 0

    @property
    def pipelines(self) -> list[str]:
        """`before` and the methods, in the order of the table."""
        return list(self.results)

    def mean(self, pipeline: str, group: str, column: str) -> float:
        """Mean over the cases of a site; cases where the number does not exist are left out."""
        values = [self.results[pipeline][case_id].values[column] for case_id in self.groups[group]]
        return float(np.nanmean(values))

    def reliability(self, pipeline: str, group: str) -> BinTable:
        """Bin table of all voxels of a site."""
        bins = MetricSettings(("a", "b")).ece_bins
        tables = [self.results[pipeline][case_id].tables[f"top_label_{bins}"][0] for case_id in self.groups[group]]
        return reduce(add, (BinTable.from_array(table) for table in tables))


def score_cases(
    manifest: Manifest,
    case_ids: Sequence[str],
    fitted: Mapping[str, FittedCalibrator],
    *,
    device: torch.device,
    applied: Path,
    shown: Mapping[str, Collection[str]],
    progress: Progress | None = None,
) -> DemoScores:
    """Measures the pooled ensemble and every calibrator on the test cases.

    Args:
        applied: Folder that `apply_calibrator` wrote; its files are compared with the pooled decision.
        shown: For the cases of the pictures, the pipelines to keep maps of.
    """
    settings = MetricSettings(manifest.class_names)
    pipelines = {BEFORE: uncalibrated(manifest, "logits"), **fitted}
    scores = DemoScores(groups={}, results={name: {} for name in pipelines})
    for done, case_id in enumerate(case_ids, start=1):
        case = manifest.case(case_id)
        data = load_case(manifest, case, pooling="logits", device=device, with_labels=True)
        scores.groups.setdefault(case.group or "all", []).append(case_id)
        kept = _measure(data, pipelines, settings, scores, keep=(BEFORE, *shown[case_id]) if case_id in shown else ())
        _compare_files(applied, data, scores)
        if case_id in shown:
            scores.shown[case_id] = _shown(manifest, case, data, kept)
        if progress is not None:
            progress("evaluate", done, len(case_ids))
    return scores


def _measure(
    data: CaseData,
    pipelines: Mapping[str, FittedCalibrator],
    settings: MetricSettings,
    scores: DemoScores,
    keep: Collection[str],
) -> dict[str, Tensor]:
    """Puts every pipeline's numbers of a case into `scores` and returns the probabilities of those in `keep`."""
    assert data.labels is not None
    frame = CaseFrame.build(data.case_id, data.labels, settings, decision=data.decision, inside=data.inside)
    kept: dict[str, Tensor] = {}
    for name, calibrator in pipelines.items():
        probs = calibrator.volume_probs(data)
        metrics = MetricSet({metric: METRICS[metric](settings) for metric in _MEASURED})
        metrics.update(frame, probs)
        scores.results[name][data.case_id] = metrics.take(data.case_id)
        if name in keep:
            kept[name] = probs
    return {name: kept[name] for name in keep}


def _compare_files(applied: Path, data: CaseData, scores: DemoScores) -> None:
    """Counts voxels of the written files that say another class than the pooled decision."""
    decision = data.decision.cpu().numpy()
    stored = read_npz_array(applied / f"{data.case_id}.npz", "probabilities").argmax(axis=0)
    segmentation = read_labels(applied / f"{data.case_id}.nii.gz").values
    scores.n_voxels += decision.size
    scores.n_moved_on_disk += int(((stored != decision) | (segmentation != decision)).sum())


def _shown(manifest: Manifest, case: ManifestCase, data: CaseData, probs: Mapping[str, Tensor]) -> Shown:
    assert data.labels is not None
    decision, label = data.decision.cpu().numpy(), data.labels.cpu().numpy()
    image = None if case.image is None else read_image(manifest.resolve(case.image)).values
    energy = torch.logsumexp(data.logits, dim=0).cpu().numpy()
    before = probs[BEFORE].amax(dim=0).cpu().numpy()
    maps = {
        name: PictureMaps(
            segmentation=decision,
            confidence_before=before,
            confidence_after=values.amax(dim=0).cpu().numpy(),
            image=image,
            label=label,
            flips=values.argmax(dim=0).cpu().numpy() != decision,
            free_energy=energy,
        )
        for name, values in probs.items()
        if name != BEFORE
    }
    return Shown(case.id, case.group or "all", data.grid, maps)
