"""Metrics of rows: against slow transcriptions and scikit-learn, merged batches, and the traps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score, roc_curve

from segcal.classification.metrics import METRICS, OOD_METRICS, RowTables, ScoredRows, measure, measure_ood
from segcal.classification.metrics.binning import bin_index, equal_mass_edges
from segcal.classification.metrics.calibration import (
    debiased_error,
    expected_error,
    ks_error,
    label_binned_error,
    marginal_error,
    sweep_error,
)
from segcal.classification.metrics.ranking import aurc, ood_auroc, ood_fpr
from segcal.errors import DataError, ParameterError
from tests.classification import slow_metrics as slow

TOLERANCE = 1e-9


def drawn(seed: int, n: int, n_classes: int, *, sharpness: float = 2.0, digits: int | None = None) -> ScoredRows:
    """Rows whose confidence is higher than their accuracy; `digits` rounds, which makes ties."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, n_classes)) * sharpness
    true = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (true.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=n_classes - 1)
    sharp = true**1.5 / (true**1.5).sum(1, keepdims=True)
    if digits is not None:
        rest = np.floor(sharp[:, 1:] * 10**digits) / 10**digits
        sharp = np.column_stack([np.clip(1 - rest.sum(1), 0, 1), rest])
    return ScoredRows.of(sharp, labels)


def as_rows(rows: ScoredRows) -> list[slow.Row]:
    return [([float(p) for p in probs], int(y)) for probs, y in zip(rows.probabilities, rows.labels, strict=True)]


CASES = {
    "binary": drawn(0, 60, 2),
    "ten classes": drawn(1, 300, 10),
    "ties": drawn(2, 200, 4, digits=1),
    "many classes, few rows": drawn(3, 20, 50),
    "one row": drawn(4, 1, 3),
    "two rows": drawn(5, 2, 3),
    "constant scores": ScoredRows.of(np.full((30, 4), 0.25), np.arange(30) % 4),
    "certain and right": ScoredRows.of(np.eye(3)[np.arange(12) % 3], np.arange(12) % 3),
    "certain and wrong": ScoredRows.of(np.eye(3)[np.arange(12) % 3], (np.arange(12) + 1) % 3),
    "one label only": ScoredRows.of(drawn(6, 80, 3).probabilities, np.zeros(80, dtype=np.int64)),
    "duplicated rows": ScoredRows.of(
        np.repeat(drawn(7, 9, 3).probabilities, 5, axis=0), np.repeat(drawn(7, 9, 3).labels, 5)
    ),
}


def reference(rows: ScoredRows, n_bins: int) -> dict[str, float]:
    plain = as_rows(rows)
    top = slow.top_label(plain)
    width, mass = slow.width_bins(top, n_bins), slow.mass_bins(top, n_bins)
    return {
        "accuracy": slow.accuracy(plain),
        "nll": slow.nll(plain),
        "brier": slow.brier(plain),
        "ece": slow.ece_bin(width, 1),
        "ece_2": slow.ece_bin(width, 2),
        "mce": slow.mce(width),
        "ace": slow.ace(width),
        "classwise_ece": slow.classwise_ece(plain, n_bins),
        "ecce": slow.ecce(plain, n_bins),
        "ecce_max": slow.ecce_max(plain, n_bins),
        "adaptive_ece": slow.ece_bin(mass, 1),
        "adaptive_ece_2": slow.ece_bin(mass, 2),
        "ece_lb": slow.ece_lb(width, 1),
        "ece_lb_2": slow.ece_lb(width, 2),
        "debiased_ce": slow.debiased_2(mass),
        "marginal_ce": slow.marginal_2(plain, n_bins),
        "sweep_ce": slow.sweep(top, 2),
        "ks_error": slow.ks(top),
        "aurc": slow.aurc(top),
        "e_aurc": slow.e_aurc(top),
    }


