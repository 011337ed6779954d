"""Beta calibration (Kull, Silva Filho & Flach 2017), one-vs-rest."""

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
    SMALLEST_LOG_ODDS,
    LogisticProblem,
    check_labelled,
    log_complements,
    log_probabilities,
    solve_logistic,
)
from segcal.classification.samples import Samples
from segcal.errors import ParameterError


@dataclass(frozen=True, slots=True, eq=False)
class BetaCalibration(RowMethod):
    """q_k ∝ sigmoid(a_k ln p_k - b_k ln(1 - p_k) + c_k) with a_k, b_k ≥ 0; a = b = 1, c = 0 is the identity.

    The constraint is solved exactly as bounds of a convex problem. The authors' code drops a feature whose weight
    came out negative and refits without looking at the sign of the other again: there the result can decrease in p.
    """

    name: ClassVar[str] = "beta"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    rise: Tensor  # (C,) float64, a
    fall: Tensor  # (C,) float64, b
    intercept: Tensor  # (C,) float64, c

    def __post_init__(self) -> None:
        if bool((self.rise < 0).any()) or bool((self.fall < 0).any()):
            raise ParameterError(
                f"{self.name}: a and b must be >= 0, or a larger score would mean a smaller probability"
            )

    @property
    def n_classes(self) -> int:
        return self.rise.shape[0]

    @classmethod
    def fit(cls, samples: Samples, *, seed: int = 0) -> Self:  # type: ignore[override]
        """The optimum of every class within its bounds. Draws nothing and has no settings."""
        labels = check_labelled(samples, cls.name)
        log_p = log_probabilities(samples)
        yes = log_p.clamp(min=SMALLEST_LOG_ODDS).numpy()
        no = -log_complements(log_p).numpy()
        lower, upper = np.array([0.0, 0.0, -np.inf]), np.full(3, np.inf)
        found = np.empty((samples.n_classes, 3))
        for k in range(samples.n_classes):
            features = np.stack([yes[:, k], no[:, k], np.ones(samples.n_rows)], 1)
            problem = LogisticProblem(features, (labels == k).numpy().astype(np.float64), np.array([1.0, 1.0, 0.0]))
            found[k] = solve_logistic(problem, lower, upper).theta
        rise, fall, intercept = torch.as_tensor(found, device="cpu").unbind(1)
        return cls(rise.clone(), fall.clone(), intercept.clone())

    def probabilities(self, samples: Samples) -> Tensor:
        log_p = log_probabilities(samples)
        yes, no = log_p.clamp(min=SMALLEST_LOG_ODDS), -log_complements(log_p)
        return torch.softmax(torch.nn.functional.logsigmoid(yes * self.rise + no * self.fall + self.intercept), 1)

    def tensors(self) -> dict[str, Tensor]:
        return {"a": self.rise, "b": self.fall, "c": self.intercept}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        rise = expect_tensor(tensors, "a", (None,), cls.name)
        fall, intercept = (expect_tensor(tensors, name, (len(rise),), cls.name) for name in ("b", "c"))
        return cls(rise, fall, intercept)
