"""Calibrators whose pre-softmax map is linear in its parameters: one form, one fit for all of them.

Every such method looks at a voxel through features x (d,), multiplies them with a matrix B (d, C) that is
linear in the parameters theta, and takes a softmax over columns that stand for classes in some order:

    log q = log_softmax(B' x),    vec(B) = embed theta

`AffineDesign` holds the constant part (embed, bounds, penalties), so the solvers know nothing about methods.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from segcal.calibrators.base import Calibrator
from segcal.device import takes_loop
from segcal.errors import ParameterError

RIDGE = 1e-6
"""Weight of the fixed ridge that keeps every optimum finite (METHODS 2)."""

Vector: TypeAlias = NDArray[np.float64]
Matrix: TypeAlias = "sparse.csr_array[np.float64, tuple[int, int]]"
Sees: TypeAlias = Literal["values", "behind_largest", "canonical", "margins", "gaps"]
"""In the words of `segcal.compiled.affine_maps`."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineDesign:
    """The constant part of one expert's fitting problem with P parameters.

    Attributes:
        shape: (d, C), the shape of B.
        embed: (d C, P) sparse, how the parameters build B, row by row.
        start: (P,), the parameters of the identity map, also the centre of the ridge.
        lower, upper: (P,) bounds, possibly infinite.
        off_diagonal: (P, P), theta' Q theta = sum_{i != j} W_ij^2 / (C (C - 1)), the part lambda weighs.
        bias: (P, P), theta' Q theta = sum_j b_j^2 / C, the part mu weighs.
        ridge: (P, P), theta' Q theta = the fixed ridge around `start`, with its weight.
        n_experts: 1, or C when every predicted class has its own map.
    """

    shape: tuple[int, int]
    embed: Matrix
    start: Vector
    lower: Vector
    upper: Vector
    off_diagonal: Matrix
    bias: Matrix
    ridge: Matrix
    n_experts: int = 1

    @property
    def n_parameters(self) -> int:
        return self.start.size

    def matrix(self, theta: Vector) -> Vector:
        """(P,) parameters to B (d, C)."""
        return np.asarray(self.embed @ theta).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class View:
    """What one method sees of n voxels.

    Attributes:
        features: (d, n), without the constant that carries a bias.
        column: the output column of each class: (C,) int64 if all voxels share it, (C, n) int64 if they do not;
            None for the natural order.
    """

    features: Tensor
    column: Tensor | None = None

    def complete(self, design: AffineDesign) -> Tensor:
        """(d, n) features of a design, with the constant where it has one."""
        if len(self.features) == design.shape[0]:
            return self.features
        return torch.cat([self.features, torch.ones_like(self.features[:1])])

    def columns_of(self, labels: Tensor) -> Tensor:
        """(n,) output column of each voxel's label."""
        if self.column is None:
            return labels
        return self.column[labels] if self.column.ndim == 1 else self.column.gather(0, labels[None])[0]

    def to_classes(self, columns: Tensor) -> Tensor:
        """(C, n) values by column to values by class."""
        if self.column is None:
            return columns
        return columns[self.column] if self.column.ndim == 1 else columns.gather(0, self.column)


