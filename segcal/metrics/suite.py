"""All metrics of one pipeline, updated in one pass over each case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segcal.metrics.base import Metric, Undefined
from segcal.metrics.frame import ByVoxels, CaseFrame


@dataclass(frozen=True, slots=True, eq=False)
class CaseResult:
    """What is left of one case under one pipeline: small, and safe to send or store.

    Attributes:
        values: column -> number, NaN where undefined.
        undefined: column -> why it is undefined.
        tables: name -> array (channel, ...); softmax models have one channel, region models one a region.
    """

    values: Mapping[str, float]
    undefined: Mapping[str, str]
    tables: Mapping[str, NDArray[np.float64]]


class MetricSet:
    """The metrics of one pipeline."""

    def __init__(self, metrics: Mapping[str, Metric[Any]]) -> None:
        self.metrics = dict(metrics)

    def update(self, frame: CaseFrame, values: Tensor | ByVoxels, *, as_decided: bool = False) -> None:
        """Measure one case in one pass over its probabilities; see `batches`."""
        for batch in frame.batches(values, as_decided=as_decided):
            for metric in self.metrics.values():
                metric.update(frame.case_id, batch)

    def merge(self, other: Self) -> None:
        """Take over what another worker measured of this pipeline."""
        for name, metric in self.metrics.items():
            metric.merge(other.metrics[name])

    def take(self, case_id: str) -> CaseResult:
        """Results of a finished case; its state is dropped, so memory does not grow with the number of cases."""
        values: dict[str, float] = {}
        undefined: dict[str, str] = {}
        tables: dict[str, NDArray[np.float64]] = {}
        for metric in self.metrics.values():
            state = metric.states.pop(case_id)
            for name, value in metric.score(state).items():
                values[name] = math.nan if isinstance(value, Undefined) else value
                if isinstance(value, Undefined):
                    undefined[name] = value.reason
            tables |= {name: table[None] for name, table in metric.tables(state).items()}
        return CaseResult(values, undefined, tables)


def mean_over_channels(names: Sequence[str], channels: Sequence[CaseResult]) -> CaseResult:
    """Result of a region model from the results of its channels, each a binary problem.

    A column is the mean over the channels where it is defined, with every channel's own value beside it as
    `column:region`; counts (`n_...`) are added up. Tables are stacked along the channel axis.
    """
    values: dict[str, float] = {}
    undefined: dict[str, str] = {}
    for column in (name for name in channels[0].values if ":" not in name):
        each = [channel.values[column] for channel in channels]
        defined = [value for value in each if math.isfinite(value)]
        if column.startswith("n_"):
            values[column] = math.fsum(each)
            continue
        values[column] = math.fsum(defined) / len(defined) if defined else math.nan
        if not defined:
            undefined[column] = channels[0].undefined[column]
        for name, value, channel in zip(names, each, channels, strict=True):
            values[f"{column}:{name}"] = value
            if column in channel.undefined:
                undefined[f"{column}:{name}"] = channel.undefined[column]
    tables = {name: np.concatenate([channel.tables[name] for channel in channels]) for name in channels[0].tables}
    return CaseResult(values, undefined, tables)
