"""Estimates, intervals and comparisons as they stand in summary.json: undefined is null with a reason, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping

from segcal.metrics.bootstrap import AceEstimate, Comparison, Estimate, Interval
from segcal.metrics.resampling import Scheme

JsonObject = dict[str, object]


def json_number(value: float) -> float | None:
    """The number, or None for one that does not exist: JSON has no NaN."""
    return value if math.isfinite(value) else None


def estimate_json(estimate: Estimate) -> JsonObject:
    """`low` and `high` are the paper's two-level percentile interval; the bootstrap by subject stands beside it."""
    result: JsonObject = {"mean": json_number(estimate.mean), **_schemes(estimate.intervals)}
    result["by_repeat"] = [json_number(value) for value in estimate.by_repeat]
    result["n_undefined"] = estimate.n_undefined
    if not math.isfinite(estimate.mean):
        result["reason"] = f"undefined for all {estimate.n_undefined} cases"
    return result


def ace_json(estimate: AceEstimate) -> JsonObject:
    """`low` and `high` are the smallest and largest repeat, as in the paper; bootstrap intervals stand beside them."""
    result: JsonObject = {"mean": json_number(estimate.mean), **_ends(Interval(estimate.low, estimate.high))}
    result["by_repeat"] = [json_number(value) for value in estimate.by_repeat]
    result["bootstrap"] = {
        scheme: {"percentile": _ends(interval), "basic": _ends(estimate.basic[scheme])}
        for scheme, interval in estimate.percentile.items()
    }
    result["noise_limit"] = json_number(estimate.noise_limit)
    if not math.isfinite(estimate.mean):
        result["reason"] = "no repeat has a counted voxel"
    return result


def comparison_json(comparison: Comparison) -> JsonObject:
    """Difference first minus second with both intervals and the shares of cases improved and worsened."""
    return {
        "difference": json_number(comparison.difference),
        **_schemes(comparison.intervals),
        "share_improved": json_number(comparison.share_improved),
        "share_worsened": json_number(comparison.share_worsened),
        "n_pairs": comparison.n_pairs,
    }


def _schemes(intervals: Mapping[Scheme, Interval]) -> JsonObject:
    return {**_ends(intervals["two_level"]), "by_subject": _ends(intervals["by_subject"])}


def _ends(interval: Interval) -> JsonObject:
    return {"low": json_number(interval.low), "high": json_number(interval.high)}
