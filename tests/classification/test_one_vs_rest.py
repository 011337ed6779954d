"""Platt, beta, isotonic and histogram against literal transcriptions, scipy and scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from scipy.special import expit, logit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator

from segcal.classification.beta import BetaCalibration
from segcal.classification.histogram import HistogramBinning
from segcal.classification.isotonic import IsotonicCalibration
from segcal.classification.one_vs_rest import RIDGE, log_complements, log_odds, normalised
from segcal.classification.platt import PlattScaling, Score
from segcal.classification.samples import Samples
from segcal.errors import ParameterError
from tests.classification.rows import draw_rows, nll

DATA, TEST = draw_rows(1500, 3), draw_rows(500, 3, seed=1)


class Scores(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A frozen classifier whose decision function is its input."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> Scores:
        self.classes_ = np.unique(y)
        return self

    def decision_function(self, x: np.ndarray) -> np.ndarray:
        return x

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x.argmax(1)


def scikit_learn(x: np.ndarray, y: np.ndarray, new: np.ndarray, method: str) -> np.ndarray:
    base = FrozenEstimator(Scores().fit(x, y))
    model = CalibratedClassifierCV(base, method=method, cv=2, ensemble=False).fit(x, y)
    found: np.ndarray = model.predict_proba(new)
    return found


@pytest.mark.parametrize(("score", "of"), [("log_odds", logit), ("log_probability", np.log)])
def test_platt_is_scikit_learns_sigmoid_on_the_same_score(score: Score, of: Callable[[np.ndarray], np.ndarray]) -> None:
    seen, new = (of(torch.softmax(part.logits, 1).numpy()) for part in (DATA, TEST))
    theirs = scikit_learn(seen, DATA.known_labels.numpy(), new, "sigmoid")
    np.testing.assert_allclose(PlattScaling.fit(DATA, score=score).probabilities(TEST).numpy(), theirs, atol=2e-4)


@pytest.mark.parametrize("n_classes", [2, 3, 60])
def test_platt_takes_the_score_with_the_lower_nll_and_the_file_says_which(n_classes: int) -> None:
    data = draw_rows(2000, n_classes)
    nlls = {
        score: nll(PlattScaling.fit(data, score=score).probabilities(data), data.known_labels)
        for score in get_args(Score)
    }
    made = PlattScaling.fit(data)
    assert made.score == min(nlls, key=nlls.__getitem__)
    assert made.values == {"score": made.score}
    again = PlattScaling.from_tensors(made.tensors())
    assert again.score == made.score
    assert torch.equal(again.probabilities(data), made.probabilities(data))


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("lenet5_cifar10", "log_odds"),
        ("wideresnet_cifar10", "log_odds"),
        ("wideresnet_cifar100", "log_probability"),
    ],
)
def test_the_score_platt_takes_is_the_better_one_on_rows_it_has_not_seen(
    classifiers: Path, name: str, score: Score
) -> None:
    found = np.load(classifiers / f"{name}.npz")
    rows = Samples.of(torch.tensor(found["probabilities"]), torch.tensor(found["labels"]), kind="probabilities")
    data, new = rows.rows(torch.arange(0, 10_000, 2)), rows.rows(torch.arange(1, 10_000, 2))
    made = PlattScaling.fit(data)
    assert made.score == score
    (other,) = set(get_args(Score)) - {score}
    chosen, left = (
        nll(each.probabilities(new), new.known_labels) for each in (made, PlattScaling.fit(data, score=other))
    )
    assert chosen < left - 0.002


def test_isotonic_without_floor_is_scikit_learns() -> None:
    probs, new = (torch.softmax(part.logits, 1).numpy() for part in (DATA, TEST))
    theirs = scikit_learn(probs, DATA.known_labels.numpy(), new, "isotonic")
    ours = IsotonicCalibration.fit(DATA, floor=0.0).probabilities(TEST).numpy()
    silent = ours.sum(1) != 0  # where every class says 0 scikit-learn takes 1/C, we leave the row uncalibrated
    np.testing.assert_allclose(ours[silent], theirs[silent], atol=1e-6)


def test_beta_is_the_constrained_optimum_scipy_finds() -> None:
    probs = torch.softmax(DATA.logits, 1).numpy()
    found = BetaCalibration.fit(DATA)
    for k in range(3):
        s, y = probs[:, k], DATA.known_labels.numpy() == k

        def loss(t: np.ndarray, s: np.ndarray = s, y: np.ndarray = y) -> float:
            q = expit(t[0] * np.log(s) - t[1] * np.log(1 - s) + t[2])
            ridge = RIDGE * ((t - np.array([1.0, 1.0, 0.0])) ** 2).sum()
            return float(-np.where(y, np.log(q), np.log1p(-q)).mean() + ridge)

        theirs = optimize.minimize(loss, [1.0, 1.0, 0.0], bounds=[(0, None), (0, None), (None, None)])
        ours = np.array([found.rise[k], found.fall[k], found.intercept[k]])
        assert loss(ours) <= theirs.fun + 1e-9
        np.testing.assert_allclose(ours, theirs.x, atol=2e-3)


def test_beta_never_falls_in_the_score_where_labels_say_so() -> None:
    """Labels against the score: the authors' refit could keep a negative weight, bounds cannot."""
    rng = np.random.default_rng(0)
    logits = torch.as_tensor(rng.normal(0, 2, (400, 2)))
    found = BetaCalibration.fit(Samples.of(logits, logits.argmin(1)))
    assert float(torch.minimum(found.rise, found.fall).min()) >= 0
    with pytest.raises(ParameterError, match="must be >= 0"):
        BetaCalibration.from_tensors({**found.tensors(), "a": torch.full_like(found.rise, -1.0)})


