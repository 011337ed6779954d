"""Intervals, ACE and paired differences from per-case tables, against explicit loops over the same resamples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from segcal.errors import ParameterError
from segcal.metrics.ace import pooled_ace
from segcal.metrics.bins import BinTable
from segcal.metrics.bootstrap import Bootstrap, CaseScores, Interval, _reflect
from segcal.metrics.resampling import Resamples

PIPELINES = ("a", "b", "c")
COLUMNS = ("nll", "dsc")
SUBJECTS = (("s1", "s2", "s3", "s4", "s4"), ("s1", "s3", "s5", "s6"), ("s2", "s4", "s5", "s7", "s8", "s9"))
N_BINS = 15


def draw_scores(seed: int = 0, *, undefined: bool = False, n_channels: int = 1) -> CaseScores:
    rng = np.random.default_rng(seed)
    values, tables = [], []
    for subjects in SUBJECTS:
        scores = rng.gamma(2.0, size=(len(PIPELINES), len(COLUMNS), len(subjects)))
        if undefined:
            scores[0, 1, 0] = scores[1, 1, 1] = math.nan
        values.append(scores)
        shape = (len(PIPELINES), len(subjects), n_channels, N_BINS)
        counts = rng.integers(0, 50, shape) * rng.integers(0, 2, shape)
        hits = rng.binomial(counts, 0.7)
        tables.append(np.stack([counts, counts * rng.uniform(0.5, 0.9, shape), hits], axis=-2))
    return CaseScores(PIPELINES, COLUMNS, SUBJECTS, tuple(values), tuple(tables))


def cases_drawn(resamples: Resamples, replicate: int) -> list[tuple[int, list[int]]]:
    """[(repeat, case indices with repetition), ...] of one replicate."""
    found = []
    for repeat, draws in enumerate(resamples.by_repeat):
        for weights in draws.weights[draws.replicate == replicate]:
            found.append((repeat, [case for case, weight in enumerate(weights) for _ in range(int(weight))]))
    return found


def loop_mean(drawn: list[tuple[int, list[int]]], values: list[np.ndarray]) -> float:
    """Mean over drawn repeats of the mean over drawn cases, undefined ones left out."""
    means = []
    for repeat, cases in drawn:
        defined = [values[repeat][case] for case in cases if not math.isnan(values[repeat][case])]
        if defined:
            means.append(math.fsum(defined) / len(defined))
    return math.fsum(means) / len(means) if means else math.nan


@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("scheme", ["two_level", "by_subject"])
def test_replicates_agree_with_explicit_resampling(scheme: str, undefined: bool) -> None:
    scores = draw_scores(undefined=undefined)
    bootstrap = Bootstrap(scores, n_replicates=60, seed=3)
    for p, pipeline in enumerate(PIPELINES):
        for c, column in enumerate(COLUMNS):
            values = [repeat[p, c] for repeat in scores.values]
            looped = [loop_mean(cases_drawn(bootstrap.resamples[scheme], k), values) for k in range(60)]  # type: ignore[index]
            estimate = bootstrap.estimate(pipeline, column)
            expected = np.nanquantile(looped, [0.025, 0.975])
            interval = estimate.intervals[scheme]  # type: ignore[index]
            assert (interval.low, interval.high) == pytest.approx(expected, abs=1e-10)
            assert estimate.mean == pytest.approx(np.mean([np.nanmean(v) for v in values]), abs=1e-10)
            assert estimate.n_undefined == sum(int(np.isnan(v).sum()) for v in values)


@pytest.mark.parametrize("n_channels", [1, 2])
@pytest.mark.parametrize("scheme", ["two_level", "by_subject"])
def test_ace_replicates_pool_the_tables_of_the_drawn_cases(scheme: str, n_channels: int) -> None:
    scores = draw_scores(n_channels=n_channels)
    bootstrap = Bootstrap(scores, n_replicates=40, seed=5)
    for p, pipeline in enumerate(PIPELINES):
        looped = []
        for k in range(40):
            aces = []
            for repeat, cases in cases_drawn(bootstrap.resamples[scheme], k):  # type: ignore[index]
                if cases:
                    pooled = np.sum([scores.tables[repeat][p, case] for case in cases], axis=0)
                    aces.append(np.mean([BinTable.from_array(channel).ace() for channel in pooled]))
            looped.append(np.mean(aces))
        estimate = bootstrap.ace(pipeline)
        low, high = np.quantile(looped, [0.025, 0.975])
        percentile, basic = estimate.percentile[scheme], estimate.basic[scheme]  # type: ignore[index]
        assert (percentile.low, percentile.high) == pytest.approx((low, high), abs=1e-9)
        reflected = (max(2 * estimate.mean - high, 0), max(2 * estimate.mean - low, 0))
        assert (basic.low, basic.high) == pytest.approx(reflected, abs=1e-9)


def test_ace_is_pooled_within_a_repeat_and_ranges_over_repeats() -> None:
    scores = draw_scores()
    estimate = Bootstrap(scores, n_replicates=10).ace("b")
    each = [BinTable.from_array(tables[1].sum(axis=0)[0]).ace() for tables in scores.tables]
    assert estimate.by_repeat == pytest.approx(each, abs=1e-12)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((np.mean(each), min(each), max(each)))


def test_for_a_well_calibrated_pipeline_resampling_inflates_ace_and_the_basic_interval_takes_that_back() -> None:
    """True ACE 0: resampled tables are noisier than the table, so their ACE lies above the estimate."""
    rng = np.random.default_rng(0)
    counts = np.full((1, 30, 1, N_BINS), 200.0)
    rate = (np.arange(N_BINS) + 0.5) / N_BINS
    hits = rng.binomial(200, np.clip(rate + rng.normal(0, 0.05, counts.shape), 0, 1))
    table = np.stack([counts, counts * rate, hits], axis=-2)
    subjects = tuple(f"s{k}" for k in range(30))
    scores = CaseScores(("a",), (), (subjects,), (np.zeros((1, 0, 30)),), (table,))
    estimate = Bootstrap(scores).ace("a")
    percentile, basic = estimate.percentile["two_level"], estimate.basic["two_level"]
    assert (percentile.low + percentile.high) / 2 > 1.2 * estimate.mean > 0
    assert basic.low < 0.3 * percentile.low
    assert basic.high < percentile.high
    assert estimate.mean < estimate.noise_limit


def test_a_miscalibrated_pipeline_lies_above_the_noise_limit() -> None:
    scores = draw_scores()
    for tables in scores.tables:
        tables[..., 1, :] = tables[..., 2, :] + 0.3 * tables[..., 0, :]  # overconfident by 0.3 in every bin and case
    estimate = Bootstrap(scores, n_replicates=100).ace("a")
    assert estimate.mean == pytest.approx(0.3)
    assert estimate.noise_limit == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("subjects", "known"), [(("s0", "s0", "s0"), False), (("s0", "s0", "s1"), True)])
def test_one_subject_tells_nothing_of_noise(subjects: tuple[str, ...], known: bool) -> None:
    """Every resample of one is the set itself: a limit of 0 would call any error real."""
    counts = np.full((1, 3, 1, N_BINS), 200.0)
    table = np.stack([counts, 0.5 * counts, 0.4 * counts], axis=-2)
    scores = CaseScores(("a",), (), (subjects,), (np.zeros((1, 0, 3)),), (table,))
    assert np.isfinite(Bootstrap(scores, n_replicates=50).ace("a").noise_limit) == known


def test_the_interval_of_one_repeat_has_the_width_of_the_standard_error() -> None:
    values = np.random.default_rng(1).normal(size=400)
    subjects = (tuple(f"s{k}" for k in range(400)),)
    estimate = Bootstrap(CaseScores(("a",), ("nll",), subjects, (values[None, None],)), seed=2).estimate("a", "nll")
    expected = 2 * 1.96 * values.std() / np.sqrt(400)
    for interval in estimate.intervals.values():
        assert interval.high - interval.low == pytest.approx(expected, rel=0.1)


def everything(bootstrap: Bootstrap, pipeline: str) -> tuple[object, ...]:
    return (*(bootstrap.estimate(pipeline, column) for column in COLUMNS), bootstrap.ace(pipeline))


def test_a_seed_fixes_every_bit_and_another_seed_draws_other_cases() -> None:
    scores = draw_scores()
    assert everything(Bootstrap(scores, seed=4), "a") == everything(Bootstrap(scores, seed=4), "a")
    assert everything(Bootstrap(scores, seed=4), "a") != everything(Bootstrap(scores, seed=5), "a")


def test_other_pipelines_in_the_table_do_not_change_a_bit() -> None:
    scores = draw_scores()
    alone = CaseScores(
        ("b",), COLUMNS, SUBJECTS, tuple(v[1:2] for v in scores.values), tuple(t[1:2] for t in scores.tables)
    )
    assert everything(Bootstrap(alone), "b") == everything(Bootstrap(scores), "b")


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    scores = draw_scores()
    with threadpool_limits(1):
        one = everything(Bootstrap(scores), "c")
    with threadpool_limits(2):
        assert everything(Bootstrap(scores), "c") == one


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_comparison_is_paired_and_counts_the_improved_cases(better: str) -> None:
    scores = draw_scores()
    bootstrap = Bootstrap(scores, n_replicates=50, seed=1)
    found = bootstrap.compare("a", "b", "nll", better)  # type: ignore[arg-type]
    differences = [values[0, 0] - values[1, 0] for values in scores.values]
    pairs = np.concatenate(differences)
    smaller, larger = (pairs < 0).mean(), (pairs > 0).mean()
    assert (found.share_improved, found.share_worsened) == (
        (smaller, larger) if better == "lower" else (larger, smaller)
    )
    assert found.difference == pytest.approx(np.mean([d.mean() for d in differences]), abs=1e-12)
    assert found.n_pairs == pairs.size
    for scheme, resamples in bootstrap.resamples.items():
        looped = [loop_mean(cases_drawn(resamples, k), differences) for k in range(50)]
        expected = np.quantile(looped, [0.025, 0.975])
        assert (found.intervals[scheme].low, found.intervals[scheme].high) == pytest.approx(expected, abs=1e-10)


def test_pairing_removes_what_both_pipelines_share() -> None:
    """A constant gain on cases of very different difficulty: each interval is wide, that of the difference a point."""
    hard = np.random.default_rng(0).gamma(1.0, 10.0, size=30)
    subjects = (tuple(f"s{k}" for k in range(30)),)
    bootstrap = Bootstrap(CaseScores(("a", "b"), ("nll",), subjects, (np.stack([hard - 0.5, hard])[:, None],)))
    found = bootstrap.compare("a", "b", "nll", "lower")
    assert (found.share_improved, found.share_worsened) == (1, 0)
    for interval in found.intervals.values():
        assert (interval.low, interval.high) == pytest.approx((-0.5, -0.5), abs=1e-9)


def test_equal_cases_are_neither_improved_nor_worsened() -> None:
    found = Bootstrap(draw_scores(), n_replicates=10).compare("a", "a", "nll", "lower")
    assert (found.difference, found.share_improved, found.share_worsened) == (0, 0, 0)


def test_cases_undefined_for_either_pipeline_leave_the_comparison() -> None:
    found = Bootstrap(draw_scores(undefined=True), n_replicates=10).compare("a", "b", "dsc", "higher")
    assert found.n_pairs == sum(len(subjects) for subjects in SUBJECTS) - 2 * len(SUBJECTS)
    assert math.isfinite(found.difference)


def test_ace_differences_come_from_the_same_resamples_and_have_no_share_of_cases() -> None:
    scores = draw_scores()
    bootstrap = Bootstrap(scores, n_replicates=200)
    one, other = bootstrap.compare_ace("a", "b"), bootstrap.compare_ace("b", "a")
    expected = np.mean([pooled_ace(t[0].sum(axis=0)) - pooled_ace(t[1].sum(axis=0)) for t in scores.tables])
    assert one.difference == pytest.approx(expected, abs=1e-12)
    for scheme, interval in one.intervals.items():
        assert interval.low == pytest.approx(-other.intervals[scheme].high, abs=1e-12)
    assert math.isnan(one.share_improved)
    itself = bootstrap.compare_ace("a", "a").intervals["two_level"]
    assert (itself.low, itself.high) == (0, 0)


def test_a_column_undefined_everywhere_stays_undefined() -> None:
    values = tuple(np.full((1, 1, len(subjects)), math.nan) for subjects in SUBJECTS)
    estimate = Bootstrap(CaseScores(("a",), ("dsc",), SUBJECTS, values), n_replicates=10).estimate("a", "dsc")
    assert math.isnan(estimate.mean)
    assert all(math.isnan(interval.low) and math.isnan(interval.high) for interval in estimate.intervals.values())
    assert estimate.n_undefined == sum(len(subjects) for subjects in SUBJECTS)


def test_a_repeat_without_defined_values_is_left_out() -> None:
    scores = draw_scores()
    scores.values[0][:] = math.nan
    estimate = Bootstrap(scores, n_replicates=50).estimate("a", "nll")
    expected = np.mean([scores.values[1][0, 0].mean(), scores.values[2][0, 0].mean()])
    assert estimate.mean == pytest.approx(expected, abs=1e-12)
    assert math.isnan(estimate.by_repeat[0])
    assert math.isfinite(estimate.intervals["two_level"].low)


def test_wrong_calls_say_what_is_wrong() -> None:
    scores = draw_scores()
    bootstrap = Bootstrap(scores, n_replicates=5)
    with pytest.raises(ParameterError, match=r"ts\(z\).*a, b, c"):
        bootstrap.estimate("ts(z)", "nll")
    with pytest.raises(ParameterError, match="ece"):
        bootstrap.estimate("a", "ece")
    with pytest.raises(ParameterError, match="confidence level"):
        Bootstrap(scores, confidence_level=95)
    with pytest.raises(ParameterError, match="shape"):
        CaseScores(PIPELINES, COLUMNS, SUBJECTS, tuple(v[:2] for v in scores.values))
    without = CaseScores(PIPELINES, COLUMNS, SUBJECTS, scores.values)
    with pytest.raises(ParameterError, match="tables"):
        Bootstrap(without, n_replicates=5).ace("a")


def test_the_basic_interval_of_ace_ends_at_zero() -> None:
    basic = _reflect(0.01, Interval(0.004, 0.03))
    assert basic.low == 0.0
    assert basic.high == pytest.approx(0.016)
