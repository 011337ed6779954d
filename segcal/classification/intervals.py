"""Estimates with intervals, and paired differences, of pipelines on the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from segcal.classification.metrics import METRICS, measure
from segcal.classification.metrics.rows import Floats, ScoredRows, Whole
from segcal.classification.metrics.tables import row_brier, row_nll
from segcal.classification.resampling import ERRORS, MEANS, Draws, Replicates, Units, replicate
from segcal.errors import ParameterError
from segcal.evaluation.summary import BootstrapSettings
from segcal.metrics.summary import json_number

COMPARED = ("nll", "brier", "accuracy", "ece", "adaptive_ece", "classwise_ece")
NO_INTERVAL = "no interval: the metric needs all rows at once, which tables of bins do not keep"


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
        self._pipelines, self._how = pipelines, how
        self.units = Units.of(pipelines[base].n_rows, subjects, how.seed)
        draws = Draws.of(self.units, n_replicates=how.n_replicates, seed=how.seed)
        before = pipelines[base].prediction
        self.values = {name: measure(rows, n_bins=n_bins) for name, rows in pipelines.items()}
        for name, rows in pipelines.items():
            self.values[name]["flip"] = float((rows.prediction != before).mean())
        self._drawn: dict[str, Replicates] = {
            name: replicate(rows, before, draws, n_bins) for name, rows in pipelines.items()
        }

    def estimate(self, pipeline: str, metric: str) -> dict[str, Any]:
        """The metric as summary.json has it: `mean` is the value on all rows.

        Means over rows have percentile intervals. Calibration errors have basic ones, 2 value - quantiles cut at 0,
        because resampled tables are noisier than the table itself; the percentile interval stands beside, and
        `noise_limit`, which noise alone exceeds one time in twenty (at 95 %).
        """
        value = self.values[pipeline][metric]
        found: dict[str, Any] = {"mean": json_number(value)}
        if metric not in MEANS and metric not in ERRORS:
            return {**found, "low": None, "high": None, "reason": NO_INTERVAL}
        low, high = self._quantiles(self._drawn[pipeline].values[metric])
        if metric in MEANS:
            return {**found, "low": low, "high": high}
        noise = self._drawn[pipeline].noise[metric]
        limit = float(np.quantile(noise, self._how.confidence_level))
        basic = {"low": max(2 * value - high, 0.0), "high": max(2 * value - low, 0.0)}
        return {**found, **basic, "percentile": {"low": low, "high": high}, "noise_limit": json_number(limit)}

    def compare(self, first: str, second: str, metric: str) -> dict[str, Any]:
        """`first` minus `second` on the same rows and draws, with the shares of rows that got better and worse."""
        difference = self.values[first][metric] - self.values[second][metric]
        low, high = self._quantiles(self._drawn[first].values[metric] - self._drawn[second].values[metric])
        if metric in ERRORS:
            low, high = 2 * difference - high, 2 * difference - low
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

    def _gains(self, first: str, second: str, metric: str) -> Floats | None:
        """(n,) how much better each row got; None for a metric that no single row has."""
        if metric not in _OF_A_ROW:
            return None
        a, b = (_OF_A_ROW[metric](self._pipelines[name]) for name in (first, second))
        return np.asarray(a - b if METRICS[metric].better == "higher" else b - a)

    def _quantiles(self, replicates: Floats) -> tuple[float, float]:
        tail = (1 - self._how.confidence_level) / 2
        low, high = np.quantile(replicates, (tail, 1 - tail))
        assert math.isfinite(low)
        return float(low), float(high)
