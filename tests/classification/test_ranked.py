"""Intervals of metrics that look at the order of all rows: agreement with plain resampling, limits, foreign rows."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.classification import ranked
from segcal.classification.intervals import WITHOUT_INTERVAL, RowBootstrap, foreign_estimates
from segcal.classification.metrics import METRICS, ScoredRows, measure, measure_ood
from segcal.classification.metrics.calibration import plain_marginal_error
from segcal.classification.ranked import (
    PLAIN_MARGINAL,
    RANKED_ERRORS,
    RANKINGS,
    replicate_foreign,
    replicate_ranked,
)
from segcal.classification.resampling import ERRORS, MEANS, Units
from segcal.evaluation.summary import BootstrapSettings
from tests.classification.test_resampling import drawn, one_draw

KEPT_EDGES = (PLAIN_MARGINAL, "sweep_ce")
REPLICATED = {*RANKED_ERRORS, *RANKINGS, PLAIN_MARGINAL} - {"marginal_ce"}


def test_every_metric_of_labelled_rows_has_an_interval_or_says_why_not() -> None:
    assert {*MEANS, *ERRORS, *RANKED_ERRORS, *RANKINGS, *WITHOUT_INTERVAL} == {*METRICS, "flip"}
    found = RowBootstrap({"a": drawn(0, 300)}, "a", None, n_bins=15, how=BootstrapSettings(n_replicates=50))
    for metric in METRICS:
        one = found.estimate("a", metric)
        if metric in WITHOUT_INTERVAL:
            assert (one["low"], one["high"]) == (None, None)
            assert "a bin of a few rows" in one["reason"]
            continue
        assert 0 <= one["low"] <= one["high"], metric
        assert ("noise_limit" in one) == (metric in (*ERRORS, *RANKED_ERRORS)), metric


@pytest.mark.parametrize("digits", [1, 12])
@pytest.mark.parametrize("n_classes", [2, 5])
def test_a_replicate_is_the_metric_of_the_drawn_rows(n_classes: int, digits: int) -> None:
    """Also with many equal confidences; metrics whose edges stay those of all rows apart."""
    rows = drawn(1, 150, n_classes)
    rounded = np.round(rows.probabilities, digits) + 1e-3
    rows = ScoredRows.of(rounded / rounded.sum(1, keepdims=True), rows.labels)
    counts = np.bincount(np.random.default_rng(5).integers(0, 150, 150), minlength=150)

    found = replicate_ranked(rows, one_draw(Units.of(150, None, seed=0), counts), n_bins=15).values

    index = np.repeat(np.arange(150), counts)
    expected = measure(ScoredRows.of(rows.probabilities[index], rows.labels[index]))
    assert set(found) == REPLICATED
    for name in set(found) - set(KEPT_EDGES):
        assert found[name][0] == pytest.approx(expected[name], abs=1e-9), name


@pytest.mark.parametrize("labels", ["drawn", "all right", "all wrong"])
def test_every_unit_drawn_once_gives_the_value_on_all_rows(labels: str) -> None:
    rows = drawn(2, 400)
    if labels != "drawn":
        shift = 0 if labels == "all right" else 1
        rows = ScoredRows.of(rows.probabilities, (rows.prediction + shift) % rows.n_classes)
    units = Units.of(rows.n_rows, np.arange(400) // 7, seed=0)
    found = replicate_ranked(rows, one_draw(units, np.ones(units.n_units)), n_bins=15).values
    expected = {**measure(rows), PLAIN_MARGINAL: plain_marginal_error(rows)}
    for name, value in found.items():
        assert value[0] == pytest.approx(expected[name], abs=1e-9), name


def test_runs_of_many_scores_give_the_intervals_of_single_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, how = {"a": drawn(3, 3000)}, BootstrapSettings(n_replicates=400)
    in_runs = RowBootstrap(rows, "a", None, n_bins=15, how=how)
    monkeypatch.setattr(ranked, "MAX_RUNS", 3000)
    exact = RowBootstrap(rows, "a", None, n_bins=15, how=how)
    for metric in (*RANKED_ERRORS, *RANKINGS):
        one, other = in_runs.estimate("a", metric), exact.estimate("a", metric)
        width = other["high"] - other["low"]
        assert one["low"] == pytest.approx(other["low"], abs=0.03 * width), metric
        assert one["high"] == pytest.approx(other["high"], abs=0.03 * width), metric


def test_a_calibrated_classifier_lies_below_the_noise_limits_and_an_overconfident_one_above() -> None:
    rows = {"calibrated": drawn(4, 4000, sharpen=1.0), "sharp": drawn(4, 4000, sharpen=2.5)}
    found = RowBootstrap(rows, "sharp", None, n_bins=15, how=BootstrapSettings(n_replicates=400))
    for metric in RANKED_ERRORS:
        good, bad = (found.estimate(name, metric) for name in ("calibrated", "sharp"))
        assert good["mean"] <= 1.3 * good["noise_limit"], metric
        assert bad["mean"] > bad["noise_limit"], metric


@pytest.mark.parametrize("digits", [1, 12])
def test_replicates_of_foreign_rows_are_the_metrics_of_the_drawn_rows(digits: int) -> None:
    rng = np.random.default_rng(6)
    confidence, ood = np.round(rng.uniform(0.2, 1, 200), digits), rng.random(200) < 0.3
    counts = np.bincount(rng.integers(0, 200, 200), minlength=200)
    found = replicate_foreign(confidence, ood, one_draw(Units.of(200, None, seed=0), counts))
    index = np.repeat(np.arange(200), counts)
    expected = measure_ood(confidence[index], ood[index])
    assert {name: value[0] for name, value in found.items()} == pytest.approx(expected, abs=1e-12)


def test_foreign_rows_have_intervals_unless_draws_miss_them() -> None:
    rng = np.random.default_rng(7)
    confidence = rng.uniform(0.2, 1, 500)
    how = BootstrapSettings(n_replicates=300)
    for n_foreign, drawn_enough in ((100, True), (2, False)):
        ood = np.arange(500) < n_foreign
        values = measure_ood(confidence, ood)
        found = foreign_estimates(confidence, ood, None, values, how)
        for name, one in found.items():
            assert one["mean"] == values[name]
            if drawn_enough:
                assert one["low"] < one["mean"] < one["high"]
            else:
                assert (one["low"], one["high"]) == (None, None)
                assert "too few out-of-distribution rows" in one["reason"]


def test_the_interval_of_the_auroc_is_that_of_the_normal_approximation() -> None:
    rng = np.random.default_rng(8)
    ood = np.arange(2000) < 600
    confidence = np.where(ood, rng.normal(0.5, 0.1, 2000), rng.normal(0.6, 0.1, 2000))
    values = measure_ood(confidence, ood)
    one = foreign_estimates(confidence, ood, None, values, BootstrapSettings(n_replicates=1000))["ood_auroc"]
    below = [(confidence[~ood] > x).mean() for x in confidence[ood]]
    above = [(confidence[ood] < x).mean() for x in confidence[~ood]]
    error = np.sqrt(np.var(below) / 600 + np.var(above) / 1400)  # DeLong
    assert one["high"] - one["low"] == pytest.approx(2 * 1.96 * error, rel=0.1)
