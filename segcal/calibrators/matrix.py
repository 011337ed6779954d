"""One affine map for all voxels: vector, matrix and constrained matrix scaling, Dirichlet calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from segcal.calibrators.affine import (
    RIDGE,
    AffineCalibrator,
    AffineDesign,
    Matrix,
    Sees,
    Vector,
    View,
    diagonal,
    free,
    nothing,
)
from segcal.calibrators.base import Preserves, expect_tensor
from segcal.errors import ParameterError


@dataclass(frozen=True, slots=True, eq=False)
class MatrixScaling(AffineCalibrator):
    """softmax(W z + b) (Guo et al. 2017). Sees the arbitrary offset of the logits: not translation-invariant."""

    name: ClassVar[str] = "ms"
    translation_invariant: ClassVar[bool] = False
    preserves: ClassVar[Preserves] = None

    weight: Tensor  # (C, C) float64
    bias: Tensor  # (C,) float64

    @property
    def n_classes(self) -> int:
        return self.bias.shape[0]

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return n_classes * (n_classes + 1), n_classes**2 - 1

    @classmethod
    def build_design(cls, n_classes: int) -> AffineDesign:
        """theta = B = [W'; b'] row by row."""
        return matrix_design(n_classes)

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        return View(logits)

    def theta(self) -> Vector:
        return np.concatenate([self.weight.numpy().T.ravel(), self.bias.numpy()])[None]

    @classmethod
    def from_theta(cls, theta: Vector, n_classes: int) -> Self:
        weight, bias = split_matrix(cls.design(n_classes).matrix(theta[0]))
        return cls(weight=weight, bias=bias)

    def tensors(self) -> dict[str, Tensor]:
        return {"W": self.weight, "b": self.bias}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        bias = expect_tensor(tensors, "b", (None,), cls.name)
        return cls(weight=expect_tensor(tensors, "W", (len(bias), len(bias)), cls.name), bias=bias)


@dataclass(frozen=True, slots=True, eq=False)
class ConstrainedMatrixScaling(MatrixScaling):
    """softmax(W z + b) with equal row sums of W (SEG 3.1): a shift of the logits cancels in the softmax."""

    name: ClassVar[str] = "ms_c"
    translation_invariant: ClassVar[bool] = True
    sees: ClassVar[Sees] = "behind_largest"

    def __post_init__(self) -> None:
        sums = self.weight.sum(1)
        if float(sums.max() - sums.min()) > 1e-9 * max(1.0, float(self.weight.abs().max())) * len(sums):
            raise ParameterError(f"{self.name}: all rows of W must have one sum, found {sums.tolist()}")

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return n_classes**2 + 1, n_classes * (n_classes - 1)

    @classmethod
    def build_design(cls, n_classes: int) -> AffineDesign:
        """theta = (W without its last column, row by row; the row sum s; b); the last column is s minus the rest."""
        size, n_free = n_classes, n_classes * (n_classes - 1)
        embed = sparse.lil_array((size * (size + 1), n_free + 1 + size))
        for i in range(size):
            for j in range(size - 1):
                embed[j * size + i, i * (size - 1) + j] = 1.0
                embed[(size - 1) * size + i, i * (size - 1) + j] = -1.0
            embed[(size - 1) * size + i, n_free] = 1.0
            embed[size * size + i, n_free + 1 + i] = 1.0
        whole = matrix_design(n_classes)
        down = sparse.csr_array(embed)
        start = np.concatenate([np.eye(size)[:, :-1].ravel(), [1.0], np.zeros(size)])
        lower, upper = free(len(start))
        return AffineDesign(
            shape=whole.shape,
            embed=down,
            start=start,
            lower=lower,
            upper=upper,
            off_diagonal=pull_back(whole.off_diagonal, down),
            bias=pull_back(whole.bias, down),
            ridge=pull_back(whole.ridge, down),
        )

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        # The constraint makes every shift cancel; taking out the largest logit makes it cancel in float32 too.
        return View(logits - logits.amax(0))

    def theta(self) -> Vector:
        weight = self.weight.numpy()
        return np.concatenate([weight[:, :-1].ravel(), [weight.sum(1).mean()], self.bias.numpy()])[None]


@dataclass(frozen=True, slots=True, eq=False)
class DirichletCalibration(MatrixScaling):
    """softmax(W log S(z) + b) (Kull et al. 2019): matrix scaling of the canonical logits."""

    name: ClassVar[str] = "dc"
    translation_invariant: ClassVar[bool] = True
    sees: ClassVar[Sees] = "canonical"

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        return View(torch.log_softmax(logits, 0))


@dataclass(frozen=True, slots=True, eq=False)
class VectorScaling(AffineCalibrator):
    """softmax(diag(a) z + b) (Guo et al. 2017). Not translation-invariant, carries only the fixed ridge."""

    name: ClassVar[str] = "vs"
    translation_invariant: ClassVar[bool] = False
    preserves: ClassVar[Preserves] = None
    penalised: ClassVar[bool] = False

    scale: Tensor  # (C,) float64
    bias: Tensor  # (C,) float64

    @property
    def n_classes(self) -> int:
        return self.bias.shape[0]

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return 2 * n_classes, 2 * n_classes - 1

    @classmethod
    def build_design(cls, n_classes: int) -> AffineDesign:
        """theta = (a, b)."""
        rows = np.concatenate([np.arange(n_classes) * (n_classes + 1), n_classes**2 + np.arange(n_classes)])
        columns = np.arange(2 * n_classes)
        shape = (n_classes * (n_classes + 1), 2 * n_classes)
        lower, upper = free(2 * n_classes)
        return AffineDesign(
            shape=(n_classes + 1, n_classes),
            embed=sparse.csr_array((np.ones(2 * n_classes), (rows, columns)), shape=shape),
            start=np.concatenate([np.ones(n_classes), np.zeros(n_classes)]),
            lower=lower,
            upper=upper,
            off_diagonal=nothing(2 * n_classes),
            bias=nothing(2 * n_classes),
            ridge=diagonal(np.full(2 * n_classes, RIDGE)),
        )

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        return View(logits)

    def theta(self) -> Vector:
        return np.concatenate([self.scale.numpy(), self.bias.numpy()])[None]

    @classmethod
    def from_theta(cls, theta: Vector, n_classes: int) -> Self:
        scale, bias = torch.as_tensor(np.array(theta[0])).split(n_classes)
        return cls(scale=scale.clone(), bias=bias.clone())

    def tensors(self) -> dict[str, Tensor]:
        return {"a": self.scale, "b": self.bias}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        bias = expect_tensor(tensors, "b", (None,), cls.name)
        return cls(scale=expect_tensor(tensors, "a", (len(bias),), cls.name), bias=bias)


def matrix_design(n_classes: int, *, n_experts: int = 1) -> AffineDesign:
    """A free matrix and bias with SEG's regulariser (eq. 15): theta = [W'; b'] row by row."""
    off_diagonal = (1.0 - np.eye(n_classes)) / (n_classes * (n_classes - 1))
    n_weights, n_parameters = n_classes**2, n_classes * (n_classes + 1)
    lower, upper = free(n_parameters)
    return AffineDesign(
        shape=(n_classes + 1, n_classes),
        embed=diagonal(np.ones(n_parameters)),
        start=np.concatenate([np.eye(n_classes).ravel(), np.zeros(n_classes)]),
        lower=lower,
        upper=upper,
        off_diagonal=diagonal(np.concatenate([off_diagonal.ravel(), np.zeros(n_classes)])),
        bias=diagonal(np.concatenate([np.zeros(n_weights), np.full(n_classes, 1.0 / n_classes)])),
        ridge=diagonal(np.full(n_parameters, RIDGE)),
        n_experts=n_experts,
    )


def split_matrix(matrix: Vector) -> tuple[Tensor, Tensor]:
    """B (C + 1, C) to weight (C, C) and bias (C,)."""
    return torch.as_tensor(np.ascontiguousarray(matrix[:-1].T)), torch.as_tensor(matrix[-1].copy())


def pull_back(quadratic: Matrix, embed: Matrix) -> Matrix:
    """The quadratic form of B in terms of the parameters that build B."""
    return sparse.csr_array(embed.T @ quadratic @ embed)
