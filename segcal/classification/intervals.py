"""Estimates with intervals, and paired differences, of pipelines on the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.classification.error_intervals import DrawnError, difference_interval
from segcal.classification.metrics import METRICS, measure
from segcal.classification.metrics.calibration import plain_marginal_error
from segcal.classification.metrics.rows import Floats, ScoredRows, Whole
from segcal.classification.metrics.tables import row_brier, row_nll
from segcal.classification.ranked import (
    PLAIN_MARGINAL,
    RANKED_ERRORS,
    replicate_foreign,
    replicate_ranked,
    replicate_runs,
)
from segcal.classification.resampling import ERRORS, Draws, Replicates, Units, replicate
from segcal.errors import ParameterError
from segcal.evaluation.summary import BootstrapSettings
from segcal.metrics.summary import json_number

COMPARED = ("nll", "brier", "accuracy", "ece", "adaptive_ece", "classwise_ece")
NOT_NEGATIVE = (*ERRORS, *RANKED_ERRORS)
"""Calibration errors: noise raises them, and more so on resampled rows."""
PLAIN = {"debiased_ce": "adaptive_ece_2", "marginal_ce": PLAIN_MARGINAL}
"""Debiased estimates, and the plain ones of the same truth that carry their intervals.

Debiasing takes off the noise of the rows once, and resampled rows carry it twice: their debiased errors lie around the
plain error, not around the debiased one.
"""
LOCAL_REASON = (
    "no interval: a row drawn twice is its own nearest neighbour, so drawn rows have other local errors than new ones; "
    "and no resampling holds for a largest value"
)
SPARSE_REASON = (
    "no interval: a bin of a few rows counts as much as the fullest, and resampling does not know how far off it is"
)
WITHOUT_INTERVAL = {"mce": SPARSE_REASON, "ace": SPARSE_REASON}
"""Errors whose intervals do not hold the truth (docs/classification_metrics.md)."""
FEW_FOREIGN = "no interval: too few out-of-distribution rows to draw from"
MOST_EMPTY = 0.01
"""Share of draws without a foreign (or a known) row above which there is no interval of their metrics."""


def _hits(rows: ScoredRows) -> Floats:
    return rows.hit.astype(np.float64)


_OF_A_ROW: dict[str, Callable[[ScoredRows], Floats]] = {"nll": row_nll, "brier": row_brier, "accuracy": _hits}


class RowBootstrap:
    """Intervals of all pipelines from one set of draws; a pipeline's interval does not depend on the others."""

    def __init__(
        self,
        pipelines: Mapping[str, ScoredRows],
        base: str,
        subjects: Whole | None,
        *,
        n_bins: int,
        how: BootstrapSettings,
    ) -> None:
        """Draw once and measure every pipeline.

        Args:
            pipelines: the same rows under each pipeline.
            base: the uncalibrated one.
            subjects: (n,) rows to be drawn together; None draws single rows.
            n_bins: bins of all binned errors.
            how: replicates, seed and level.
        """
        if how.n_replicates < 1 or not 0 < how.confidence_level < 1:
            raise ParameterError(f"replicates must be at least 1 and the level between 0 and 1, got {how}")
        self._pipelines, self.how = pipelines, how
        self.units = Units.of(pipelines[base].n_rows, subjects, how.seed)
        draws = Draws.of(self.units, n_replicates=how.n_replicates, seed=how.seed)
        before = pipelines[base].prediction
        self.values = {name: measure(rows, n_bins=n_bins) for name, rows in pipelines.items()}
        for name, rows in pipelines.items():
            self.values[name]["flip"] = float((rows.prediction != before).mean())
            self.values[name][PLAIN_MARGINAL] = plain_marginal_error(rows, n_bins=n_bins)
        self._drawn = {name: _replicates(rows, before, draws, n_bins) for name, rows in pipelines.items()}
        for name, drawn in self._drawn.items():
            drawn.values.update(shifted(drawn.values, self._plain(pipelines[name], n_bins), self.values[name]))

    def estimate(self, pipeline: str, metric: str) -> dict[str, Any]:
        """The metric as summary.json has it: `mean` is the value on all rows.

        Means over rows and AURC have percentile intervals, calibration errors those of
        segcal.classification.error_intervals and a `noise_limit`, which noise alone exceeds one time in twenty at 95 %.
        """
        found: dict[str, Any] = {"mean": json_number(self.values[pipeline][metric])}
        if metric in WITHOUT_INTERVAL:
            return {**found, "low": None, "high": None, "reason": WITHOUT_INTERVAL[metric]}
        if metric not in NOT_NEGATIVE:
            low, high = self._quantiles(self._drawn[pipeline].values[metric])
            return {**found, "low": low, "high": high}
        level = self.how.confidence_level
        low, high = self._error(pipeline, metric).interval(level)
        limit = float(np.quantile(self._drawn[pipeline].noise[metric], level))
        return {**found, "low": low, "high": high, "noise_limit": json_number(limit)}

    def compare(self, first: str, second: str, metric: str) -> dict[str, Any]:
        """`first` minus `second` on the same rows and draws, with the shares of rows that got better and worse."""
        difference = self.values[first][metric] - self.values[second][metric]
        if metric in NOT_NEGATIVE:
            one, other = (self._error(name, metric) for name in (first, second))
            low, high = difference_interval(one, other, self.how.confidence_level)
        else:
            low, high = self._quantiles(self._drawn[first].values[metric] - self._drawn[second].values[metric])
        gains = self._gains(first, second, metric)
        improved, worsened = (None, None) if gains is None else (float((gains > 0).mean()), float((gains < 0).mean()))
        return {
            "first": first,
            "second": second,
            "metric": metric,
            "difference": difference,
            "low": low,
            "high": high,
            "share_improved": improved,
            "share_worsened": worsened,
            "n_pairs": self._pipelines[first].n_rows,
        }

    def _error(self, pipeline: str, metric: str) -> DrawnError:
        plain = PLAIN.get(metric, metric)
        drawn = self._drawn[pipeline]
        return DrawnError(self.values[pipeline][plain], drawn.values[plain], drawn.noise[plain])

    def _plain(self, rows: ScoredRows, n_bins: int) -> dict[str, float]:
        """The metrics that runs may change, of all rows, as replicates compute them."""
        once = Draws.from_weights(self.units, np.ones((self.units.n_units, 1)))
        return {name: float(value[0]) for name, value in replicate_runs(rows, once, n_bins).values.items()}

    def _gains(self, first: str, second: str, metric: str) -> Floats | None:
        """(n,) how much better each row got; None for a metric that no single row has."""
        if metric not in _OF_A_ROW:
            return None
        a, b = (_OF_A_ROW[metric](self._pipelines[name]) for name in (first, second))
        return np.asarray(a - b if METRICS[metric].better == "higher" else b - a)

    def _quantiles(self, replicates: Floats) -> tuple[float, float]:
        tail = (1 - self.how.confidence_level) / 2
        low, high = np.quantile(replicates, (tail, 1 - tail))
        assert math.isfinite(low)
        return float(low), float(high)