@pytest.mark.parametrize("n_bins", [1, 7, 15])
@pytest.mark.parametrize("case", CASES)
def test_every_metric_agrees_with_its_transcription(case: str, n_bins: int) -> None:
    found = measure(CASES[case], n_bins=n_bins)
    expected = reference(CASES[case], n_bins)

    assert set(found) == set(METRICS) == set(expected)
    for name, value in found.items():
        assert math.isfinite(value), name
        # A square root near 0 turns a rounding of 1e-18 into 1e-9; what is compared there is its square.
        if name in ("debiased_ce", "marginal_ce", "ece_2", "ece_lb_2", "adaptive_ece_2", "sweep_ce"):
            assert value**2 == pytest.approx(expected[name] ** 2, abs=TOLERANCE), name
            assert value == pytest.approx(expected[name], abs=1e-6), name
        else:
            assert value == pytest.approx(expected[name], abs=TOLERANCE), name


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("binning", ["width", "mass"])
def test_binned_errors_of_any_order_agree_and_label_binning_is_never_below(binning: str, p: float) -> None:
    rows = drawn(11, 250, 5, digits=2)
    top = slow.top_label(as_rows(rows))
    bins = slow.width_bins(top, 12) if binning == "width" else slow.mass_bins(top, 12)

    plain = expected_error(rows.confidence, rows.hit, n_bins=12, p=p, binning=binning)  # type: ignore[arg-type]
    labelled = label_binned_error(rows.confidence, rows.hit, n_bins=12, p=p, binning=binning)  # type: ignore[arg-type]

    assert plain == pytest.approx(slow.ece_bin(bins, p), abs=TOLERANCE)
    assert labelled == pytest.approx(slow.ece_lb(bins, p), abs=TOLERANCE)
    assert labelled >= plain - TOLERANCE  # Jensen (SOFT, after eq. 7)


def test_proper_scores_and_accuracy_agree_with_scikit_learn() -> None:
    rows, binary = drawn(20, 500, 4), drawn(21, 400, 2)
    found = measure(rows, ["nll", "brier"])
    assert found["nll"] == pytest.approx(log_loss(rows.labels, rows.probabilities, labels=range(4)), abs=TOLERANCE)
    assert found["brier"] == pytest.approx(
        brier_score_loss(rows.labels, rows.probabilities, labels=range(4), scale_by_half=False), abs=TOLERANCE
    )
    once = brier_score_loss(binary.labels, binary.probabilities[:, 1])  # of one class; ours counts both
    assert measure(binary, ["brier"])["brier"] == pytest.approx(2 * once, abs=TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(2, 200), n_classes=st.integers(2, 6), cuts=st.lists(st.integers(1, 199))
)
def test_batches_in_any_cut_and_order_add_up_to_the_same_bits(
    seed: int, n: int, n_classes: int, cuts: list[int]
) -> None:
    rows = drawn(seed, n, n_classes)
    edges = sorted({0, n, *(cut for cut in cuts if cut < n)})
    order = np.random.default_rng(seed).permutation(n)
    parts = [order[low:high] for low, high in itertools.pairwise(edges)]
    merged = RowTables.of(ScoredRows.of(rows.probabilities[parts[0]], rows.labels[parts[0]]))
    for part in parts[1:]:
        merged = merged + RowTables.of(ScoredRows.of(rows.probabilities[part], rows.labels[part]))

    assert merged.values() == RowTables.of(rows).values()  # equal, not close
    assert set(merged.values()) == {name for name, metric in METRICS.items() if metric.additive}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 80))
def test_no_metric_depends_on_the_order_of_rows(seed: int, n: int) -> None:
    rows = drawn(seed, n, 3, digits=1)
    order = np.random.default_rng(seed + 1).permutation(n)
    turned = ScoredRows.of(rows.probabilities[order], rows.labels[order])
    for name, value in measure(rows).items():
        assert measure(turned, [name])[name] == pytest.approx(value, abs=1e-12), name