@pytest.mark.parametrize("binning", ["mass", "width"])
def test_histogram_counts_as_a_loop_does(binning: str) -> None:
    model = HistogramBinning.fit(DATA, bins=7, binning=binning, floor=0.0)
    probs, new = (torch.softmax(part.logits, 1).numpy() for part in (DATA, TEST))
    expected = np.empty_like(new)
    for k in range(3):
        ranked = np.sort(probs[:, k])
        if binning == "width":
            edges = [j / 7 for j in range(1, 7)]
        else:
            edges = [(ranked[round(j * 1500 / 7) - 1] + ranked[round(j * 1500 / 7)]) / 2 for j in range(1, 7)]
        for i, value in enumerate(new[:, k]):
            bin_of = sum(value >= edge for edge in edges)
            low, high = [-np.inf, *edges][bin_of], [*edges, np.inf][bin_of]
            inside = (probs[:, k] >= low) & (probs[:, k] < high)
            expected[i, k] = (DATA.known_labels.numpy()[inside] == k).mean()
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(model.probabilities(TEST).numpy(), expected, atol=1e-12)


def test_an_empty_bin_of_equal_width_stands_for_its_centre() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    model = HistogramBinning.fit(Samples.of(logits, torch.tensor([0, 1])), bins=4, binning="width", floor=0.0)
    assert model.shares[0].tolist() == [0.125, 0.375, 0.5, 0.875]


def test_equal_scores_are_never_parted() -> None:
    logits = torch.cat([torch.zeros(50, 2, dtype=torch.float64), torch.tensor([[3.0, 0.0]] * 50, dtype=torch.float64)])
    labels = torch.cat([torch.arange(50) % 2, torch.zeros(50, dtype=torch.int64)])
    data = Samples.of(logits, labels)
    assert HistogramBinning.fit(data, bins=10, floor=0.0).probabilities(data)[0].tolist() == [0.5, 0.5]


def test_a_surprise_costs_a_finite_nll_with_the_rule_of_succession() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 4.0]], dtype=torch.float64).repeat(100, 1)
    data = Samples.of(logits, logits.argmax(1))
    for method in (IsotonicCalibration, HistogramBinning):
        assert float(method.fit(data).probabilities(data).min()) == pytest.approx(1 / 202)
        assert float(method.fit(data, floor=0.0).probabilities(data).min()) == 0.0


def test_a_row_in_which_every_class_says_no_stays_uncalibrated() -> None:
    scores = torch.tensor([[0.0, 0.0], [0.2, 0.6]], dtype=torch.float64)
    given = torch.tensor([[0.3, 0.7], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(normalised(scores, given), torch.tensor([[0.3, 0.7], [0.25, 0.75]], dtype=torch.float64))


@given(st.lists(st.floats(-300, 300), min_size=2, max_size=5))
def test_complements_are_exact_for_near_certain_rows(row: list[float]) -> None:
    log_p = torch.log_softmax(torch.tensor([row], dtype=torch.float64), 1)
    found = log_complements(log_p)
    for k in range(len(row)):
        others = torch.cat([log_p[0, :k], log_p[0, k + 1 :]])
        expected = max(float(torch.logsumexp(others, 0)), np.log(np.finfo(np.float32).tiny))
        assert float(found[0, k]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert bool(torch.isfinite(log_odds(log_p)).all())


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (HistogramBinning, {"bins": 0}),
        (HistogramBinning, {"binning": "x"}),
        (IsotonicCalibration, {"floor": 0.5}),
        (PlattScaling, {"score": "probability"}),
    ],
)
def test_settings_out_of_range_are_named(method: type, settings: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match=next(iter(settings))):
        method.fit(DATA, **settings)
