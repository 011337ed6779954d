"""Metrics of calibrated segmentations: one pass over each case, small additive states, numbers with intervals.

frame = CaseFrame.build("case_1", labels, settings, decision=decision)   # once a case
metrics = make_metrics(settings)                                        # once a pipeline
metrics.update(frame, probs)
metrics.take("case_1").values["ece"]
"""

from __future__ import annotations

from typing import Any

from segcal.errors import ParameterError
from segcal.metrics.base import Direction, Metric, MetricSettings
from segcal.metrics.boundary import BoundaryError
from segcal.metrics.classwise import ClasswiseError
from segcal.metrics.dice import Dice
from segcal.metrics.ece import TopLabelError
from segcal.metrics.energy import FreeEnergy
from segcal.metrics.equal_mass import EqualMassError
from segcal.metrics.flips import Flips
from segcal.metrics.frame import CaseFrame
from segcal.metrics.nll import ProperScores
from segcal.metrics.regions import RegionFrame, RegionMetricSet
from segcal.metrics.suite import CaseResult, MetricSet
from segcal.metrics.voxels import VoxelBatch

METRICS: dict[str, type[Metric[Any]]] = {
    "scores": ProperScores,
    "dice": Dice,
    "flips": Flips,
    "top_label": TopLabelError,
    "classwise": ClasswiseError,
    "equal_mass": EqualMassError,
    "boundary": BoundaryError,
}
"""Every metric measured for a pipeline. A new one needs its file, a line here and its test."""


def make_metrics(settings: MetricSettings) -> MetricSet:
    """Fresh metrics for one pipeline of a softmax model."""
    if settings.n_classes < 2:
        raise ParameterError(f"metrics of a softmax model need at least two classes, got {settings.class_names!r}")
    return MetricSet({name: kind(settings) for name, kind in METRICS.items()})


def make_region_metrics(settings: MetricSettings) -> RegionMetricSet:
    """Fresh metrics for one pipeline of a region model; `settings.class_names` name the regions."""
    return RegionMetricSet(settings, make_metrics)


def direction(column: str) -> Direction:
    """Which way a column gets better; `column` may be one class's, as in `dsc:anterior`."""
    known = {name: way for kind in METRICS.values() for name, way in kind.directions.items()}
    base = column.split(":")[0]
    if base not in known:
        raise ParameterError(f"{column}: not a column with a better side; known: {', '.join(sorted(known))}")
    return known[base]


__all__ = [
    "METRICS",
    "CaseFrame",
    "CaseResult",
    "Direction",
    "FreeEnergy",
    "Metric",
    "MetricSettings",
    "RegionFrame",
    "RegionMetricSet",
    "VoxelBatch",
    "direction",
    "make_metrics",
    "make_region_metrics",
]
