"""Intervals over rows: the draws, agreement with plain resampling, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.classification import resampling
from segcal.classification.intervals import COMPARED, RowBootstrap
from segcal.classification.metrics import METRICS, ScoredRows, measure
from segcal.classification.resampling import ERRORS, MEANS, Draws, Units, replicate
from segcal.errors import ParameterError
from segcal.evaluation.summary import BootstrapSettings


def drawn(seed: int, n: int, n_classes: int = 4, sharpen: float = 1.6) -> ScoredRows:
    rng = np.random.default_rng(seed)
    true = rng.dirichlet(np.full(n_classes, 0.6), size=n)
    labels = (true.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=n_classes - 1)
    sharp = np.maximum(true, 1e-9) ** sharpen
    return ScoredRows.of(sharp / sharp.sum(1, keepdims=True), labels)


def one_draw(units: Units, counts: np.ndarray) -> Draws:
    return Draws.from_weights(units, counts[:, None].astype(np.float64))


@pytest.mark.parametrize("n_classes", [2, 5])
def test_a_replicate_is_the_metric_of_the_drawn_rows(n_classes: int) -> None:
    """Rows repeated as often as they were drawn, measured plainly; equal-mass bins apart, whose edges stay."""
    rows = drawn(1, 150, n_classes)
    units = Units.of(rows.n_rows, None, seed=0)
    rng = np.random.default_rng(5)
    counts = np.bincount(rng.integers(0, 150, 150), minlength=150)
    before = np.roll(rows.prediction, 1)

    found = replicate(rows, before, one_draw(units, counts), n_bins=15).values

    index = np.repeat(np.arange(150), counts)
    expected = measure(ScoredRows.of(rows.probabilities[index], rows.labels[index]))
    expected["flip"] = float((rows.prediction != before)[index].mean())
    assert set(found) == {*MEANS, *ERRORS} - {"debiased_ce"}
    for name, value in found.items():
        if name not in ("adaptive_ece", "adaptive_ece_2"):
            assert value[0] == pytest.approx(expected[name], abs=1e-9), name


def test_every_unit_drawn_once_gives_the_value_on_all_rows() -> None:
    rows = drawn(2, 400)
    units = Units.of(rows.n_rows, np.arange(400) // 7, seed=0)
    found = replicate(rows, rows.prediction, one_draw(units, np.ones(units.n_units)), n_bins=15).values
    expected = {**measure(rows), "flip": 0.0}
    for name, value in found.items():
        assert value[0] == pytest.approx(expected[name], abs=1e-9), name


def test_noise_of_a_calibrated_table_is_zero_when_nothing_is_resampled() -> None:
    rows = drawn(3, 300)
    units = Units.of(rows.n_rows, None, seed=0)
    noise = replicate(rows, rows.prediction, one_draw(units, np.ones(300)), n_bins=15).noise
    assert set(noise) == set(ERRORS)
    assert all(value[0] == pytest.approx(0.0, abs=1e-7) for value in noise.values())


def test_noise_of_a_bin_of_few_rows_is_not_understated() -> None:
    """Its variance is that of the rows, divided by n - 1: on average that of new rows."""
    confidence, hits = np.full(5, 0.5), np.array([True, False, True, True, False])
    units = Units.of(5, None, seed=0)
    draws = Draws.of(units, n_replicates=40_000, seed=0)
    _, _, noise = resampling.drawn_table(np.zeros(5, dtype=np.int64), confidence, hits, draws, 1)
    assert noise.var() == pytest.approx(5 * hits.var(ddof=1), rel=0.03)


def test_subjects_stay_together_also_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "MAX_UNITS", 10)
    subjects = np.random.default_rng(0).integers(0, 35, 500)
    units = Units.of(500, subjects, seed=4)
    assert (units.what, units.n_independent, units.n_units) == ("subjects", len(np.unique(subjects)), 10)
    assert all(len(set(units.index[subjects == s])) == 1 for s in np.unique(subjects))
    sizes = [len(np.unique(subjects[units.index == u])) for u in range(10)]
    assert max(sizes) - min(sizes) <= 1
    assert Units.of(500, subjects, seed=5).index.tolist() != units.index.tolist()


def test_blocks_of_rows_give_the_intervals_of_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn(6, 1800)
    how = BootstrapSettings(n_replicates=2000)
    single = RowBootstrap({"a": rows}, "a", None, n_bins=15, how=how)
    monkeypatch.setattr(resampling, "MAX_UNITS", 600)
    blocks = RowBootstrap({"a": rows}, "a", None, n_bins=15, how=how)
    assert blocks.units.n_units == 600
    for metric in ("nll", "brier", "accuracy", "ece", "classwise_ece"):
        one, two = (b.estimate("a", metric) for b in (single, blocks))
        assert one["mean"] == two["mean"]
        assert two["high"] - two["low"] == pytest.approx(one["high"] - one["low"], rel=0.12), metric


def test_intervals_agree_with_the_normal_approximation_of_a_mean() -> None:
    rows = drawn(7, 5000)
    found = RowBootstrap({"a": rows}, "a", None, n_bins=15, how=BootstrapSettings()).estimate("a", "nll")
    losses = -np.log(rows.label_probability)
    half = 1.96 * losses.std() / np.sqrt(len(losses))
    assert found["low"] == pytest.approx(losses.mean() - half, abs=0.12 * half)
    assert found["high"] == pytest.approx(losses.mean() + half, abs=0.12 * half)


def test_the_same_seed_gives_the_same_bits_and_other_pipelines_change_nothing() -> None:
    rows, other = drawn(8, 500), drawn(9, 500, sharpen=1.0)
    how = BootstrapSettings(n_replicates=200, seed=3)
    alone = RowBootstrap({"a": rows}, "a", None, n_bins=15, how=how)
    among = RowBootstrap(
        {"a": rows, "b": ScoredRows.of(other.probabilities, rows.labels)}, "a", None, n_bins=15, how=how
    )
    for metric in METRICS:
        assert alone.estimate("a", metric) == among.estimate("a", metric)
    changed = RowBootstrap({"a": rows}, "a", None, n_bins=15, how=BootstrapSettings(n_replicates=200, seed=4))
    assert changed.estimate("a", "nll") != alone.estimate("a", "nll")


def test_correlated_rows_of_a_subject_widen_the_interval() -> None:
    few = drawn(10, 60)
    rows = ScoredRows.of(np.repeat(few.probabilities, 20, axis=0), np.repeat(few.labels, 20))
    subjects = np.repeat(np.arange(60), 20)
    how = BootstrapSettings(n_replicates=500)
    by_row = RowBootstrap({"a": rows}, "a", None, n_bins=15, how=how).estimate("a", "nll")
    by_subject = RowBootstrap({"a": rows}, "a", subjects, n_bins=15, how=how).estimate("a", "nll")
    assert by_subject["high"] - by_subject["low"] > 3 * (by_row["high"] - by_row["low"])


def test_a_paired_difference_is_tighter_than_the_two_intervals_and_equal_pipelines_do_not_differ() -> None:
    rows = drawn(11, 800)
    softer = ScoredRows.of(rows.probabilities * 0.98 + 0.02 / 4, rows.labels)
    drawn_all = RowBootstrap({"a": rows, "b": softer, "c": rows}, "a", None, n_bins=15, how=BootstrapSettings())
    for metric in COMPARED:
        same = drawn_all.compare("c", "a", metric)
        assert (same["difference"], same["low"], same["high"]) == (0.0, 0.0, 0.0)
    found, alone = drawn_all.compare("b", "a", "nll"), drawn_all.estimate("b", "nll")
    assert found["low"] < found["difference"] < found["high"]
    assert found["high"] - found["low"] < 0.5 * (alone["high"] - alone["low"])
    assert found["share_improved"] + found["share_worsened"] == pytest.approx(1.0)
    assert drawn_all.compare("b", "a", "ece")["share_improved"] is None


def test_a_calibrated_pipeline_lies_below_its_noise_limit_and_an_overconfident_one_above() -> None:
    calibrated, sharp = drawn(12, 3000, sharpen=1.0), drawn(12, 3000, sharpen=2.5)
    found = RowBootstrap({"a": calibrated, "b": sharp}, "a", None, n_bins=15, how=BootstrapSettings())
    good, bad = found.estimate("a", "ece"), found.estimate("b", "ece")
    assert good["mean"] <= good["noise_limit"]
    assert bad["mean"] > 3 * bad["noise_limit"]
    assert bad["low"] < bad["mean"] < bad["high"]


@pytest.mark.parametrize("how", [BootstrapSettings(n_replicates=0), BootstrapSettings(confidence_level=1.0)])
def test_wrong_settings_are_refused(how: BootstrapSettings) -> None:
    rows = drawn(13, 20)
    with pytest.raises(ParameterError, match="at least 1"):
        RowBootstrap({"a": rows}, "a", None, n_bins=15, how=how)
