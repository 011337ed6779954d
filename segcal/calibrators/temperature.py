"""Temperature scaling (Guo et al. 2017): one number for all voxels and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from segcal.calibrators.affine import AffineCalibrator, AffineDesign, Vector, View, nothing
from segcal.calibrators.base import Preserves, check_temperature, expect_tensor
from segcal.softmax import log_softmax, softmax

T_MIN, T_MAX = 0.01, 100.0
"""Separable or meaningless labels push T to a bound: a finite answer, and the fit records a warning."""


@dataclass(frozen=True, slots=True)
class TemperatureScaling(AffineCalibrator):
    """softmax(z / T) with one T for every voxel and class; the ranking of the classes never changes."""

    name: ClassVar[str] = "ts"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = "order"
    penalised: ClassVar[bool] = False

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature, self.name)

    @property
    def n_classes(self) -> int | None:
        return None

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return 1, 1

    @classmethod
    def build_design(cls, n_classes: int) -> AffineDesign:
        """theta = 1/T, in which the NLL is convex; B = theta I."""
        return AffineDesign(
            shape=(n_classes, n_classes),
            embed=sparse.csr_array(np.eye(n_classes).reshape(-1, 1)),
            start=np.ones(1),
            lower=np.array([1.0 / T_MAX]),
            upper=np.array([1.0 / T_MIN]),
            off_diagonal=nothing(1),
            bias=nothing(1),
            ridge=nothing(1),
        )

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        return View(logits)

    def theta(self) -> Vector:
        return np.array([[1.0 / self.temperature]])

    @classmethod
    def from_theta(cls, theta: Vector, n_classes: int) -> Self:
        return cls(temperature=1.0 / float(theta[0, 0]))

    def tensors(self) -> dict[str, Tensor]:
        return {"temperature": torch.full((1,), self.temperature, dtype=torch.float64, device="cpu")}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(temperature=float(expect_tensor(tensors, "temperature", (1,), cls.name)[0]))

    def voxel_log_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        return log_softmax(logits, self.temperature)

    def voxel_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        return softmax(logits, self.temperature)
