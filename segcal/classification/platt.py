"""Platt scaling (Platt 1999), one-vs-rest: a sigmoid of every class's log-odds, the row normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.one_vs_rest import (
    LogisticProblem,
    check_labelled,
    log_odds,
    log_probabilities,
    solve_logistic,
)
from segcal.classification.samples import Samples


@dataclass(frozen=True, slots=True, eq=False)
class PlattScaling(RowMethod):
    """q_k ∝ sigmoid(a_k s_k + b_k) with s_k = ln p_k - ln(1 - p_k).

    On the log-odds, not on the probability itself, so that a = 1, b = 0 is the identity. Targets are Platt's:
    (N+ + 1) / (N+ + 2) for rows of the class and 1 / (N- + 2) for the others, so a class that never occurs
    gets a small constant instead of minus infinity.
    """

    name: ClassVar[str] = "platt"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    slope: Tensor  # (C,) float64
    intercept: Tensor  # (C,) float64

    @property
    def n_classes(self) -> int:
        return self.slope.shape[0]

    @classmethod
    def fit(cls, samples: Samples, *, seed: int = 0) -> Self:  # type: ignore[override]
        """The optimum of every class: convex, by Newton's method. Draws nothing and has no settings."""
        labels = check_labelled(samples, cls.name)
        odds = log_odds(log_probabilities(samples)).numpy()
        found = np.empty((samples.n_classes, 2))
        open_ended = np.full(2, np.inf)
        for k in range(samples.n_classes):
            inside = (labels == k).numpy()
            n_inside = int(inside.sum())
            targets = np.where(inside, (n_inside + 1) / (n_inside + 2), 1 / (len(inside) - n_inside + 2))
            features = np.stack([odds[:, k], np.ones(len(inside))], 1)
            problem = LogisticProblem(features, targets, np.array([1.0, 0.0]))
            found[k] = solve_logistic(problem, -open_ended, open_ended).theta
        slope, intercept = torch.as_tensor(found, device="cpu").unbind(1)
        return cls(slope.clone(), intercept.clone())

    def probabilities(self, samples: Samples) -> Tensor:
        log_p = log_probabilities(samples)
        # sigmoid(x) / sum sigmoid(x) = softmax(ln sigmoid(x)): never 0 / 0.
        return torch.softmax(torch.nn.functional.logsigmoid(log_odds(log_p) * self.slope + self.intercept), 1)

    def tensors(self) -> dict[str, Tensor]:
        return {"a": self.slope, "b": self.intercept}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        slope = expect_tensor(tensors, "a", (None,), cls.name)
        return cls(slope, expect_tensor(tensors, "b", (len(slope),), cls.name))
