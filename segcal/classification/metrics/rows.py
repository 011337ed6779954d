"""Labelled rows as metrics see them: checked probabilities, and what follows from them computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.errors import DataError

SUM_TOLERANCE = 1e-2
"""How far the probabilities of a row may be from summing to 1, as when rows are read."""

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Probabilities and labels of n rows.

    Attributes:
        probabilities: (n, C) float64.
        labels: (n,) int64 in [0, C).
    """

    probabilities: Floats
    labels: Whole

    @classmethod
    def of(cls, probabilities: ArrayLike, labels: ArrayLike) -> ScoredRows:
        """Check arrays or tensors that belong together.

        Raises:
            DataError: they have other shapes, or values for which every metric would be a plausible wrong number.
        """
        probs = np.asarray(probabilities, dtype=np.float64)
        truth = np.asarray(labels)
        if probs.ndim != 2 or probs.shape[1] < 2:
            raise DataError(f"Probabilities must have the shape (n, C) with C ≥ 2, got {probs.shape}.")
        if not len(probs):
            raise DataError("There is no row to measure: the arrays are empty.")
        _check_values(probs)
        _check_labels(truth, *probs.shape)
        return cls(probs, truth.astype(np.int64))

    @property
    def n_rows(self) -> int:
        return int(self.probabilities.shape[0])

    @property
    def n_classes(self) -> int:
        return int(self.probabilities.shape[1])

    @cached_property
    def prediction(self) -> Whole:
        """(n,) class of the largest probability, the first of equals."""
        return np.asarray(self.probabilities.argmax(axis=1), dtype=np.int64)

    @cached_property
    def confidence(self) -> Floats:
        """(n,) the largest probability, at most 1 (float noise in a sum may carry it over)."""
        return np.asarray(np.minimum(self.probabilities.max(axis=1), 1.0))

    @cached_property
    def hit(self) -> NDArray[np.bool_]:
        """(n,) whether the prediction is the label."""
        return np.asarray(self.prediction == self.labels)

    @cached_property
    def label_probability(self) -> Floats:
        """(n,) probability of the true class."""
        return np.asarray(self.probabilities[np.arange(self.n_rows), self.labels])


def _check_values(probs: Floats) -> None:
    low, high = float(probs.min()), float(probs.max())
    # Written so that NaN, which compares as false, is refused too.
    if not (low >= 0.0 and high <= 1.0 + 1e-3):
        raise DataError(
            f"Probabilities reach from {low:g} to {high:g}, expected 0 to 1; logits have to go through softmax first."
        )
    furthest = float(np.abs(probs.sum(axis=1) - 1.0).max())
    if not furthest <= SUM_TOLERANCE:
        raise DataError(f"The probabilities of a row sum to 1 only within {furthest:.3g}, expected {SUM_TOLERANCE:g}.")


def _check_labels(labels: NDArray[Any], n_rows: int, n_classes: int) -> None:
    if labels.shape != (n_rows,) or labels.dtype.kind not in "iu":
        raise DataError(f"Labels must be whole numbers of shape ({n_rows},), got {labels.dtype} {labels.shape}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= n_classes:
        raise DataError(f"Labels run from {low} to {high}; with {n_classes} classes expected 0 to {n_classes - 1}.")
