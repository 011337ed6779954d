"""The convex problem every affine calibrator is fitted by: weighted mean NLL plus a quadratic penalty."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.affine import AffineCalibrator, AffineDesign, Vector
from segcal.errors import ParameterError
from segcal.fitting.curvature import Curvature
from segcal.fitting.rows import Rows


@dataclass(frozen=True, slots=True)
class Penalty:
    """SEG eq. 15: lambda on the off-diagonal weights, mu on the biases. The fixed ridge always comes on top."""

    lambda_: float = 0.0
    mu: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxProblem:
    """min over theta of  sum_i w_i NLL_i(theta) + theta' Q theta + ridge(theta - start) + linear' theta.

    Attributes:
        design: the constant part.
        blocks: per fixed block of rows: features (d, n) float64, label columns (n,), weights (n,) summing to about 1.
        quadratic: (P, P) dense Q.
        ridge: (P, P) dense.
        linear: (P,), zero but for polishing, where it carries what the sample's gradient lacks.
        anchored: Hessian of the data term at a point that many solves start from, see `anchor`.
    """

    design: AffineDesign
    blocks: tuple[tuple[Tensor, Tensor, Tensor], ...]
    quadratic: Vector
    ridge: Vector
    linear: Vector
    anchored: dict[bytes, Vector] = field(default_factory=dict, repr=False)

    def value(self, theta: Vector) -> float:
        """The objective."""
        return self.nll(theta) + self._penalty(theta)

    def nll(self, theta: Vector) -> float:
        """The data term alone."""
        total = 0.0
        for features, columns, weights in self.blocks:
            total += float(weights @ _softmax(self._matrix(theta, features) @ features, columns).losses)
        return total

    def separates(self, theta: Vector) -> bool:
        """Whether the label of every row scores highest: then ever larger weights would fit ever better."""
        return all(
            bool(((self._matrix(theta, features) @ features).max(0).indices == columns).all())
            for features, columns, _ in self.blocks
        )

    def value_and_gradient(self, theta: Vector) -> tuple[float, Vector]:
        """The objective and its gradient (P,)."""
        value, gradient, _ = self._sums(theta, with_hessian=False)
        return value + self._penalty(theta), gradient + self._penalty_gradient(theta)

    def nll_and_gradient(self, theta: Vector) -> tuple[float, Vector]:
        """The data term alone, with its gradient (P,)."""
        value, gradient, _ = self._sums(theta, with_hessian=False)
        return value, gradient

    def derivatives(self, theta: Vector) -> tuple[float, Vector, Vector]:
        """Objective, gradient (P,) and Hessian (P, P)."""
        known = self.anchored.get(theta.tobytes())
        value, gradient, hessian = self._sums(theta, with_hessian=known is None)
        hessian = hessian if known is None else known
        curvature = 2.0 * (self.quadratic + self.ridge)
        return value + self._penalty(theta), gradient + self._penalty_gradient(theta), hessian + curvature

    def with_penalty(self, penalty: Penalty, linear: Vector | None = None) -> SoftmaxProblem:
        """The same rows under another penalty and linear term."""
        quadratic = penalty.lambda_ * self.design.off_diagonal + penalty.mu * self.design.bias
        none = np.zeros(self.design.n_parameters)
        return replace(self, quadratic=quadratic.toarray(), linear=none if linear is None else linear)

    def anchor(self, theta: Vector) -> None:
        """Remember the Hessian of the data term at `theta`, for this problem and its likes under other penalties."""
        if theta.tobytes() not in self.anchored:
            self.anchored.clear()
            self.anchored[theta.tobytes()] = self._sums(theta, with_hessian=True)[2]

    def thinned(self, every: int) -> SoftmaxProblem:
        """The same problem on every so-manieth row of each block, for a first guess."""
        blocks = [
            (features[:, ::every].contiguous(), columns[::every].contiguous(), weights[::every] * every)
            for features, columns, weights in self.blocks
        ]
        return replace(self, blocks=tuple(blocks), anchored={})

    def _penalty(self, theta: Vector) -> float:
        away = theta - self.design.start
        return float(theta @ self.quadratic @ theta + away @ self.ridge @ away + self.linear @ theta)

    def _penalty_gradient(self, theta: Vector) -> Vector:
        return 2.0 * (self.quadratic @ theta + self.ridge @ (theta - self.design.start)) + self.linear

    def _matrix(self, theta: Vector, like: Tensor) -> Tensor:
        """(C, d), what the features are multiplied with."""
        return torch.as_tensor(self.design.matrix(theta).T.copy()).to(like)

    def _sums(self, theta: Vector, *, with_hessian: bool) -> tuple[float, Vector, Vector]:
        d, n_columns = self.design.shape
        value = 0.0
        gradient = np.zeros((n_columns, d))
        curvature = Curvature(self.design) if with_hessian else None
        for features, columns, weights in self.blocks:
            softmax = _softmax(self._matrix(theta, features) @ features, columns)
            value += float(weights @ softmax.losses)
            weighted = softmax.probs.mul_(weights)
            if curvature is not None:
                curvature.add(features, weighted, weights)
            residual = weighted.scatter_add_(0, columns.unsqueeze(0), -weights.unsqueeze(0))
            gradient += (residual @ features.T).cpu().numpy()
        slope = np.asarray(self.design.embed.T @ gradient.T.ravel())
        return value, slope, np.zeros((0, 0)) if curvature is None else curvature.hessian()


class _Softmax(NamedTuple):
    """Of one block: (C, n) probabilities and (n,) losses of the labels."""

    probs: Tensor
    losses: Tensor


def _softmax(scores: Tensor, columns: Tensor) -> _Softmax:
    """Softmax over the first axis, in place: one exponential an entry, one logarithm a row."""
    scores -= scores.amax(0)
    picked = scores.gather(0, columns.unsqueeze(0)).squeeze(0)
    probs = scores.exp_()
    total = probs.sum(0)
    return _Softmax(probs.div_(total), total.log_().sub_(picked))


def softmax_problem(method: type[AffineCalibrator], rows: Rows, penalty: Penalty = Penalty()) -> SoftmaxProblem:
    """The problem of one expert (or of the only map) on the rows it sees; the mean is over `rows.n_voxels`."""
    design = method.design(rows.n_classes)
    scale = 1.0 / max(rows.n_voxels, 1.0)
    expert = expert_of(method, rows)
    blocks = []
    for part in rows.blocks():
        view = method.view(rows.logits[part].to(torch.float64).T.contiguous(), expert)
        blocks.append((view.complete(design), view.columns_of(rows.labels[part]), rows.weights[part] * scale))
    nothing = np.zeros((design.n_parameters, design.n_parameters))
    problem = SoftmaxProblem(design, tuple(blocks), nothing, design.ridge.toarray(), nothing[0])
    return problem.with_penalty(penalty)


def expert_of(method: type[AffineCalibrator], rows: Rows) -> int | None:
    """The class all rows were decided as, for methods that have a map per class."""
    if not method.class_conditional or not rows.n_rows:
        return None
    first, last = (int(bound) for bound in rows.decision.aminmax())
    if first != last:
        raise ParameterError(f"{method.name}: every predicted class has a problem of its own; use Rows.of_expert")
    return first
