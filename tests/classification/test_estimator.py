"""ScoreCalibrator among scikit-learn's estimators."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from segcal.classification import METHODS, ScoreCalibrator, load
from segcal.errors import UsageError
from tests.classification.rows import draw_rows

NOT_SCORES = "X holds arbitrary inputs with fewer columns than y has labels; here a column is the score of a class"
EXPECTED_FAILURES = {
    "check_estimators_overwrite_params": NOT_SCORES,
    "check_estimators_fit_returns_self": NOT_SCORES,
    "check_readonly_memmap_input": NOT_SCORES,
    "check_classifiers_classes": NOT_SCORES,
    "check_classifiers_train": "asks for accuracy on inputs that are no scores: calibration learns no classifier",
    "check_classifiers_one_label": "y holds one label but X the scores of several classes, and ts keeps their decision",
}


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [ScoreCalibrator()], expected_failed_checks=lambda estimator: EXPECTED_FAILURES, xfail_strict=True
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks_pass(estimator: Any, check: Any) -> None:
    check(estimator)


def arrays(n_features: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    data = draw_rows(400, 3, n_features=n_features)
    return data.logits.numpy(), data.known_labels.numpy(), None if data.features is None else data.features.numpy()


@pytest.mark.parametrize("method", ["ts", "dc", "isotonic", "meta_mis", "kcal"])
def test_it_gives_what_the_method_gives(method: str) -> None:
    x, y, features = arrays(5)
    settings = {"dc": {"trials": 2}, "kcal": {"steps": 20}}.get(method, {})
    given = features if METHODS[method].needs_features else None
    made = ScoreCalibrator(method, seed=3, settings=settings).fit(x, y, given)
    alone = METHODS[method].fit(draw_rows(400, 3, n_features=5), seed=3, **settings)
    expected = alone.probabilities(draw_rows(400, 3, n_features=5)).numpy()
    np.testing.assert_array_equal(made.predict_proba(x, given), expected)
    np.testing.assert_array_equal(made.predict(x, given), expected.argmax(1))


def test_labels_may_be_words_in_the_order_of_the_columns() -> None:
    x, y, _ = arrays()
    names = np.array(["cat", "dog", "ape"])
    made = ScoreCalibrator(classes=names).fit(x, names[y])
    assert made.classes_.tolist() == ["cat", "dog", "ape"]
    assert set(made.predict(x)) <= set(names)
    np.testing.assert_allclose(made.predict_proba(x), ScoreCalibrator().fit(x, y).predict_proba(x))
    assert made.fitted_.info.classes == ("cat", "dog", "ape")


def test_a_class_without_rows_keeps_its_column() -> None:
    x, y, _ = arrays()
    made = ScoreCalibrator("platt").fit(x, np.where(y == 2, 0, y))
    assert made.classes_.tolist() == [0, 1, 2]
    assert made.predict_proba(x).shape == (400, 3)


def test_labels_that_fit_no_column_are_refused_with_the_way_out() -> None:
    x, y, _ = arrays()
    with pytest.raises(ValueError, match="give `classes`"):
        ScoreCalibrator().fit(x, np.array(["a", "b"])[np.minimum(y, 1)])
    with pytest.raises(ValueError, match="none of the classes"):
        ScoreCalibrator(classes=[0, 1, 5]).fit(x, y)
    with pytest.raises(ValueError, match="3 different labels"):
        ScoreCalibrator(classes=[0, 1]).fit(x, y)
    with pytest.raises(UsageError, match="did you mean `isotonic`"):
        ScoreCalibrator("isotonik").fit(x, y)


def test_it_can_be_cloned_searched_pickled_and_saved(tmp_path: Path) -> None:
    x, y, _ = arrays()
    search = GridSearchCV(ScoreCalibrator(), {"method": ["identity", "ts"]}, scoring="neg_log_loss", cv=3).fit(x, y)
    assert search.best_params_ == {"method": "ts"}
    made = clone(search.best_estimator_).fit(x, y)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.predict_proba(x), made.predict_proba(x))
    made.fitted_.save(tmp_path / "c.safetensors")
    found = load(tmp_path / "c.safetensors").probabilities(draw_rows(400, 3))
    np.testing.assert_array_equal(found.numpy(), made.predict_proba(x))


def test_kind_probabilities_takes_probabilities() -> None:
    x, y, _ = arrays()
    probs = torch.softmax(torch.as_tensor(x), 1).numpy()
    np.testing.assert_allclose(
        ScoreCalibrator("ts", "probabilities").fit(probs, y).predict_proba(probs),
        ScoreCalibrator("ts").fit(x, y).predict_proba(x),
        atol=1e-6,
    )
