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


@pytest.mark.slow
def test_intervals_of_a_confident_classifier_hold_the_truth_though_one_bin_has_all_rows() -> None:
    """300 rows, gaps of 0.02 above and 0.05 below what is true: 1.6 and 4 standard errors."""
    rng, n_sets, held = np.random.default_rng(1), 60, np.zeros(4)
    for seed in range(n_sets):
        confidence = rng.uniform(0.94, 0.999, 300)
        labels = (rng.random(300) >= confidence - 0.02).astype(np.int64)
        scores = {"over": confidence, "under": confidence - 0.07}
        rows = {name: ScoredRows.of(np.stack([p, 1 - p], 1), labels) for name, p in scores.items()}
        drawn = RowBootstrap(rows, "over", None, n_bins=15, how=BootstrapSettings(n_replicates=150, seed=seed))
        for k, metric in enumerate(("ece", "ks_error")):
            one, gap = drawn.estimate("over", metric), drawn.compare("under", "over", metric)
            held[2 * k : 2 * k + 2] += [one["low"] <= 0.02 <= one["high"], gap["low"] <= 0.03 <= gap["high"]]
    assert held.min() >= 0.9 * n_sets, held


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


@pytest.mark.parametrize("gap", [0.0, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("n_bins", [1, 5])
def test_the_interval_holds_a_small_gap_also_where_one_bin_has_all_rows(n_bins: int, gap: float) -> None:
    """Gaps of a few standard errors: a value near 0 by chance has replicates folded at 0, which are too close to it."""
    rng = np.random.default_rng(5)
    gaps, n_sets, held = np.full(n_bins, gap), 300, 0
    for _ in range(n_sets):
        seen, noise = gaps + rng.normal(size=n_bins), rng.normal(size=(200, n_bins))
        value, replicates, alone = (np.abs(one).sum(axis=-1) for one in (seen, seen + noise, noise))
        low, high = DrawnError(float(value), replicates, alone).interval(0.95)
        held += low <= np.abs(gaps).sum() <= high
    assert held >= 0.92 * n_sets  # a share of 0.95 falls below once in a hundred


@pytest.mark.parametrize("gaps", [(0.8, -0.8), (1.6, -1.6), (4.0, -1.6), (4.0, 0.0), (1.6, 1.6)])
@pytest.mark.parametrize("n_bins", [1, 2, 5])
def test_differences_of_small_gaps_are_held_and_hardly_ever_overstated(n_bins: int, gaps: tuple[float, float]) -> None:
    """Over- and under-confidence on the same rows: noise that lowers one gap raises the other; folded draws hide it."""
    rng = np.random.default_rng(6)
    one, other = (np.full(n_bins, gap / n_bins**0.5) for gap in gaps)
    truth, n_sets, held, above = np.abs(one).sum() - np.abs(other).sum(), 200, 0, 0
    for _ in range(n_sets):
        shared, again = rng.normal(size=n_bins), rng.normal(size=(150, n_bins))
        first, second = (
            DrawnError(float(np.abs(g + shared).sum()), *(np.abs(x).sum(axis=1) for x in (g + shared + again, again)))
            for g in (one, other)
        )
        low, high = difference_interval(first, second, 0.95)
        held += low - 1e-9 <= truth <= high + 1e-9
        above += low > truth + 1e-9
    assert held >= 0.91 * n_sets
    assert above <= 0.05 * n_sets


def test_what_noise_may_have_added_is_all_of_it_below_the_noise_limit_and_little_above() -> None:
    noise = np.linspace(0.0, 1.0, 101)
    assert DrawnError(0.9, np.full(3, 0.95), noise).most_bias(0.95) == pytest.approx(0.5)
    assert DrawnError(3.0, np.full(3, 3.05), noise).most_bias(0.95) == pytest.approx(0.05 * MOST_GROWTH)
    assert DrawnError(3.0, np.full(3, 4.0), noise).most_bias(0.95) == pytest.approx(0.5)
    assert DrawnError(3.0, np.full(3, 2.0), noise).most_bias(0.95) == 0.0


def test_pipelines_that_agree_in_every_draw_do_not_differ() -> None:
    drawn = DrawnError(0.1, np.array([0.1, 0.12, 0.2]), np.array([0.05, 0.1, 0.02]))
    assert difference_interval(drawn, drawn, 0.95) == (0.0, 0.0)