def foreign_estimates(
    confidence: Floats,
    ood: NDArray[np.bool_],
    subjects: Whole | None,
    values: Mapping[str, float],
    how: BootstrapSettings,
) -> dict[str, dict[str, Any]]:
    """Metrics of known and foreign rows as summary.json has them, with percentile intervals; both kinds are drawn.

    Args:
        confidence: (n,) of all rows.
        ood: (n,) which of them are foreign.
        subjects: (n,) rows to be drawn together; None draws single rows.
        values: the metrics on all rows.
        how: replicates, seed and level.
    """
    units = Units.of(len(confidence), subjects, how.seed)
    drawn = replicate_foreign(confidence, ood, Draws.of(units, n_replicates=how.n_replicates, seed=how.seed))
    plain = replicate_foreign(confidence, ood, Draws.from_weights(units, np.ones((units.n_units, 1))))
    tail = (1 - how.confidence_level) / 2
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        every = drawn[name] - plain[name][0] + value
        good = every[np.isfinite(every)]
        found[name] = {"mean": json_number(value), "low": None, "high": None, "reason": FEW_FOREIGN}
        if len(good) >= (1 - MOST_EMPTY) * len(every):
            low, high = np.quantile(good, (tail, 1 - tail))
            found[name] = {"mean": json_number(value), "low": float(low), "high": float(high)}
    return found


def shifted(drawn: Mapping[str, Floats], plain: Mapping[str, float], values: Mapping[str, float]) -> dict[str, Floats]:
    """Replicates of ranked metrics without what putting many rows into runs changes on all rows."""
    return {name: drawn[name] - value + values[name] for name, value in plain.items()}


def _replicates(rows: ScoredRows, before: Whole, draws: Draws, n_bins: int) -> Replicates:
    binned, ranked = replicate(rows, before, draws, n_bins), replicate_ranked(rows, draws, n_bins)
    return Replicates(binned.values | ranked.values, binned.noise | ranked.noise)