def test_a_perfect_classifier_has_no_error_and_a_certain_wrong_one_all_of_it() -> None:
    right, wrong = measure(CASES["certain and right"]), measure(CASES["certain and wrong"])
    for name in ("nll", "brier", "ece", "mce", "classwise_ece", "ecce", "debiased_ce", "sweep_ce", "ks_error", "aurc"):
        assert right[name] == 0.0, name
    assert right["accuracy"] == 1.0
    assert wrong["accuracy"] == 0.0
    for name in ("ece", "ece_2", "mce", "ace", "ks_error", "aurc"):
        assert wrong[name] == 1.0, name
    assert wrong["e_aurc"] == 0.0  # the limit of the best ranking at error rate 1 is 1 as well
    assert wrong["nll"] == pytest.approx(126 * math.log(2), abs=TOLERANCE)  # floored, finite
    assert RowTables.of(CASES["certain and wrong"]).n_floored == 12


def test_confidence_one_lies_in_the_last_bin_and_a_touch_above_one_counts_as_one() -> None:
    assert bin_index(np.array([0.0, 0.1, 0.999, 1.0]), 10).tolist() == [0, 1, 9, 9]
    above = ScoredRows.of(np.array([[1.0 + 1e-9, 0.0], [0.25, 0.75]]), np.array([0, 1]))
    assert above.confidence.tolist() == [1.0, 0.75]
    assert measure(above)["ece"] == pytest.approx(0.125)


def test_equal_mass_bins_never_tear_equal_scores_apart() -> None:
    scores = np.array([0.2, 0.5, 0.5, 0.5, 0.5, 0.9])
    index = bin_index(scores, 3, "mass")
    assert len(set(index[1:5])) == 1
    assert len(equal_mass_edges(np.full(10, 0.3), 5)) == 1
    assert np.bincount(bin_index(np.linspace(0, 1, 20), 6, "mass")).tolist() == [4, 4, 3, 3, 3, 3]


def test_debiasing_takes_the_noise_of_a_calibrated_classifier_away() -> None:
    rng = np.random.default_rng(3)
    scores = rng.uniform(0.5, 1.0, size=(200, 400))
    hits = rng.random(scores.shape) < scores
    plain = [expected_error(s, h, p=2.0, binning="mass") ** 2 for s, h in zip(scores, hits, strict=True)]
    found = [debiased_error(s, h) ** 2 for s, h in zip(scores, hits, strict=True)]
    assert np.mean(found) < 0.5 * np.mean(plain)
    first = [debiased_error(s, h, p=1.0) for s, h in zip(scores[:60], hits[:60], strict=True)]
    plain_first = [expected_error(s, h, binning="mass") for s, h in zip(scores[:60], hits[:60], strict=True)]
    assert np.mean(first) < 0.8 * np.mean(plain_first)  # near 0 the correction of order 1 takes only a part away


def test_the_debiased_error_of_general_order_is_twice_plain_minus_resampled() -> None:
    rows = drawn(31, 300, 3)
    found = debiased_error(rows.confidence, rows.hit, p=1.0, n_bins=5, n_resamples=4000, seed=1)
    bins = slow.mass_bins(slow.top_label(as_rows(rows)), 5)
    rng = np.random.default_rng(99)
    resampled = []
    for _ in range(4000):
        total = 0.0
        for part in bins:
            y, n = slow.frequency(part), len(part)
            total += n / rows.n_rows * abs(rng.normal(y, math.sqrt(y * (1 - y) / n)) - slow.mean_score(part))
        resampled.append(total)
    assert found == pytest.approx(2 * slow.ece_bin(bins, 1) - np.mean(resampled), abs=2e-3)
    assert debiased_error(rows.confidence, rows.hit, p=1.0, seed=5) == debiased_error(
        rows.confidence, rows.hit, p=1.0, seed=5
    )


def test_aurc_is_the_harmonic_form_of_the_population_estimator() -> None:
    rng = np.random.default_rng(8)
    confidence, losses = rng.permutation(50) / 50.0, rng.random(50)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, 51))])
    ascending = losses[np.argsort(confidence)]
    weights = [harmonic[50] - harmonic[50 - r] for r in range(1, 51)]
    assert aurc(confidence, losses) == pytest.approx(float(np.mean(weights * ascending)), abs=1e-12)


