"""Reliability of one labelled case before and after calibration, from the case that QA has in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segcal.case_labels import read_case_labels, targets
from segcal.cases import CaseData
from segcal.evaluation.measure import case_frame
from segcal.evaluation.pipelines import uncalibrated
from segcal.evaluation.records import ACE_TABLE
from segcal.manifest import Manifest
from segcal.metrics import CaseFrame, MetricSettings, RegionFrame, RegionMetricSet
from segcal.metrics.ece import TopLabelError
from segcal.metrics.frame import ByVoxels
from segcal.metrics.suite import MetricSet
from segcal.threads import one_thread
from segcal.types import Pooling

N_BINS = 15


@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """Bin tables (3, 15) of the winning class, as `segcal evaluate` makes them: voxels, sum of confidence, hits.

    Region models: the sum over their binary decisions.
    """

    before: NDArray[np.float64]
    after: NDArray[np.float64]

    def to_json(self) -> dict[str, list[list[float]]]:
        return {"before": self.before.tolist(), "after": self.after.tolist()}


def with_labels(manifest: Manifest, data: CaseData) -> CaseData:
    """The case with its labels read and checked; errors of `segcal.errors` say what is wrong with them."""
    case = manifest.case(data.case_id)
    _, z, y, x = data.logits.shape
    label_map = read_case_labels(manifest, case, (z, y, x), data.grid)
    labels, region_labels, valid = targets(manifest, case, label_map, data.logits.device)
    return replace(data, labels=labels, region_labels=region_labels, valid=valid)


def reliability(manifest: Manifest, data: CaseData, probs: Tensor, pooling: Pooling) -> Reliability:
    """Tables of a labelled case.

    Args:
        data: with labels, pooled by `pooling`.
        probs: (C, z, y, x) calibrated probabilities.
    """
    settings = MetricSettings(manifest.class_names, ece_bins=N_BINS, ace_bins=N_BINS)
    plain = uncalibrated(manifest, pooling)
    with one_thread():
        frame = case_frame(manifest, data, None, settings, spatial=False)
        by_voxels = isinstance(frame, CaseFrame)
        before = _table(frame, plain.probs_by_voxels(data) if by_voxels else plain.volume_probs(data), settings)
        return Reliability(before, _table(frame, probs, settings))


def _table(frame: CaseFrame | RegionFrame, values: Tensor | ByVoxels, settings: MetricSettings) -> NDArray[np.float64]:
    def make(own: MetricSettings) -> MetricSet:
        return MetricSet({"top_label": TopLabelError(own)})

    name = ACE_TABLE.format(N_BINS)
    if isinstance(frame, RegionFrame):
        assert isinstance(values, Tensor)
        regions = RegionMetricSet(settings, make)
        regions.update(frame, values)
        return np.asarray(regions.take(frame.case_id).tables[name].sum(axis=0))
    metrics = make(settings)
    metrics.update(frame, values)
    return np.asarray(metrics.take(frame.case_id).tables[name].sum(axis=0))
