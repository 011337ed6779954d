"""scikit-learn's view of it: one class for all methods, at home in pipelines and searches."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

from segcal.classification.files import FittedMethod, fit, method_named
from segcal.classification.samples import Samples
from segcal.types import Kind


class ScoreCalibrator(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Calibrates the scores of a classifier: X holds one column of logits or probabilities per class.

    Args:
        method: a key of `segcal.classification.METHODS`.
        kind: what X holds, "logits" or "probabilities"; never guessed.
        classes: the label of every column, in the order of the columns. None: the sorted labels of y where there are as
            many as columns, otherwise 0 … C - 1 if y holds such numbers.
        seed: of everything that is drawn.
        settings: the method's own settings, as a dictionary.

    Attributes:
        classes_: (C,) label of every column.
        fitted_: the `FittedMethod`, with `save`.
        n_features_in_: C.

    Example:
        >>> calibrator = ScoreCalibrator("ts").fit(logits, y)  # doctest: +SKIP
        >>> calibrator.predict_proba(new_logits)  # doctest: +SKIP
    """

    classes_: NDArray[Any]
    fitted_: FittedMethod

    def __init__(
        self,
        method: str = "ts",
        kind: Kind = "logits",
        *,
        classes: ArrayLike | None = None,
        seed: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.kind = kind
        self.classes = classes
        self.seed = seed
        self.settings = settings

    def fit(self, X: ArrayLike, y: ArrayLike, features: ArrayLike | None = None) -> Self:
        """Fit on (n, C) scores and (n,) labels; (n, d) features for the methods that look at them."""
        method_named(self.method)
        scores, labels = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_features=2)
        check_classification_targets(labels)
        self.classes_ = self._column_labels(scores, labels)
        codes = np.searchsorted(self.classes_, labels, sorter=np.argsort(self.classes_))
        codes = np.argsort(self.classes_)[np.minimum(codes, len(self.classes_) - 1)]
        if (self.classes_[codes] != labels).any():
            strange = labels[self.classes_[codes] != labels][0]
            raise ValueError(f"y holds {strange!r}, which is none of the classes {self.classes_.tolist()}")
        samples = self._samples(scores, features, torch.as_tensor(codes.astype(np.int64), device="cpu"))
        names = [str(label) for label in self.classes_.tolist()]
        self.fitted_ = fit(self.method, samples, classes=names, seed=self.seed, **(self.settings or {}))
        return self

    def predict_proba(self, X: ArrayLike, features: ArrayLike | None = None) -> NDArray[np.float64]:
        """(n, C) calibrated probabilities, the columns as in `classes_`."""
        check_is_fitted(self)
        scores = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        result: NDArray[np.float64] = self.fitted_.probabilities(self._samples(scores, features)).numpy()
        return result

    def predict(self, X: ArrayLike, features: ArrayLike | None = None) -> NDArray[Any]:
        """(n,) the label with the largest calibrated probability, the first column of equals."""
        winners = self.predict_proba(X, features).argmax(1)
        result: NDArray[Any] = self.classes_[winners]
        return result

    def _samples(self, scores: NDArray[Any], features: ArrayLike | None, labels: torch.Tensor | None = None) -> Samples:
        given = None if features is None else torch.tensor(check_array(features, dtype=np.float32), device="cpu")
        return Samples.of(torch.tensor(scores, device="cpu"), labels, given, kind=self.kind)

    def _column_labels(self, scores: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
        n_columns = scores.shape[1]
        if self.classes is not None:
            named: NDArray[Any] = column_or_1d(self.classes)
            if len(named) != n_columns or len(np.unique(named)) != n_columns:
                raise ValueError(
                    f"classes must hold {n_columns} different labels, one per column of X; got {named.tolist()}"
                )
            return named
        found: NDArray[Any] = np.unique(labels)
        if len(found) == n_columns:
            return found
        whole = np.issubdtype(found.dtype, np.integer) or (
            np.issubdtype(found.dtype, np.floating) and bool((found == np.round(found)).all())
        )
        if whole and found[0] >= 0 and found[-1] < n_columns:
            return np.arange(n_columns).astype(found.dtype)
        raise ValueError(
            f"X has {n_columns} columns of scores, one per class, but y holds {len(found)} labels; give `classes`, the "
            "label of every column. X must be scores of a classifier, not its inputs."
        )
