"""Means over repeats and cases with intervals, ACE with intervals, and paired differences, from per-case tables only.

Every interval is named by the scheme that drew the cases (segcal.metrics.resampling) and by how it was read off the
replicates: `percentile` takes their quantiles; `basic` reflects them about the estimate. ACE cannot be negative and
rises with noise, and resampled tables are noisier than the table itself, so its percentile interval lies too high for a
well-calibrated pipeline. The basic interval takes part of that back and stands beside it. docs/intervals.md gives the
measured coverage of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from segcal.errors import ParameterError
from segcal.metrics.ace import pooled_ace, resampled_ace, without_gaps
from segcal.metrics.base import Direction
from segcal.metrics.resampling import Floats, Resamples, Scheme, draw_by_subject, draw_two_level, weighted_mean


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the estimate would lie with the stated confidence; NaN on both sides when undefined."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over repeats of the mean over cases, with one percentile interval a scheme.

    `n_undefined` counts (repeat, case) pairs without a value: they are in no mean. NaN when no pair has one.
    """

    mean: float
    by_repeat: tuple[float, ...]
    intervals: Mapping[Scheme, Interval]
    n_undefined: int


@dataclass(frozen=True, slots=True)
class AceEstimate:
    """ACE of voxels pooled over the cases of a repeat: mean, range over repeats (the paper) and intervals (ours).

    `noise_limit` is what a perfectly calibrated pipeline whose cases vary as much would exceed one time in twenty (at
    the level 95 %): below it, an ACE cannot be told from 0. It comes from the bootstrap by subject with the pooled gap
    of every bin taken out of the cases.
    """

    mean: float
    by_repeat: tuple[float, ...]
    percentile: Mapping[Scheme, Interval]
    basic: Mapping[Scheme, Interval]
    noise_limit: float

    @property
    def low(self) -> float:
        """Smallest value of a repeat."""
        return min(self.by_repeat)

    @property
    def high(self) -> float:
        """Largest value of a repeat."""
        return max(self.by_repeat)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pipeline `first` minus pipeline `second` on the same cases and the same resamples.

    `share_improved` and `share_worsened` are shares of the (repeat, case) pairs on which `first` is strictly better or
    worse; the rest are equal. Both are NaN for ACE, which no single case has.
    """

    difference: float
    intervals: Mapping[Scheme, Interval]
    share_improved: float
    share_worsened: float
    n_pairs: int


@dataclass(frozen=True, slots=True, eq=False)
class CaseScores:
    """Everything a bootstrap needs, repeat by repeat (their test sets may overlap and differ in size).

    Attributes:
        pipelines: names, the first axis of all arrays.
        columns: metric names, the second axis of `values`.
        subjects: for every repeat the subject of each case.
        values: for every repeat (pipeline, column, case), NaN where undefined.
        tables: for every repeat (pipeline, case, channel, 3, B) top-label tables for ACE; may be empty.
    """

    pipelines: tuple[str, ...]
    columns: tuple[str, ...]
    subjects: tuple[tuple[str, ...], ...]
    values: tuple[Floats, ...]
    tables: tuple[Floats, ...] = ()

    def __post_init__(self) -> None:
        for subjects, values in zip(self.subjects, self.values, strict=True):
            expected = (len(self.pipelines), len(self.columns), len(subjects))
            if values.shape != expected:
                raise ParameterError(f"bootstrap: values have shape {values.shape}, expected {expected}")


class Bootstrap:
    """Intervals of all pipelines and metrics from one set of resamples a scheme.

    The same seed gives the same bytes, and neither the other pipelines in the table nor the number of threads changes
    a pipeline's interval.
    """

    def __init__(
        self, scores: CaseScores, *, n_replicates: int = 2000, seed: int = 0, confidence_level: float = 0.95
    ) -> None:
        if not 0 < confidence_level < 1:
            raise ParameterError(f"the confidence level must lie between 0 and 1, got {confidence_level}")
        self.scores = scores
        self._confidence_level = confidence_level
        self._tails = ((1 - confidence_level) / 2, (1 + confidence_level) / 2)
        n_cases = [len(subjects) for subjects in scores.subjects]
        self.resamples: dict[Scheme, Resamples] = {
            "two_level": draw_two_level(n_cases, n_replicates=n_replicates, seed=seed),
            "by_subject": draw_by_subject(scores.subjects, n_replicates=n_replicates, seed=seed),
        }

    def estimate(self, pipeline: str, column: str) -> Estimate:
        """Mean and intervals of a column."""
        k = self._pipeline(pipeline) * len(self.scores.columns) + self._column(column)
        flat = [values[:, k] for values in self._flat]
        by_repeat = tuple(_nan_mean(values) for values in flat)
        intervals = {scheme: self._percentile(means[:, k]) for scheme, means in self._means.items()}
        n_undefined = sum(int(np.isnan(values).sum()) for values in flat)
        return Estimate(_nan_mean(np.array(by_repeat)), by_repeat, intervals, n_undefined)

    def ace(self, pipeline: str) -> AceEstimate:
        """ACE pooled over the cases of each repeat, with intervals from resampled tables."""
        k = self._pipeline(pipeline)
        by_repeat = tuple(float(pooled_ace(tables[k].sum(axis=0))) for tables in self._tables)
        mean = _nan_mean(np.array(by_repeat))
        percentile = {scheme: self._percentile(values[:, k]) for scheme, values in self._aces.items()}
        basic = {scheme: _reflect(mean, interval) for scheme, interval in percentile.items()}
        noise = self._noise[:, k][np.isfinite(self._noise[:, k])]
        # With one subject every resample is the set itself, and tells nothing of chance.
        one_subject = len({subject for repeat in self.scores.subjects for subject in repeat}) < 2
        limit = math.nan if one_subject or not noise.size else float(np.quantile(noise, self._confidence_level))
        return AceEstimate(mean, by_repeat, percentile, basic, limit)

    def compare(self, first: str, second: str, column: str, better: Direction) -> Comparison:
        """Paired difference of a column; cases undefined for either pipeline are left out."""
        a, b, k = self._pipeline(first), self._pipeline(second), self._column(column)
        differences = [values[a, k] - values[b, k] for values in self.scores.values]
        intervals = {
            scheme: self._percentile(resamples.means([values[:, None] for values in differences])[:, 0])
            for scheme, resamples in self.resamples.items()
        }
        pairs = np.concatenate([values[np.isfinite(values)] for values in differences])
        gains = -pairs if better == "lower" else pairs
        shares = [float((sign * gains > 0).mean()) if gains.size else math.nan for sign in (1, -1)]
        mean = _nan_mean(np.array([_nan_mean(values) for values in differences]))
        return Comparison(mean, intervals, shares[0], shares[1], int(gains.size))

    def compare_ace(self, first: str, second: str) -> Comparison:
        """Paired difference of ACE; its bias is common to both pipelines to a large part and cancels."""
        a, b = self._pipeline(first), self._pipeline(second)
        intervals = {scheme: self._percentile(values[:, a] - values[:, b]) for scheme, values in self._aces.items()}
        difference = self.ace(first).mean - self.ace(second).mean
        n_pairs = sum(len(subjects) for subjects in self.scores.subjects)
        return Comparison(difference, intervals, math.nan, math.nan, n_pairs)

    @cached_property
    def _flat(self) -> list[Floats]:
        """For every repeat (case, pipeline x column)."""
        return [np.moveaxis(values, -1, 0).reshape(values.shape[-1], -1) for values in self.scores.values]

    @cached_property
    def _means(self) -> dict[Scheme, Floats]:
        """(replicate, pipeline x column) for each scheme."""
        return {scheme: resamples.means(self._flat) for scheme, resamples in self.resamples.items()}

    @cached_property
    def _aces(self) -> dict[Scheme, Floats]:
        """(replicate, pipeline) for each scheme."""
        return {scheme: self._resample_ace(resamples, self._tables) for scheme, resamples in self.resamples.items()}

    @cached_property
    def _noise(self) -> Floats:
        """(replicate, pipeline) ACE of resampled cases from which every bin's pooled gap was taken out."""
        return self._resample_ace(self.resamples["by_subject"], tuple(without_gaps(tables) for tables in self._tables))

    @property
    def _tables(self) -> tuple[Floats, ...]:
        if not self.scores.tables:
            raise ParameterError("bootstrap: ACE needs the top-label tables of every case, none were given")
        return self.scores.tables

    def _resample_ace(self, resamples: Resamples, tables: tuple[Floats, ...]) -> Floats:
        pairs = zip(resamples.by_repeat, tables, strict=True)
        return resamples.over_repeats([resampled_ace(draws.weights, repeat) for draws, repeat in pairs])

    def _percentile(self, replicates: Floats) -> Interval:
        defined = replicates[np.isfinite(replicates)]
        if not defined.size:
            return Interval(math.nan, math.nan)
        low, high = np.quantile(defined, self._tails)
        return Interval(float(low), float(high))

    def _pipeline(self, name: str) -> int:
        return _position(name, self.scores.pipelines, "pipeline")

    def _column(self, name: str) -> int:
        return _position(name, self.scores.columns, "metric")


def _reflect(estimate: float, percentile: Interval) -> Interval:
    """The basic interval 2 estimate - quantiles, cut at 0 because ACE cannot be negative."""
    return Interval(max(2 * estimate - percentile.high, 0.0), max(2 * estimate - percentile.low, 0.0))


def _nan_mean(values: Floats) -> float:
    """Mean of the defined values, NaN when there is none."""
    return float(weighted_mean(np.ones((1, len(values))), values[:, None])[0, 0])


def _position(name: str, names: tuple[str, ...], what: str) -> int:
    if name not in names:
        raise ParameterError(f"no {what} {name!r} in the table; it holds {', '.join(names)}")
    return names.index(name)
