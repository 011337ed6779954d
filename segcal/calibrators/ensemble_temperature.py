"""Ensemble temperature scaling (Zhang et al. 2020): tempered, plain and uniform distributions, mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import ClassVar, Self

import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator, Preserves, check_temperature, expect_tensor
from segcal.errors import ParameterError
from segcal.softmax import log_softmax, softmax


@dataclass(frozen=True, slots=True)
class EnsembleTemperatureScaling(Calibrator):
    """w1 softmax(z / T) + w2 softmax(z) + w3 / C, weights on the simplex; the ranking never changes."""

    name: ClassVar[str] = "ets"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = "order"

    temperature: float = 1.0
    mixture: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        check_temperature(self.temperature, self.name)
        if min(self.mixture) < 0 or abs(sum(self.mixture) - 1) > 1e-9:
            raise ParameterError(f"ets: mixture weights must be >= 0 and sum to 1, got {self.mixture}")

    @property
    def n_classes(self) -> int | None:
        return None

    @classmethod
    def identity(cls, n_classes: int) -> Self:
        return cls()

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return 4, 3

    def tensors(self) -> dict[str, Tensor]:
        values = torch.tensor([self.temperature, *self.mixture], dtype=torch.float64, device="cpu")
        return {"temperature": values[:1], "mixture": values[1:].clone()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        temperature = float(expect_tensor(tensors, "temperature", (1,), cls.name)[0])
        first, second, third = expect_tensor(tensors, "mixture", (3,), cls.name).tolist()
        return cls(temperature=temperature, mixture=(first, second, third))

    def voxel_log_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        # In logarithms, so that a class at e^-200 keeps its rank instead of meeting others at zero.
        parts = []
        if self.mixture[0] > 0:
            parts.append(log_softmax(logits, self.temperature) + log(self.mixture[0]))
        if self.mixture[1] > 0:
            parts.append(log_softmax(logits) + log(self.mixture[1]))
        if self.mixture[2] > 0:
            parts.append(torch.full_like(logits, log(self.mixture[2] / logits.shape[0])))
        return torch.logsumexp(torch.stack(parts), 0)

    def voxel_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        tempered, plain, uniform = self.mixture
        probs = softmax(logits, self.temperature).mul_(tempered)
        if plain > 0:
            probs.add_(softmax(logits).mul_(plain))  # with `alpha` some processors round once, others twice
        return probs.add_(uniform / logits.shape[0])
