"""MetaCal (Ma & Blaschko 2021): temperature scaling for rows that are likely right, "do not know" for the others.

Rows are ranked by the entropy of the uncalibrated probabilities. Up to a threshold they are temperature-scaled, above
it they get the uniform distribution. The threshold keeps a promise about new rows of the same kind:

- `meta_mis`: at most a share alpha of the correctly classified rows is given up (on average over calibration sets);
- `meta_acc`: the rows that are not given up are classified with at least the target accuracy (with a confidence).

Both promises rest on rows the temperature never sees. `docs/classification.md` lists where the authors' code differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.calibrators.temperature import TemperatureScaling
from segcal.classification.base import RowMethod
from segcal.classification.core import TemperatureRows
from segcal.classification.one_vs_rest import check_labelled
from segcal.classification.samples import Samples
from segcal.errors import DataError, ParameterError

N_BINS = 20
"""Candidate thresholds of `meta_acc`, equally many rows apart."""
MOST_THRESHOLD_ROWS = 500


@dataclass(frozen=True, slots=True, eq=False)
class _Meta(RowMethod):
    """softmax(z / T) where the entropy is at most tau, 1/C elsewhere."""

    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None
    order_matters: ClassVar[bool] = True
    by_class: ClassVar[bool] = False

    temperature: float
    threshold: float
    classes: int
    values: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ParameterError(f"{self.name}: temperature must be finite and > 0, got {self.temperature!r}")

    @property
    def n_classes(self) -> int:
        return self.classes

    def covered(self, samples: Samples) -> Tensor:
        """(n,) bool: rows that are calibrated; the others are given up."""
        return entropy(samples) <= self.threshold

    def probabilities(self, samples: Samples) -> Tensor:
        scaled = TemperatureScaling(self.temperature).probabilities(samples.logits, class_axis=1)
        uniform = torch.full_like(scaled, 1.0 / samples.n_classes)
        return torch.where(self.covered(samples).unsqueeze(1), scaled, uniform)

    def tensors(self) -> dict[str, Tensor]:
        values = {"temperature": self.temperature, "threshold": self.threshold, "classes": float(self.classes)}
        return {name: torch.full((1,), value, dtype=torch.float64, device="cpu") for name, value in values.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        found = [
            float(expect_tensor(tensors, name, (1,), cls.name)[0]) for name in ("temperature", "threshold", "classes")
        ]
        return cls(found[0], found[1], int(found[2]))

    @classmethod
    def _of(cls, rest: Samples, threshold: float, values: Mapping[str, Any], warnings: tuple[str, ...]) -> Self:
        """Temperature scaling on the rows of `rest` below the threshold."""
        kept = rest.rows(entropy(rest) <= threshold)
        if kept.n_rows == 0:
            text = f"{cls.name}: no row below the threshold is left to fit the temperature on; it stays at 1"
            return cls(1.0, threshold, rest.n_classes, values, (*warnings, text))
        fitted = TemperatureRows.fit(kept)
        assert isinstance(fitted.calibrator, TemperatureScaling)
        said = tuple(text.replace("ts", cls.name, 1) for text in fitted.warnings if "fitted on only" not in text)
        return cls(fitted.calibrator.temperature, threshold, rest.n_classes, values, (*warnings, *said))


class MetaMiscoverage(_Meta):
    """Gives up at most a share of the rows the classifier gets right."""

    name: ClassVar[str] = "meta_mis"

    @classmethod
    def fit(  # type: ignore[override]
        cls, samples: Samples, *, seed: int = 0, miscoverage: float = 0.05, threshold_rows: int | None = None
    ) -> Self:
        """The threshold is the k-th smallest entropy of n1 right rows, k = ceil((1 - alpha)(n1 + 1)).

        The entropy of a new right row exceeds it with probability at most alpha, whatever the distribution, ties
        included. With fewer than 1/alpha - 1 right rows no threshold can promise that, and nothing is given up.

        Args:
            samples: labelled.
            seed: of the rows the threshold is found on.
            miscoverage: alpha, in (0, 1).
            threshold_rows: n1; by default a tenth of the right rows, at least 100 (or half of them) and at most 500.
        """
        if not 0 < miscoverage < 1:
            raise ParameterError(f"{cls.name}: miscoverage must lie between 0 and 1, got {miscoverage!r}")
        labels = check_labelled(samples, cls.name)
        right = (samples.decision == labels).nonzero().squeeze(1).numpy()
        n_threshold = _checked_rows(threshold_rows, len(right), cls.name)
        chosen = np.random.default_rng(seed).permutation(right)[:n_threshold]
        ranked = np.sort(entropy(samples.rows(torch.as_tensor(chosen, device="cpu"))).numpy())
        k = ceil((1 - miscoverage) * (n_threshold + 1) - 1e-9)
        values = {"miscoverage": miscoverage, "threshold_rows": n_threshold}
        rest = samples.rows(_without(chosen, samples.n_rows))
        if k > n_threshold:
            text = (
                f"{cls.name}: a miscoverage of {miscoverage:g} needs {ceil(1 / miscoverage) - 1} right rows to find "
                f"the threshold on, there are {n_threshold}; no row is given up"
            )
            return cls._of(rest, _never(samples.n_classes), values, (text,))
        return cls._of(rest, float(ranked[k - 1]), values, ())


class MetaAccuracy(_Meta):
    """Gives up the least certain rows so that the others are right at least as often as asked."""

    name: ClassVar[str] = "meta_acc"

    @classmethod
    def fit(  # type: ignore[override]
        cls,
        samples: Samples,
        *,
        seed: int = 0,
        accuracy: float | None = None,
        confidence: float | None = 0.95,
        threshold_rows: int | None = None,
    ) -> Self:
        """The largest of 20 thresholds whose rows are accurate enough.

        With a confidence, an exact binomial lower bound (Clopper & Pearson 1934) of the accuracy below each
        threshold must reach the target; the bounds hold for all 20 at once, so the accuracy on new rows is below the
        target with probability at most 1 - confidence. `confidence=None` is the authors' plug-in rule: no bound.

        Args:
            samples: labelled.
            seed: of the rows the threshold is found on.
            accuracy: the target in (0, 1). By default half of the errors are to go, or as many as the rows allow (the
                bounds hold for all thresholds at once, so a target chosen by them is promised too).
            confidence: of the promise, in (0, 1), or None.
            threshold_rows: by default a tenth of the rows, at least 100 (or half of them) and at most 500.

        Raises:
            DataError: no threshold reaches the target that was asked for; the message says what can be reached.
        """
        for name, value in (("accuracy", accuracy), ("confidence", confidence)):
            if value is not None and not 0 < value < 1:
                raise ParameterError(f"{cls.name}: {name} must lie between 0 and 1, got {value!r}")
        labels = check_labelled(samples, cls.name)
        n_threshold = _checked_rows(threshold_rows, samples.n_rows, cls.name)
        chosen = np.random.default_rng(seed).permutation(samples.n_rows)[:n_threshold]
        hits = (samples.decision == labels).numpy().astype(np.float64)
        left = _without(chosen, samples.n_rows)
        scores = entropy(samples).numpy()[chosen]
        if confidence is None:
            tops, reached = _plug_in(scores, hits[chosen])
        else:
            tops, reached = _bounded(scores, hits[chosen], 1 - confidence)
        wanted = 0.5 * (1 + float(hits.mean())) if accuracy is None else accuracy
        target = min(wanted, float(reached.max()))
        if accuracy is not None and target < accuracy:
            raise DataError(
                f"{cls.name}: an accuracy of {accuracy:.4g} is out of reach on the {n_threshold} rows that decide; "
                f"the most they allow is {target:.4g}. Lower `accuracy`, raise `threshold_rows`, or give more rows."
            )
        threshold = _interpolated(tops, reached, target) if confidence is None else tops[reached >= target].max()
        values = {"accuracy": target, "confidence": confidence, "threshold_rows": n_threshold}
        return cls._of(samples.rows(left), float(min(threshold, _never(samples.n_classes))), values, ())


def entropy(samples: Samples) -> Tensor:
    """(n,) entropy in nats of the uncalibrated probabilities: high means likely wrong."""
    log_p = torch.log_softmax(samples.logits, 1)
    return -(log_p.exp() * log_p).sum(1)


def _never(n_classes: int) -> float:
    """A threshold no entropy reaches."""
    return 2 * log(n_classes)


def _checked_rows(asked: int | None, available: int, method: str) -> int:
    if asked is None:
        return min(max(available // 10, min(available // 2, 100)), MOST_THRESHOLD_ROWS)
    if not 1 <= asked < max(available, 2):
        raise ParameterError(f"{method}: threshold_rows must be from 1 to {available - 1} here, got {asked}")
    return asked


def _without(chosen: NDArray[np.int64], n_rows: int) -> Tensor:
    kept = np.ones(n_rows, dtype=bool)
    kept[chosen] = False
    return torch.as_tensor(kept.nonzero()[0], device="cpu")


def _bounded(
    scores: NDArray[np.float64], hits: NDArray[np.float64], risk: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Thresholds, and lower bounds of the accuracy of rows up to them that all hold with probability 1 - risk."""
    ranked = np.sort(scores)
    cuts = np.unique(np.round(np.arange(1, N_BINS) * len(scores) / N_BINS).astype(np.int64))
    # Given the m-th smallest score, the rows strictly below it are a plain sample of that region: their hits are
    # binomial. The last candidate is everything.
    tops = np.unique([*(float(ranked[cut - 1]) for cut in cuts if cut > 0), np.inf])
    bounds = []
    for top in tops:
        below = scores < top
        n_below, n_right = int(below.sum()), int(hits[below].sum())
        bounds.append(float(stats.beta.ppf(risk / N_BINS, n_right, n_below - n_right + 1)) if n_right else 0.0)
    return np.nextafter(tops, -np.inf), np.array(bounds)


def _plug_in(scores: NDArray[np.float64], hits: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The authors' table: mean entropy of every bin that holds rows, and the running mean of the bins' accuracies.

    Bins (lo, hi] lie between quantiles, as theirs do; the lowest row, which theirs leave out, is in the first.
    """
    if len(scores) == 0:
        return np.array([np.inf]), np.zeros(1)
    edges = np.unique(np.quantile(scores, np.arange(1, N_BINS + 1) / N_BINS))
    index = np.searchsorted(edges, scores, side="left")
    size = np.bincount(index, minlength=len(edges))
    used = size > 0
    right, total = np.bincount(index, hits, len(edges))[used], np.bincount(index, scores, len(edges))[used]
    return total / size[used], np.cumsum(right / size[used]) / np.arange(1, used.sum() + 1)


def _interpolated(entropies: NDArray[np.float64], running: NDArray[np.float64], target: float) -> float:
    """The entropy where the running accuracy equals the target, by isotonic regression; no limit if it stays above."""
    if target <= running[-1]:
        return np.inf
    model = IsotonicRegression(increasing=False, out_of_bounds="clip").fit(running, entropies)
    return float(model.predict([target])[0])
