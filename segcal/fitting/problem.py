"""The convex problem every affine calibrator is fitted by: weighted mean NLL plus a quadratic penalty."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.affine import AffineCalibrator, AffineDesign, Vector
from segcal.errors import ParameterError
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
        blocks: per fixed block of rows: features (n, d) float64, label columns (n,), weights (n,) summing to about 1.
        quadratic: (P, P) dense Q.
        ridge: (P, P) dense.
        linear: (P,), zero but for polishing, where it carries what the sample's gradient lacks.
    """

    design: AffineDesign
    blocks: tuple[tuple[Tensor, Tensor, Tensor], ...]
    quadratic: Vector
    ridge: Vector
    linear: Vector

    def value(self, theta: Vector) -> float:
        """The objective."""
        return self.nll(theta) + self._penalty(theta)

    def nll(self, theta: Vector) -> float:
        """The data term alone."""
        total = 0.0
        for features, columns, weights in self.blocks:
            log_q = torch.log_softmax(features @ self._matrix(theta, features), 1)
            total -= float(weights @ log_q.gather(1, columns.unsqueeze(1)).squeeze(1))
        return total

    def separates(self, theta: Vector) -> bool:
        """Whether the label of every row scores highest: then ever larger weights would fit ever better."""
        return all(
            bool(((features @ self._matrix(theta, features)).argmax(1) == columns).all())
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
        value, gradient, hessian = self._sums(theta, with_hessian=True)
        curvature = 2.0 * (self.quadratic + self.ridge)
        return value + self._penalty(theta), gradient + self._penalty_gradient(theta), hessian + curvature

    def with_penalty(self, penalty: Penalty, linear: Vector | None = None) -> SoftmaxProblem:
        """The same rows under another penalty and linear term."""
        quadratic = penalty.lambda_ * self.design.off_diagonal + penalty.mu * self.design.bias
        none = np.zeros(self.design.n_parameters)
        return replace(self, quadratic=quadratic.toarray(), linear=none if linear is None else linear)

    def _penalty(self, theta: Vector) -> float:
        away = theta - self.design.start
        return float(theta @ self.quadratic @ theta + away @ self.ridge @ away + self.linear @ theta)

    def _penalty_gradient(self, theta: Vector) -> Vector:
        return 2.0 * (self.quadratic @ theta + self.ridge @ (theta - self.design.start)) + self.linear

    def _matrix(self, theta: Vector, like: Tensor) -> Tensor:
        return torch.as_tensor(self.design.matrix(theta)).to(like)

    def _sums(self, theta: Vector, *, with_hessian: bool) -> tuple[float, Vector, Vector]:
        d, n_columns = self.design.shape
        value = 0.0
        gradient = np.zeros((d, n_columns))
        hessian = np.zeros((d * n_columns, d * n_columns)) if with_hessian else np.zeros((0, 0))
        for features, columns, weights in self.blocks:
            log_q = torch.log_softmax(features @ self._matrix(theta, features), 1)
            value -= float(weights @ log_q.gather(1, columns.unsqueeze(1)).squeeze(1))
            weighted = log_q.exp_().mul_(weights.unsqueeze(1))
            if with_hessian:
                hessian += _block_hessian(features, weighted, weights).cpu().numpy()
            residual = weighted.scatter_add(1, columns.unsqueeze(1), -weights.unsqueeze(1))
            gradient += (features.T @ residual).cpu().numpy()
        embed = self.design.embed
        if with_hessian:
            hessian = np.asarray(embed.T @ np.asarray(embed.T @ hessian).T)
        return value, np.asarray(embed.T @ gradient.ravel()), hessian


def softmax_problem(method: type[AffineCalibrator], rows: Rows, penalty: Penalty = Penalty()) -> SoftmaxProblem:
    """The problem of one expert (or of the only map) on the rows it sees; the mean is over `rows.n_voxels`."""
    design = method.design(rows.n_classes)
    scale = 1.0 / max(rows.n_voxels, 1.0)
    expert = _expert(method, rows)
    blocks = []
    for part in rows.blocks():
        view = method.view(rows.logits[part].to(torch.float64).T.contiguous(), expert)
        blocks.append((view.features.T.contiguous(), view.columns_of(rows.labels[part]), rows.weights[part] * scale))
    nothing = np.zeros((design.n_parameters, design.n_parameters))
    problem = SoftmaxProblem(design, tuple(blocks), nothing, design.ridge.toarray(), nothing[0])
    return problem.with_penalty(penalty)


def _expert(method: type[AffineCalibrator], rows: Rows) -> int | None:
    """The class all rows were decided as, for methods that have a map per class."""
    if not method.class_conditional or not rows.n_rows:
        return None
    first, last = (int(bound) for bound in rows.decision.aminmax())
    if first != last:
        raise ParameterError(f"{method.name}: every predicted class has a problem of its own; use Rows.of_expert")
    return first


def _block_hessian(features: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    """(d C, d C) Hessian of the weighted NLL in B: sum_i (diag(w q) - w q q') kron x x'.

    Args:
        features: (n, d).
        weighted: (n, C), w_i q_i.
        weights: (n,), w_i; rows of weight 0 drop out.
    """
    d, n_columns = features.shape[1], weighted.shape[1]
    # z = x kron (w q) / sqrt(w): one symmetric product gives the rank-one part.
    root = torch.where(weights > 0, weights, torch.ones_like(weights)).rsqrt().unsqueeze(1)
    z = (features.unsqueeze(2) * (weighted * root).unsqueeze(1)).reshape(-1, d * n_columns)
    hessian = -(z.T @ z).reshape(d, n_columns, d, n_columns)
    for column in range(n_columns):
        hessian[:, column, :, column] += features.T @ (features * weighted[:, column : column + 1])
    return hessian.reshape(d * n_columns, d * n_columns)
