"""Rows of a classifier: scores, and whatever else is known of every row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from segcal.errors import DataError
from segcal.types import Kind

SMALLEST_PROBABILITY = torch.finfo(torch.float32).tiny
"""Where a probability of exactly 0 is taken to lie: the smallest normal float32, as when members are pooled."""
LARGEST_LOGIT = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Scores of n rows, checked.

    Attributes:
        logits: (n, C) float64; natural logarithms of the probabilities where those were given.
        labels: (n,) int64 in [0, C), None where a method is only applied.
        features: (n, d) float32 of the penultimate layer, None where there are none.
        kind: what was given; methods that are not translation-invariant must see the same kind again.
    """

    logits: Tensor
    labels: Tensor | None = None
    features: Tensor | None = None
    kind: Kind = "logits"

    @classmethod
    def of(
        cls, scores: Tensor, labels: Tensor | None = None, features: Tensor | None = None, *, kind: Kind = "logits"
    ) -> Samples:
        """Check the arrays that belong together.

        Args:
            scores: (n, C) logits or probabilities, C ≥ 2, floating point and finite.
            labels: (n,) whole numbers in [0, C).
            features: (n, d), finite.
            kind: which of the two the scores are; never guessed.

        Raises:
            DataError: a shape, a type or a value no calibration can start from; the message says which.
        """
        n_rows, n_classes = _checked_scores(scores, kind)
        if labels is not None:
            _check_labels(labels, n_rows, n_classes)
            labels = labels.to(torch.int64)
        if features is not None:
            _check_features(features, n_rows)
            features = features.to(torch.float32)
        return cls(_as_logits(scores, kind), labels, features, kind)

    @property
    def n_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def n_classes(self) -> int:
        return self.logits.shape[1]

    @property
    def decision(self) -> Tensor:
        """(n,) int64: the class with the largest score, the first of equals."""
        return self.logits.argmax(1)

    @property
    def known_labels(self) -> Tensor:
        """The labels of rows that must have some."""
        if self.labels is None:
            raise DataError("These rows have no labels; a fit and an evaluation need one per row.")
        return self.labels

    @property
    def known_features(self) -> Tensor:
        """The features of rows that must have some."""
        if self.features is None:
            raise DataError(
                "This method looks at the features of the penultimate layer, (n, d), but none were given; "
                "add the key `features` to the data, or choose a method that works on scores alone."
            )
        return self.features

    def rows(self, chosen: Tensor) -> Samples:
        """Some of the rows, by index or mask."""
        return replace(
            self,
            logits=self.logits[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            features=None if self.features is None else self.features[chosen],
        )


def _checked_scores(scores: Tensor, kind: Kind) -> tuple[int, int]:
    if scores.ndim != 2 or scores.shape[1] < 2 or not scores.is_floating_point():
        raise DataError(
            f"Scores must be floating point of shape (n, C) with C ≥ 2, got {scores.dtype} of shape "
            f"{tuple(scores.shape)}. A column of one probability p becomes two: 1 - p and p."
        )
    finite = torch.isfinite(scores).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise DataError(f"Row {bad} of the {kind} holds NaN or infinity ({int((~finite).sum())} such rows).")
    if kind == "probabilities":
        _check_probabilities(scores)
    elif scores.numel() and float(scores.abs().max()) > LARGEST_LOGIT:
        bad = int((scores.abs() > LARGEST_LOGIT).any(1).nonzero()[0])
        raise DataError(
            f"Row {bad} of the logits holds {float(scores[bad].abs().max()):.2g}, more than float32 can; no classifier "
            "puts out such a number. A class that is ruled out may have -1e9."
        )
    return scores.shape[0], scores.shape[1]


def _check_probabilities(scores: Tensor) -> None:
    sums = scores.to(torch.float64).sum(1)
    low, high = (float(scores.min()), float(scores.max())) if scores.numel() else (0.0, 1.0)
    apart = float((sums - 1).abs().max()) if scores.numel() else 0.0
    if low < 0 or high > 1 + 1e-3 or apart > 1e-2:
        raise DataError(
            f"Probabilities must lie in [0, 1] and sum to 1; found {low:.4g} to {high:.4g}, sums off by {apart:.2g}. "
            "If these are logits, say so (key `logits`); if only the sums are off, divide every row by its own."
        )


def _check_labels(labels: Tensor, n_rows: int, n_classes: int) -> None:
    if labels.shape != (n_rows,) or labels.is_floating_point() or labels.dtype == torch.bool:
        hint = ""
        if labels.ndim == 2:
            hint = " Take the one column." if labels.shape[1] == 1 else " One-hot labels become numbers by argmax(1)."
        raise DataError(
            f"Labels must be whole numbers of shape ({n_rows},), got {labels.dtype} of shape {tuple(labels.shape)}."
            f"{hint}"
        )
    if n_rows and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        raise DataError(
            f"Labels run from {int(labels.min())} to {int(labels.max())}, but there are {n_classes} scores: "
            f"expected 0 to {n_classes - 1}."
        )


def _check_features(features: Tensor, n_rows: int) -> None:
    shaped = features.ndim == 2 and features.shape[0] == n_rows and features.shape[1] > 0
    if not shaped or not features.is_floating_point():
        raise DataError(
            f"Features must be floating point of shape ({n_rows}, d) with d ≥ 1, got {features.dtype} of shape "
            f"{tuple(features.shape)}."
        )
    finite = torch.isfinite(features).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise DataError(f"Row {bad} of the features holds NaN or infinity ({int((~finite).sum())} such rows).")


def _as_logits(scores: Tensor, kind: Kind) -> Tensor:
    values = scores.to(torch.float64)
    return values if kind == "logits" else values.clamp(min=SMALLEST_PROBABILITY).log()
