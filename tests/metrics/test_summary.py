"""Estimates as they stand in summary.json."""

from __future__ import annotations

import json
import math

import numpy as np

from segcal.metrics.bootstrap import Bootstrap, CaseScores
from segcal.metrics.summary import ace_json, comparison_json, estimate_json

SUBJECTS = (("s1", "s2", "s3"), ("s2", "s3", "s4"))


def bootstrap(*, undefined: bool = False, voxels: int = 10) -> Bootstrap:
    rng = np.random.default_rng(0)
    values = [rng.random((2, 1, 3)) for _ in SUBJECTS]
    if undefined:
        values = [np.full_like(repeat, math.nan) for repeat in values]
    tables = [np.full((2, 3, 1, 3, 15), float(voxels)) * [[1.0], [0.8], [0.7]] for _ in SUBJECTS]
    return Bootstrap(CaseScores(("a", "b"), ("dsc",), SUBJECTS, tuple(values), tuple(tables)), n_replicates=50)


def strict(value: object) -> dict[str, object]:
    """Through JSON and back; NaN would fail."""
    loaded: dict[str, object] = json.loads(json.dumps(value, allow_nan=False))
    return loaded


def test_an_estimate_names_the_paper_s_interval_plainly_and_the_other_by_its_scheme() -> None:
    estimate = bootstrap().estimate("a", "dsc")
    entry = strict(estimate_json(estimate))
    assert (entry["mean"], entry["low"]) == (estimate.mean, estimate.intervals["two_level"].low)
    assert entry["by_subject"]["high"] == estimate.intervals["by_subject"].high  # type: ignore[index]
    assert "reason" not in entry


def test_an_undefined_estimate_is_null_with_a_reason() -> None:
    entry = strict(estimate_json(bootstrap(undefined=True).estimate("a", "dsc")))
    assert entry["mean"] is None
    assert entry["low"] is None
    assert "all 6 cases" in str(entry["reason"])


def test_ace_has_its_range_over_repeats_and_four_named_intervals() -> None:
    entry = strict(ace_json(bootstrap().ace("a")))
    assert set(entry["bootstrap"]) == {"two_level", "by_subject"}  # type: ignore[call-overload]
    for intervals in entry["bootstrap"].values():  # type: ignore[attr-defined]
        assert set(intervals) == {"percentile", "basic"}
    assert math.isclose(float(entry["low"]), 0.1)  # type: ignore[arg-type]


def test_ace_without_voxels_is_null_with_a_reason() -> None:
    entry = strict(ace_json(bootstrap(voxels=0).ace("a")))
    assert entry["mean"] is None
    assert entry["reason"]


def test_a_comparison_of_ace_has_no_share_of_cases() -> None:
    found = bootstrap()
    assert strict(comparison_json(found.compare_ace("a", "b")))["share_improved"] is None
    assert 0 <= float(strict(comparison_json(found.compare("a", "b", "dsc", "higher")))["share_improved"]) <= 1  # type: ignore[arg-type]
