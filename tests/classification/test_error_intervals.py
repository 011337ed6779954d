"""Intervals of calibration errors: they hold the truth, also where noise is most of what is measured."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.classification.error_intervals import MOST_GROWTH, DrawnError, difference_interval
from segcal.classification.intervals import RowBootstrap
from segcal.classification.metrics import ScoredRows, measure
from segcal.evaluation.summary import BootstrapSettings

METRICS = ("ece", "adaptive_ece", "adaptive_ece_2", "classwise_ece", "debiased_ce", "marginal_ce", "sweep_ce", "ecce")
N_SETS = 30


def pipelines(rng: np.random.Generator, n: int) -> dict[str, ScoredRows]:
    """True probabilities of four classes, too sharp ones, and the class shares for every row: calibrated, but blunt."""
    true = rng.dirichlet(np.full(4, 0.5), size=n).clip(1e-6)
    true /= true.sum(1, keepdims=True)
    labels = (true.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=3)
    sharp = true**1.3
    return {
        "sharp": ScoredRows.of(sharp / sharp.sum(1, keepdims=True), labels),
        "true": ScoredRows.of(true, labels),
        "blunt": ScoredRows.of(np.full((n, 4), 0.25), labels),
    }


@pytest.fixture(scope="module")
def held() -> dict[str, np.ndarray]:
    """Metric -> how often the intervals of sharp, true, sharp - true and true - blunt hold the truth."""
    rng = np.random.default_rng(0)
    truth = {name: measure(rows, METRICS) for name, rows in pipelines(rng, 400_000).items()}
    found = {metric: np.zeros(4) for metric in METRICS}
    for _ in range(N_SETS):
        drawn = RowBootstrap(
            pipelines(rng, 600), "true", None, n_bins=15, how=BootstrapSettings(n_replicates=200, seed=1)
        )
        for metric in METRICS:
            wanted = {name: values[metric] for name, values in truth.items()}
            estimates = [drawn.estimate(name, metric) for name in ("sharp", "true")]
            gaps = [drawn.compare(*both, metric) for both in (("sharp", "true"), ("true", "blunt"))]
            aims = (
                wanted["sharp"],
                wanted["true"],
                wanted["sharp"] - wanted["true"],
                wanted["true"] - wanted["blunt"],
            )
            found[metric] += [
                one["low"] - 1e-3 <= aim <= one["high"] for one, aim in zip([*estimates, *gaps], aims, strict=True)
            ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_intervals_hold_the_truth_of_overconfident_and_of_perfect_pipelines(
    metric: str, held: dict[str, np.ndarray]
) -> None:
    """At least 26 of 30 (a share of 0.95 has fewer once in 60); the truth of 400,000 rows is 0 up to about 1e-3."""
    assert held[metric].min() >= 26, held[metric]


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("order", [1.0, 2.0, np.inf])
def test_both_bounds_of_the_bias_hold_for_any_norm(order: float, scale: float) -> None:
    """Gaussian gaps of 15 bins, from no error to a clear one, in the norms of ECE, of order 2 and of MCE."""
    rng = np.random.default_rng(3)
    gaps = scale * np.linspace(-1.0, 1.5, 15)
    seen = gaps + rng.normal(size=(40_000, 15))
    again = seen + rng.normal(size=seen.shape)
    value, resampled, noise = (np.linalg.norm(one, order, axis=1).mean() for one in (seen, again, again - seen))
    bias = value - np.linalg.norm(gaps, order)
    assert bias <= 1.02 * noise
    assert bias <= 1.02 * MOST_GROWTH * (resampled - value)


def test_what_noise_may_have_added_is_all_of_it_below_the_noise_limit_and_little_above() -> None:
    noise = np.linspace(0.0, 1.0, 101)
    assert DrawnError(0.9, np.full(3, 0.95), noise).most_bias(0.95) == pytest.approx(0.5)
    assert DrawnError(3.0, np.full(3, 3.05), noise).most_bias(0.95) == pytest.approx(0.05 * MOST_GROWTH)
    assert DrawnError(3.0, np.full(3, 4.0), noise).most_bias(0.95) == pytest.approx(0.5)
    assert DrawnError(3.0, np.full(3, 2.0), noise).most_bias(0.95) == 0.0


def test_pipelines_that_agree_in_every_draw_do_not_differ() -> None:
    drawn = DrawnError(0.1, np.array([0.1, 0.12, 0.2]), np.array([0.05, 0.1, 0.02]))
    assert difference_interval(drawn, drawn, 0.95) == (0.0, 0.0)
