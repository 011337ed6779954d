"""Platt scaling (Platt 1999), one-vs-rest: a sigmoid of every class's score, the row normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.one_vs_rest import (
    SMALLEST_LOG_ODDS,
    LogisticProblem,
    check_labelled,
    log_odds,
    log_probabilities,
    solve_logistic,
)
from segcal.classification.samples import Samples
from segcal.errors import ParameterError

Score = Literal["log_odds", "log_probability"]
SUFFIX: dict[Score, str] = {"log_odds": "", "log_probability": "_log_p"}
"""Of the names of the tensors in the file, which thereby says what the sigmoids were fitted on."""
NO_DIFFERENCE = 1e-9
"""NLL below which the two scores count as equal; the log-odds are then taken."""


@dataclass(frozen=True, slots=True, eq=False)
class PlattScaling(RowMethod):
    """q_k ∝ sigmoid(a_k s_k + b_k) with s_k = ln p_k - ln(1 - p_k), or s_k = ln p_k.

    On the log-odds a = 1, b = 0 is the identity, and every class by itself is fitted better; on ln p the rows can be
    better once they are normalised (docs/classification.md). Targets are Platt's: (N+ + 1) / (N+ + 2) for rows of the
    class and 1 / (N- + 2) for the others, so a class that never occurs gets a small constant instead of minus infinity.
    """

    name: ClassVar[str] = "platt"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    slope: Tensor  # (C,) float64
    intercept: Tensor  # (C,) float64
    score: Score = "log_odds"

    @property
    def n_classes(self) -> int:
        return self.slope.shape[0]

    @property
    def values(self) -> Mapping[str, Any]:
        return {"score": self.score}

    @classmethod
    def fit(  # type: ignore[override]
        cls, samples: Samples, *, seed: int = 0, score: Score | Literal["auto"] = "auto"
    ) -> Self:
        """The optimum of every class: convex, by Newton's method. Draws nothing.

        Args:
            samples: labelled.
            seed: not used.
            score: what the sigmoids see. "auto" fits both and takes the one whose rows, normalised, have the lower
                NLL on `samples`: with equally many parameters neither is flattered more than the other.
        """
        labels = check_labelled(samples, cls.name)
        if score != "auto":
            return cls._of(samples, score)
        on_odds, on_log_p = (cls._of(samples, each) for each in get_args(Score))
        odds_nll, log_p_nll = (
            -float(made.probabilities(samples).gather(1, labels[:, None]).log().mean()) for made in (on_odds, on_log_p)
        )
        return on_log_p if log_p_nll < odds_nll - NO_DIFFERENCE else on_odds

    @classmethod
    def _of(cls, samples: Samples, score: Score) -> Self:
        labels, scores = samples.known_labels, _scores(samples, score).numpy()
        found = np.empty((samples.n_classes, 2))
        open_ended = np.full(2, np.inf)
        for k in range(samples.n_classes):
            inside = (labels == k).numpy()
            n_inside = int(inside.sum())
            targets = np.where(inside, (n_inside + 1) / (n_inside + 2), 1 / (len(inside) - n_inside + 2))
            features = np.stack([scores[:, k], np.ones(len(inside))], 1)
            problem = LogisticProblem(features, targets, np.array([1.0, 0.0]))
            found[k] = solve_logistic(problem, -open_ended, open_ended).theta
        slope, intercept = torch.as_tensor(found, device="cpu").unbind(1)
        return cls(slope.clone(), intercept.clone(), score)

    def probabilities(self, samples: Samples) -> Tensor:
        margins = _scores(samples, self.score) * self.slope + self.intercept
        # sigmoid(x) / sum sigmoid(x) = softmax(ln sigmoid(x)): never 0 / 0.
        return torch.softmax(torch.nn.functional.logsigmoid(margins), 1)

    def tensors(self) -> dict[str, Tensor]:
        suffix = SUFFIX[self.score]
        return {f"a{suffix}": self.slope, f"b{suffix}": self.intercept}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        score: Score = "log_probability" if any(name.endswith("_log_p") for name in tensors) else "log_odds"
        slope = expect_tensor(tensors, f"a{SUFFIX[score]}", (None,), cls.name)
        return cls(slope, expect_tensor(tensors, f"b{SUFFIX[score]}", (len(slope),), cls.name), score)


def _scores(samples: Samples, score: Score) -> Tensor:
    """(n, C) float64, finite."""
    if score not in SUFFIX:
        raise ParameterError(f"platt: score must be auto, {' or '.join(SUFFIX)}, got {score!r}")
    log_p = log_probabilities(samples)
    return log_odds(log_p) if score == "log_odds" else log_p.clamp(min=SMALLEST_LOG_ODDS)