@pytest.mark.parametrize("digits", [12, 1])
def test_out_of_distribution_metrics_agree_with_scikit_learn_and_the_definition(digits: int) -> None:
    rng = np.random.default_rng(4)
    known, foreign = np.round(rng.beta(6, 2, 300), digits), np.round(rng.beta(3, 3, 120), digits)
    confidence = np.concatenate([known, foreign])
    ood = np.arange(420) >= 300
    found = measure_ood(confidence, ood)

    assert set(found) == set(OOD_METRICS)
    assert found["ood_auroc"] == pytest.approx(roc_auc_score(ood, -confidence), abs=1e-12)
    assert found["ood_auroc"] == pytest.approx(slow.auroc(known.tolist(), foreign.tolist()), abs=1e-12)
    fpr, tpr, _ = roc_curve(ood, -confidence, drop_intermediate=False)
    assert found["ood_fpr95"] == pytest.approx(fpr[np.argmax(tpr >= 0.95)], abs=1e-12)
    assert found["ood_fpr95"] == slow.fpr(known.tolist(), foreign.tolist(), 0.95)


def test_out_of_distribution_metrics_of_one_kind_of_row_do_not_exist() -> None:
    for ood in (np.zeros(5, dtype=bool), np.ones(5, dtype=bool)):
        assert math.isnan(ood_auroc(np.linspace(0, 1, 5), ood))
        assert math.isnan(ood_fpr(np.linspace(0, 1, 5), ood))


def test_the_sweep_ends_at_a_rows_limit_and_one_bin_remains_when_two_fail() -> None:
    scores = np.linspace(0.5, 1.0, 50)
    falling = scores < 0.75
    assert sweep_error(scores, falling, p=1.0) == pytest.approx(abs(scores.mean() - falling.mean()))
    rising = scores > 0.75
    assert sweep_error(scores, rising, p=1.0) == pytest.approx(slow.sweep(list(zip(scores, rising, strict=True)), 1))


def test_ks_error_of_a_constant_score_is_the_distance_from_the_accuracy() -> None:
    assert ks_error(np.full(10, 0.8), np.arange(10) < 6) == pytest.approx(0.2)


def test_many_classes_and_tensors_are_taken() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(1000, 0.05), size=50)
    found = measure(ScoredRows.of(torch.from_numpy(probs), torch.arange(50)))
    assert all(math.isfinite(value) for value in found.values())


def test_missing_classes_count_in_the_marginal_error_with_their_own_probability() -> None:
    rows = ScoredRows.of(np.tile([0.5, 0.3, 0.2], (40, 1)), np.zeros(40, dtype=np.int64))
    assert marginal_error(rows) == pytest.approx(math.sqrt((0.25 + 0.09 + 0.04) / 3), abs=1e-9)


@pytest.mark.parametrize(
    ("probabilities", "labels", "words"),
    [
        (np.zeros((0, 3)), np.zeros(0, dtype=int), "empty"),
        (np.ones((4, 1)), np.zeros(4, dtype=int), "C ≥ 2"),
        (np.array([[2.0, -1.0]]), np.array([0]), "softmax"),
        (np.array([[np.nan, 0.5]]), np.array([0]), "expected 0 to 1"),
        (np.array([[0.2, 0.2]]), np.array([0]), "sum to 1"),
        (np.array([[0.5, 0.5]]), np.array([2]), "expected 0 to 1"),
        (np.array([[0.5, 0.5]]), np.array([-1]), "expected 0 to 1"),
        (np.array([[0.5, 0.5]]), np.array([0.0]), "whole numbers"),
        (np.array([[0.5, 0.5]]), np.array([0, 1]), "whole numbers"),
    ],
)
def test_rows_that_would_give_a_plausible_wrong_number_are_refused(
    probabilities: np.ndarray, labels: np.ndarray, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        ScoredRows.of(probabilities, labels)


def test_wrong_parameters_are_refused() -> None:
    rows = CASES["binary"]
    with pytest.raises(ParameterError, match="no metric 'ec'"):
        measure(rows, ["ec"])
    with pytest.raises(ParameterError, match="order p"):
        expected_error(rows.confidence, rows.hit, p=0.5)
    with pytest.raises(ParameterError, match="bins"):
        measure(rows, n_bins=0)
    with pytest.raises(ParameterError, match="cannot be added"):
        RowTables.of(rows) + RowTables.of(rows, n_bins=10)
