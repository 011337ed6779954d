"""One affine map per predicted class: free (cdc), or kept inside the argmax cone (cms_ap) or order cone (cms_op).

The cone maps are written in margins: with the predicted class first, m_k = z_1 - z_k (by class) or
g_k = z_(k) - z_(k+1) (by rank), the maps that keep the cone are exactly m' = A m + beta with A, beta >= 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from scipy import linalg, sparse
from torch import Tensor

from segcal.calibrators.affine import RIDGE, AffineCalibrator, AffineDesign, Matrix, Sees, Vector, View, diagonal
from segcal.calibrators.base import Preserves, expect_tensor
from segcal.calibrators.few_ranks import descending
from segcal.calibrators.matrix import matrix_design, split_matrix
from segcal.errors import ParameterError

BETA_MIN = 1e-6
"""Keeps the winner strictly ahead even where all margins are 0 and A collapses to 0 (METHODS 2)."""


@dataclass(frozen=True, slots=True, eq=False)
class ConditionalDirichlet(AffineCalibrator):
    """One Dirichlet map per predicted class (SEG 3.2): the most flexible, free to change the decision."""

    name: ClassVar[str] = "cdc"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None
    class_conditional: ClassVar[bool] = True
    sees: ClassVar[Sees] = "canonical"

    weight: Tensor  # (C, C, C) float64, first axis the predicted class
    bias: Tensor  # (C, C) float64

    @property
    def n_classes(self) -> int:
        return self.bias.shape[0]

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return n_classes**2 * (n_classes + 1), n_classes * (n_classes**2 - 1)

    @classmethod
    def build_design(cls, n_classes: int) -> AffineDesign:
        return matrix_design(n_classes, n_experts=n_classes)

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        return View(torch.log_softmax(logits, 0))

    def theta(self) -> Vector:
        n = self.n_classes
        return np.concatenate([self.weight.numpy().transpose(0, 2, 1).reshape(n, -1), self.bias.numpy()], 1)

    @classmethod
    def from_theta(cls, theta: Vector, n_classes: int) -> Self:
        design = cls.design(n_classes)
        weights, biases = zip(*(split_matrix(design.matrix(row)) for row in theta), strict=True)
        return cls(weight=torch.stack(weights), bias=torch.stack(biases))

    def tensors(self) -> dict[str, Tensor]:
        return {"W": self.weight, "b": self.bias}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        weight = expect_tensor(tensors, "W", (None, None, None), cls.name)
        n = len(weight)
        return cls(
            weight=expect_tensor(tensors, "W", (n, n, n), cls.name), bias=expect_tensor(tensors, "b", (n, n), cls.name)
        )


class _ConeScaling(AffineCalibrator):
    """What the two cone-preserving maps share: A (C, C-1, C-1) >= 0 and beta (C, C-1) >= BETA_MIN."""

    translation_invariant: ClassVar[bool] = True
    class_conditional: ClassVar[bool] = True

    slope: Tensor
    offset: Tensor

    def __post_init__(self) -> None:
        if bool((self.slope < 0).any()) or bool((self.offset < 0).any()):
            raise ParameterError(f"{self.name}: A and beta must be >= 0, or the decision would not be kept")

    @property
    def n_classes(self) -> int:
        return self.offset.shape[0]

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return n_classes * (n_classes**2 + 1), n_classes**2 * (n_classes - 1)

    @classmethod
    @abstractmethod
    def _to_scores(cls, n_classes: int) -> Vector:
        """(C, C-1): scores of the columns, winner first, from the mapped margins."""

    @classmethod
    def build_design(cls, n_classes: int) -> AffineDesign:
        """theta = (A row by row, beta); score of the winner 0, of the others minus what they are behind."""
        n_other = n_classes - 1
        to_scores = cls._to_scores(n_classes)
        # B (d, C) with d = n_other margins and the constant: B[j, c] = sum_i to_scores[c, i] A[i, j].
        column_by_column = np.arange(n_other**2).reshape(n_other, n_other).T.ravel()
        slopes = sparse.kron(sparse.eye_array(n_other), to_scores, format="csr")[:, column_by_column]
        embed = _block_diagonal(slopes, to_scores)
        n_parameters = n_other * n_classes
        return AffineDesign(
            shape=(n_classes, n_classes),
            embed=embed,
            start=np.concatenate([np.eye(n_other).ravel(), np.full(n_other, BETA_MIN)]),
            lower=np.concatenate([np.zeros(n_other**2), np.full(n_other, BETA_MIN)]),
            upper=np.full(n_parameters, np.inf),
            off_diagonal=_gauge_free_weights(to_scores),
            bias=_gauge_free_bias(to_scores),
            ridge=diagonal(np.full(n_parameters, RIDGE)),
            n_experts=n_classes,
        )

    def theta(self) -> Vector:
        n = self.n_classes
        return np.concatenate([self.slope.numpy().reshape(n, -1), self.offset.numpy()], 1)

    @classmethod
    def from_theta(cls, theta: Vector, n_classes: int) -> Self:
        n_other = n_classes - 1
        slope = torch.as_tensor(theta[:, : n_other**2].reshape(-1, n_other, n_other).copy())
        return cls(slope, torch.as_tensor(theta[:, n_other**2 :].copy()))  # type: ignore[call-arg]

    def tensors(self) -> dict[str, Tensor]:
        return {"A": self.slope, "beta": self.offset}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        offset = expect_tensor(tensors, "beta", (None, None), cls.name)
        n, n_other = offset.shape
        if n_other != n - 1:
            raise ParameterError(f"{cls.name}: `beta` has shape {tuple(offset.shape)}, expected (C, C - 1)")
        return cls(expect_tensor(tensors, "A", (n, n_other, n_other), cls.name), offset)  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True, eq=False)
class ArgmaxConeScaling(_ConeScaling):
    """Keeps the predicted class: margins to the other classes, by class identity, stay non-negative (SEG 3.2.1)."""

    name: ClassVar[str] = "cms_ap"
    preserves: ClassVar[Preserves] = "argmax"
    sees: ClassVar[Sees] = "margins"

    slope: Tensor
    offset: Tensor

    @classmethod
    def _to_scores(cls, n_classes: int) -> Vector:
        return np.concatenate([np.zeros((1, n_classes - 1)), -np.eye(n_classes - 1)])

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        k = _known(expert)
        # A deployed decision can trail by a rounding error of half precision: its margin counts as 0.
        margins = (logits[k] - torch.cat([logits[:k], logits[k + 1 :]])).clamp_(min=0)
        column = [0 if c == k else c + (c < k) for c in range(logits.shape[0])]
        return View(margins, torch.tensor(column, device=logits.device))


@dataclass(frozen=True, slots=True, eq=False)
class OrderConeScaling(_ConeScaling):
    """Keeps the whole ranking: gaps between neighbours in rank stay non-negative (SEG 3.2.1)."""

    name: ClassVar[str] = "cms_op"
    preserves: ClassVar[Preserves] = "order"
    sees: ClassVar[Sees] = "gaps"

    slope: Tensor
    offset: Tensor

    @classmethod
    def _to_scores(cls, n_classes: int) -> Vector:
        return np.concatenate([np.zeros((1, n_classes - 1)), -np.tril(np.ones((n_classes - 1, n_classes - 1)))])

    @classmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        k = _known(expert)
        ranked, rank = descending(torch.cat([logits[:k], logits[k + 1 :]]))
        gaps = torch.cat([logits[k : k + 1], ranked[:-1]]).sub_(ranked).clamp_(min=0)
        rank += 1
        column = torch.cat([rank[:k], torch.zeros_like(rank[:1]), rank[k:]])
        return View(gaps, column)


def _known(expert: int | None) -> int:
    if expert is None:
        raise ParameterError("a map per predicted class needs to know which class was predicted")
    return expert


def _gauge_free_weights(to_scores: Vector) -> Matrix:
    """The off-diagonal penalty of SEG eq. 15 on W, minimised over everything that never reaches the probabilities.

    SEG's W is G^-1 [[a, r'], [0, A]] G. `a` and `r` cancel in the softmax, so a fit is free to choose them best:
    the penalty is a quadratic form in (a, r, A), and the Schur complement takes (a, r) out.
    """
    n_classes, n_other = to_scores.shape
    # G^-1 = [first column ones | to_scores]: logits from (z_1, margins).
    g_inverse = np.concatenate([np.ones((n_classes, 1)), to_scores], 1)
    g = np.linalg.inv(g_inverse)
    off_diagonal = (~np.eye(n_classes, dtype=bool)).ravel()
    # vec(W)[i, j] = sum_kl G^-1[i, k] W'[k, l] G[l, j]; W' has its first column zero below a.
    w_from_prime = np.kron(g_inverse, g.T)[off_diagonal]
    index = np.arange(n_classes**2).reshape(n_classes, n_classes)
    gauge, inner = w_from_prime[:, index[0]], w_from_prime[:, index[1:, 1:].ravel()]
    coefficients = linalg.lstsq(gauge, inner)[0]
    remainder = inner - gauge @ coefficients
    weights = remainder.T @ remainder / (n_classes * (n_classes - 1))
    weights[np.abs(weights) < 1e-15] = 0.0
    return _block_diagonal(weights, sparse.csr_array((n_other, n_other)))


def _gauge_free_bias(to_scores: Vector) -> Matrix:
    """The bias penalty of SEG eq. 15, minimised over the common constant b_1."""
    n_classes, n_other = to_scores.shape
    centred = to_scores - to_scores.mean(0)
    bias = centred.T @ centred / n_classes
    return _block_diagonal(sparse.csr_array((n_other**2, n_other**2)), bias)


def _block_diagonal(first: Matrix | Vector, second: Matrix | Vector) -> Matrix:
    """Without entries that are zero, which scipy keeps: with 40 classes 97 % and more of an embedding."""
    joined = sparse.csr_array(sparse.block_diag([first, second]))
    joined.eliminate_zeros()
    return joined
