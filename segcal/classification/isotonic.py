"""Isotonic regression (Zadrozny & Elkan 2002), one-vs-rest, the row normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.one_vs_rest import check_labelled, log_probabilities, normalised, rule_of_succession
from segcal.classification.samples import Samples
from segcal.errors import ParameterError


@dataclass(frozen=True, slots=True, eq=False)
class IsotonicCalibration(RowMethod):
    """q_k ∝ f_k(p_k), f_k the best non-decreasing function of the class's probability, linear between its knots.

    The best f says 0 below the first row of the class and 1 above the last of another one; a single surprise would
    then cost an infinite NLL. Values are therefore kept in [floor, 1 - floor], by default 1/(n + 2), the rule of
    succession; `floor=0` gives the textbook's function, and a row in which every class says 0 stays uncalibrated.
    """

    name: ClassVar[str] = "isotonic"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    knots: Tensor  # (K,) float64, the knots of all classes one after the other, increasing within a class
    heights: Tensor  # (K,) float64, f at the knots
    counts: Tensor  # (C,) float64, knots of every class

    def __post_init__(self) -> None:
        counts = self.counts
        if bool((counts < 1).any()) or bool((counts != counts.round()).any()) or int(counts.sum()) != len(self.knots):
            raise ParameterError(
                f"{self.name}: `counts` must be whole, positive and sum to the {len(self.knots)} knots"
            )
        if bool((self.heights < 0).any()) or bool((self.heights > 1).any()):
            raise ParameterError(f"{self.name}: heights must be probabilities")
        for knots, heights in self._curves():
            if (np.diff(knots) <= 0).any() or (np.diff(heights) < 0).any():
                raise ParameterError(f"{self.name}: knots must increase and heights must not decrease within a class")

    @property
    def n_classes(self) -> int:
        return self.counts.shape[0]

    @classmethod
    def fit(cls, samples: Samples, *, seed: int = 0, floor: float | None = None) -> Self:  # type: ignore[override]
        """Pool adjacent violators, class by class; rows of equal scores are taken together. Draws nothing.

        Args:
            samples: labelled.
            seed: not used.
            floor: smallest value of f (and 1 minus the largest), None for 1/(n + 2).
        """
        labels = check_labelled(samples, cls.name)
        lowest = rule_of_succession(floor, samples.n_rows, cls.name)
        probs = log_probabilities(samples).exp().numpy()
        knots, heights = [], []
        for k in range(samples.n_classes):
            model = IsotonicRegression(y_min=0.0, y_max=1.0, increasing=True, out_of_bounds="clip")
            model.fit(probs[:, k], (labels == k).numpy().astype(np.float64))
            knots.append(np.asarray(model.X_thresholds_, dtype=np.float64))
            heights.append(np.clip(np.asarray(model.y_thresholds_, dtype=np.float64), lowest, 1 - lowest))
        counts = torch.tensor([len(part) for part in knots], dtype=torch.float64, device="cpu")
        return cls(
            torch.as_tensor(np.concatenate(knots), device="cpu"),
            torch.as_tensor(np.concatenate(heights), device="cpu"),
            counts,
        )

    def probabilities(self, samples: Samples) -> Tensor:
        probs = log_probabilities(samples).exp()
        columns = [np.interp(probs[:, k].numpy(), *curve) for k, curve in enumerate(self._curves())]
        return normalised(torch.as_tensor(np.stack(columns, 1), device="cpu"), probs)

    def _curves(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Knots and heights of every class."""
        ends = np.cumsum(self.counts.numpy().astype(np.int64))[:-1]
        return list(zip(np.split(self.knots.numpy(), ends), np.split(self.heights.numpy(), ends), strict=True))

    def tensors(self) -> dict[str, Tensor]:
        return {"knots": self.knots, "heights": self.heights, "counts": self.counts}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        knots = expect_tensor(tensors, "knots", (None,), cls.name)
        heights = expect_tensor(tensors, "heights", (len(knots),), cls.name)
        return cls(knots, heights, expect_tensor(tensors, "counts", (None,), cls.name))