class AffineCalibrator(Calibrator):
    """A calibrator described by an `AffineDesign`; subclasses say which features and which matrices."""

    class_conditional: ClassVar[bool] = False
    sees: ClassVar[Sees] = "values"
    """What `view` shows a map."""
    penalised: ClassVar[bool] = True
    """Whether lambda and mu mean anything for this method."""

    @classmethod
    @abstractmethod
    def build_design(cls, n_classes: int) -> AffineDesign:
        """The fitting problem of one expert; call `design`, which remembers it."""

    @classmethod
    def design(cls, n_classes: int) -> AffineDesign:
        """The fitting problem of one expert."""
        return _remembered_design(cls, n_classes)

    @classmethod
    @abstractmethod
    def view(cls, logits: Tensor, expert: int | None) -> View:
        """What the method sees of (C, n) logits that were all decided as `expert` (None: the expert plays no part)."""

    @classmethod
    @abstractmethod
    def from_theta(cls, theta: Vector, n_classes: int) -> Self:
        """(E, P) parameters to a calibrator."""

    @abstractmethod
    def theta(self) -> Vector:
        """(E, P): inverse of `from_theta`."""

    @classmethod
    def identity(cls, n_classes: int) -> Self:
        design = cls.design(n_classes)
        return cls.from_theta(np.tile(design.start, (design.n_experts, 1)), n_classes)

    def voxel_log_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        if takes_loop(logits):
            return self._by_loop(logits, decision, logarithm=True)
        return torch.log_softmax(self._scores(logits, decision), 0)

    def voxel_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        if takes_loop(logits):
            return self._by_loop(logits, decision, logarithm=False)
        return torch.softmax(self._scores(logits, decision), 0)

    def _scores(self, logits: Tensor, decision: Tensor) -> Tensor:
        """(C, n) values before the softmax."""
        if not self.class_conditional:
            return self._expert_scores(logits, None)
        self._check_decision(decision, *logits.shape)
        counts = torch.bincount(decision, minlength=logits.shape[0])
        main = int(counts.argmax())
        # Most voxels of a volume are of one class: its map runs over all of them, the others' over their own only.
        scores = self._expert_scores(logits, main)
        for expert in counts.nonzero().squeeze(1).tolist():
            if expert != main:
                own = (decision == expert).nonzero().squeeze(1)
                scores.index_copy_(1, own, self._expert_scores(logits.index_select(1, own), expert))
        return scores

    def _expert_scores(self, logits: Tensor, expert: int | None) -> Tensor:
        view = self.view(logits, expert)
        matrix = torch.as_tensor(self.design(logits.shape[0]).matrix(self.theta()[expert or 0]).T).to(logits)
        weight, bias = matrix.split([len(view.features), 1], 1)
        return view.to_classes(torch.addmm(bias, weight, view.features))

    def _by_loop(self, logits: Tensor, decision: Tensor, *, logarithm: bool) -> Tensor:
        """The same with its softmax by one compiled loop over the voxels."""
        from segcal.compiled import affine_maps as loop  # brings numba, which only those who need it wait for
        from segcal.compiled.flat_rows import flat_rows

        n_classes, n_voxels = logits.shape
        design = self.design(n_classes)
        # (map, column, feature and constant)
        matrices = np.stack([design.matrix(theta).T for theta in self.theta()]).astype(np.float32)
        weights, biases = np.ascontiguousarray(matrices[..., :-1]), np.ascontiguousarray(matrices[..., -1])
        chosen = self._map_indices(decision, n_classes, n_voxels)
        out = torch.empty((n_classes, n_voxels), dtype=torch.float32, device="cpu")
        sees, gives = loop.SEES.index(self.sees), loop.LOG_PROBS if logarithm else loop.PROBS
        loop.affine_maps(*flat_rows(logits), chosen, weights, biases, sees, gives, out.numpy())
        return out

    def _map_indices(self, decision: Tensor, n_classes: int, n_voxels: int) -> NDArray[np.integer]:
        """Which map each voxel takes; empty where there is one for all."""
        if not self.class_conditional:
            return np.empty(0, np.uint8)
        self._check_decision(decision, n_classes, n_voxels)
        # One type for everybody: the loop is compiled, and kept for later runs, once.
        chosen = decision.to(torch.uint8 if n_classes <= 256 else torch.int64)
        return chosen.contiguous().numpy()

    def _check_decision(self, decision: Tensor, n_classes: int, n_voxels: int) -> None:
        if decision.shape != (n_voxels,) or self.n_classes != n_classes:
            raise ParameterError(
                f"{self.name}: {n_voxels} voxels of {n_classes} classes, a decision of shape {tuple(decision.shape)} "
                f"and maps for {self.n_classes} classes; expected one decision a voxel, and one map a class"
            )
        if decision.numel() and not 0 <= int(decision.min()) <= int(decision.max()) < n_classes:
            raise ParameterError(
                f"{self.name}: decisions reach from {int(decision.min())} to {int(decision.max())}, expected 0 to "
                f"{n_classes - 1}; voxels that do not count have to be left out"
            )


def diagonal(values: Vector | list[float]) -> Matrix:
    """A sparse diagonal matrix."""
    return sparse.diags_array(np.asarray(values, dtype=np.float64), format="csr")


def nothing(n_parameters: int) -> Matrix:
    """A penalty that penalises nothing."""
    return sparse.csr_array((n_parameters, n_parameters), dtype=np.float64)


def free(n_parameters: int) -> tuple[Vector, Vector]:
    """Lower and upper bounds that never bind."""
    return np.full(n_parameters, -np.inf), np.full(n_parameters, np.inf)


@cache
def _remembered_design(method: type[AffineCalibrator], n_classes: int) -> AffineDesign:
    return method.build_design(n_classes)
