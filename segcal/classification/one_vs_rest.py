"""One-vs-rest: every class a yes/no problem of its own on its probability, put together by normalising the row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.affine import Vector
from segcal.classification.samples import SMALLEST_PROBABILITY, Samples
from segcal.errors import DataError, ParameterError
from segcal.fitting.newton import Minimum, minimise

RIDGE = 1e-6
"""Weight of the ridge around the identity map: a finite answer for separable and constant scores."""

SMALLEST_LOG_ODDS = float(np.log(SMALLEST_PROBABILITY))


def check_labelled(samples: Samples, method: str) -> Tensor:
    """The labels of rows a fit can start from."""
    if samples.n_rows == 0:
        raise DataError(f"{method}: there is no row to fit on.")
    return samples.known_labels


def log_probabilities(samples: Samples) -> Tensor:
    """(n, C) ln p."""
    return torch.log_softmax(samples.logits, 1)


def log_complements(log_p: Tensor) -> Tensor:
    """(n, C) ln(1 - p) from ln p, exact for p near 0 and summed from the other classes for p near 1.

    1 - p in floating point is 0 long before the other classes are: where p > 1/2 the others are summed instead.
    """
    direct = torch.log1p(-log_p.exp().clamp(max=0.75))
    result = direct.clone()
    rows, columns = (log_p > np.log(0.5)).nonzero(as_tuple=True)
    # At most one class of a row has p > 1/2, so this touches at most n rows once each.
    others = log_p[rows].clone()
    others[torch.arange(len(rows), device=others.device), columns] = -torch.inf
    result[rows, columns] = torch.logsumexp(others, 1)
    return result.clamp(min=SMALLEST_LOG_ODDS)


def log_odds(log_p: Tensor) -> Tensor:
    """(n, C) ln p - ln(1 - p), finite."""
    return log_p.clamp(min=SMALLEST_LOG_ODDS) - log_complements(log_p)


def normalised(scores: Tensor, fallback: Tensor) -> Tensor:
    """Rows of non-negative one-vs-rest scores divided by their sum; a row of zeros takes the fallback's.

    Args:
        scores: (n, C), at least 0.
        fallback: (n, C) probabilities, used where every class says no.
    """
    sums = scores.sum(1, keepdim=True)
    silent = sums <= 0
    return torch.where(silent, fallback, scores / torch.where(silent, torch.ones_like(sums), sums))


def rule_of_succession(floor: float | None, n_rows: int, method: str) -> float:
    """The smallest one-vs-rest probability: 1 / (n + 2), what never happened in n rows, unless one is given."""
    if floor is None:
        return 1.0 / (n_rows + 2.0)
    if not 0 <= floor < 0.5:
        raise ParameterError(f"{method}: floor must be at least 0 and below 0.5, got {floor!r}")
    return float(floor)


@dataclass(frozen=True, slots=True, eq=False)
class LogisticProblem:
    """min over theta of mean cross-entropy of sigmoid(x theta) against targets, plus the ridge around `start`.

    Attributes:
        features: (n, d) float64.
        targets: (n,) in [0, 1].
        start: (d,) the identity map.
    """

    features: Vector
    targets: Vector
    start: Vector

    def value(self, theta: Vector) -> float:
        margins = self.features @ theta
        losses = np.logaddexp(0.0, margins) - self.targets * margins
        return float(losses.mean() + RIDGE * ((theta - self.start) ** 2).sum())

    def value_and_gradient(self, theta: Vector) -> tuple[float, Vector]:
        value, gradient, _ = self.derivatives(theta)
        return value, gradient

    def derivatives(self, theta: Vector) -> tuple[float, Vector, Vector]:
        away = theta - self.start
        share = _sigmoid(self.features @ theta)
        gradient = self.features.T @ (share - self.targets) / len(self.targets) + 2 * RIDGE * away
        curved = self.features * (share * (1 - share))[:, None]
        hessian = self.features.T @ curved / len(self.targets) + 2 * RIDGE * np.eye(len(theta))
        return self.value(theta), gradient, hessian


def solve_logistic(problem: LogisticProblem, lower: Vector, upper: Vector) -> Minimum:
    """The global optimum of one class within bounds."""
    return minimise(problem, problem.start, lower, upper)


def _sigmoid(values: Vector) -> NDArray[np.float64]:
    return np.asarray(np.exp(-np.logaddexp(0.0, -values)), dtype=np.float64)
