"""The same convex problems as `segcal.fitting.exact` where there are many classes: no Hessian is ever formed.

The dense solver of the core builds a (d C, d C) Hessian, C^4 numbers: right for a segmentation's handful of classes,
out of reach at a hundred. Here Newton's equation is solved by conjugate gradients, which only need products with the
Hessian, two matrix products over the rows each; temperature scaling needs two sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from segcal.calibrators.affine import AffineCalibrator, AffineDesign, Matrix, Vector
from segcal.calibrators.matrix import ConstrainedMatrixScaling, VectorScaling
from segcal.calibrators.temperature import TemperatureScaling
from segcal.fitting.exact import KKT_PROMISE, Solution, expert_name, experts_of, starved
from segcal.fitting.newton import minimise
from segcal.fitting.problem import Penalty, expert_of
from segcal.fitting.rows import Rows

MAX_ITERATIONS = 100
MAX_PRODUCTS = 400
"""Products with the Hessian for one Newton step."""

Precondition = Callable[[Vector], Vector]


def solve_matrix_free(
    method: type[AffineCalibrator],
    rows: Rows,
    penalty: Penalty,
    *,
    start: AffineCalibrator | None = None,
    tolerance: float = KKT_PROMISE / 2,
) -> Solution:
    """The global optimum of a method without bounds (ts, vs, ms, ms_c, dc, cdc).

    Args:
        method: temperature scaling, or a method whose parameters are free.
        rows: (n, C) float64 logits with labels.
        penalty: lambda and mu.
        start: where to begin; the optimum does not depend on it.
        tolerance: largest entry of the gradient that is left.
    """
    design = method.design(rows.n_classes)
    theta = np.tile(design.start, (design.n_experts, 1))
    begin = theta.copy() if start is None else start.theta()
    objective, kkt, warnings = 0.0, 0.0, list[str]()
    for index, seen in experts_of(method, rows):
        name = expert_name(method, index, None)
        warnings.extend(starved(name, seen))
        if seen.n_rows == 0:
            continue
        if method is TemperatureScaling:
            least = minimise(_Temperature(seen), begin[index], design.lower, design.upper)
            theta[index], value, slope = least.theta, least.value, least.kkt
            if theta[index, 0] in (design.lower[0], design.upper[0]):
                warnings.append(f"{name}: the temperature ran to its bound {1 / theta[index, 0]:g}")
        else:
            theta[index], value, slope = _newton_cg(_problem(method, design, seen, penalty), begin[index], tolerance)
        objective += seen.n_voxels / rows.n_voxels * value
        kkt = max(kkt, slope)
        if slope > max(KKT_PROMISE, tolerance):
            warnings.append(f"{name} stopped at a gradient of {slope:.1e}, above {KKT_PROMISE:g}")
    return Solution(method.from_theta(theta, rows.n_classes), objective, kkt, tuple(warnings))


class _Map(Protocol):
    """A linear map from parameters to (n, C) scores, and its adjoint."""

    def forward(self, theta: Vector) -> Tensor: ...

    def adjoint(self, residual: Tensor) -> Vector: ...

    def preconditioner(self, soft: Tensor, stiffness: Matrix) -> Precondition:
        """An easy inverse of about the Hessian: the part of every class by itself."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Diagonal:
    """Vector scaling: z a + b without a (C, C) matrix full of zeros."""

    logits: Tensor

    def forward(self, theta: Vector) -> Tensor:
        scale, bias = torch.as_tensor(theta, device="cpu").split(self.logits.shape[1])
        return torch.addcmul(bias, self.logits, scale)

    def adjoint(self, residual: Tensor) -> Vector:
        return torch.cat([torch.einsum("nc,nc->c", self.logits, residual), residual.sum(0)]).numpy()

    def preconditioner(self, soft: Tensor, stiffness: Matrix) -> Precondition:
        spread = soft * (1 - soft) / len(soft)
        stiff = stiffness.diagonal()
        n = self.logits.shape[1]
        aa = torch.einsum("nc,nc->c", self.logits.square(), spread).numpy() + stiff[:n]
        ab = torch.einsum("nc,nc->c", self.logits, spread).numpy()
        bb = spread.sum(0).numpy() + stiff[n:]
        determinant = aa * bb - ab * ab

        def apply(values: Vector) -> Vector:
            a, b = values[:n], values[n:]
            return np.concatenate([(bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant])

        return apply


@dataclass(frozen=True, slots=True, eq=False)
class _Dense:
    """x B, B a (d, C) matrix of parameters; others that reach no score may follow.

    Attributes:
        features: (n, d).
        place: (d, C) where in theta the entries of B are.
        n_parameters: length of theta.
    """

    features: Tensor
    place: NDArray[np.intp]
    n_parameters: int

    def forward(self, theta: Vector) -> Tensor:
        return self.features @ torch.as_tensor(theta[self.place], device="cpu")

    def adjoint(self, residual: Tensor) -> Vector:
        result = np.zeros(self.n_parameters)
        result[self.place] = (self.features.T @ residual).numpy()
        return result

    def preconditioner(self, soft: Tensor, stiffness: Matrix) -> Precondition:
        """The block of class c is a mean of q_c (1 - q_c) x x'; the product of the means is close enough."""
        moments = self.features.T @ self.features / len(self.features)
        spread = (soft * (1 - soft)).mean(0)
        blocks = spread[:, None, None] * moments
        for c, where in enumerate(self.place.T):
            blocks[c] += torch.as_tensor(stiffness[where][:, where].toarray(), device="cpu")
        factors = torch.linalg.cholesky(blocks)
        others = np.setdiff1d(np.arange(self.n_parameters), self.place)
        stiff = stiffness.diagonal()[others]

        def apply(values: Vector) -> Vector:
            result = np.zeros(self.n_parameters)
            right = torch.as_tensor(values[self.place].T.copy(), device="cpu").unsqueeze(2)
            result[self.place] = torch.cholesky_solve(right, factors).squeeze(2).numpy().T
            result[others] = values[others] / stiff
            return result

        return apply


class _Problem:
    """Mean NLL plus penalties, with products with its Hessian; the last softmax is kept for them."""

    def __init__(self, linear: _Map, columns: Tensor, design: AffineDesign, penalty: Penalty) -> None:
        self._map = linear
        self._columns = columns.unsqueeze(1)
        self._start = design.start
        self._quadratic = penalty.lambda_ * design.off_diagonal + penalty.mu * design.bias
        self._ridge = design.ridge
        self._stiffness = sparse.csr_array(2.0 * (self._quadratic + self._ridge))
        self._soft = torch.empty(0, dtype=torch.float64, device=columns.device)

    def value(self, theta: Vector) -> float:
        log_q = torch.log_softmax(self._map.forward(theta), 1)
        away = theta - self._start
        bend = np.asarray(self._quadratic @ theta), np.asarray(self._ridge @ away)
        penalty = float(theta @ bend[0] + away @ bend[1])
        self._soft = log_q
        return penalty - float(log_q.gather(1, self._columns).mean())

    def linearise(self, theta: Vector) -> tuple[float, Vector]:
        """Objective and gradient; `curvature_along` and `preconditioner` then hold for this theta."""
        value = self.value(theta)
        soft = self._soft.exp_()
        residual = soft / len(soft)
        hit = torch.full(self._columns.shape, -1.0 / len(soft), dtype=torch.float64, device=soft.device)
        residual.scatter_add_(1, self._columns, hit)
        slope = 2.0 * (self._quadratic @ theta + self._ridge @ (theta - self._start))
        return value, self._map.adjoint(residual) + slope

    def curvature_along(self, direction: Vector) -> Vector:
        """H v = J' (diag(q) - q q') J v / n + penalties."""
        soft = self._soft
        moved = self._map.forward(direction)
        moved -= (soft * moved).sum(1, keepdim=True)
        moved *= soft
        moved /= len(soft)
        return self._map.adjoint(moved) + self._stiffness @ direction

    def preconditioner(self) -> Precondition:
        return self._map.preconditioner(self._soft, self._stiffness)


def _problem(method: type[AffineCalibrator], design: AffineDesign, rows: Rows, penalty: Penalty) -> _Problem:
    if method is VectorScaling:
        return _Problem(_Diagonal(rows.logits), rows.labels, design, penalty)
    n = rows.n_classes
    view = method.view(rows.logits.T.contiguous(), expert_of(method, rows))
    features, place = view.complete(design).T.contiguous(), np.arange(n * (n + 1)).reshape(n + 1, n)
    if method is ConstrainedMatrixScaling:
        # theta = (W without its last column row by row, s, b). With equal row sums W z = W_free (z - z_C) + s z_C, and
        # the last term is the same for all classes: s reaches the penalty only.
        features = torch.cat([features[:, : n - 1] - features[:, n - 1 : n], features[:, n:]], 1)
        free = np.arange(n * (n - 1)).reshape(n, n - 1).T
        place = np.concatenate([free, n * (n - 1) + 1 + np.arange(n)[None]])
    return _Problem(_Dense(features, place, design.n_parameters), view.columns_of(rows.labels), design, penalty)


def _newton_cg(problem: _Problem, start: Vector, tolerance: float) -> tuple[Vector, float, float]:
    """(theta, objective, largest entry of the gradient)."""
    theta = start
    value, gradient = problem.linearise(theta)
    first = float(np.linalg.norm(gradient))
    for _ in range(MAX_ITERATIONS):
        if np.abs(gradient).max() <= tolerance:
            break
        # Loose at first, sharper as the optimum comes near: quadratic convergence without wasted products.
        step = _conjugate_gradients(problem, gradient, min(0.1, float(np.linalg.norm(gradient)) / max(first, 1e-300)))
        length, slope = 1.0, float(gradient @ step)
        noise = 1e-13 * max(1.0, abs(value))
        while problem.value(theta + length * step) > value + 1e-4 * length * slope + noise and length > 1e-10:
            length *= 0.5
        theta = theta + length * step
        value, gradient = problem.linearise(theta)
    return theta, value, float(np.abs(gradient).max(initial=0.0))


def _conjugate_gradients(problem: _Problem, gradient: Vector, relative: float) -> Vector:
    """Solve H step = -gradient to a relative residual."""
    precondition = problem.preconditioner()
    step, residual = np.zeros_like(gradient), -gradient
    direction = eased = precondition(residual)
    weight = float(residual @ eased)
    enough = relative**2 * weight
    for _ in range(MAX_PRODUCTS):
        if weight <= enough:
            break
        bent = problem.curvature_along(direction)
        length = weight / float(direction @ bent)
        step, residual = step + length * direction, residual - length * bent
        eased = precondition(residual)
        before, weight = weight, float(residual @ eased)
        direction = eased + weight / before * direction
    return step


@dataclass(frozen=True, slots=True, eq=False)
class _Temperature:
    """NLL in 1/T: convex, with two derivatives that are plain sums."""

    rows: Rows

    def value(self, theta: Vector) -> float:
        return self._sums(float(theta[0]))["value"]

    def value_and_gradient(self, theta: Vector) -> tuple[float, Vector]:
        sums = self._sums(float(theta[0]))
        return sums["value"], np.array([sums["slope"]])

    def derivatives(self, theta: Vector) -> tuple[float, Vector, Vector]:
        sums = self._sums(float(theta[0]))
        return sums["value"], np.array([sums["slope"]]), np.array([[sums["curvature"]]])

    def _sums(self, inverse: float) -> Mapping[str, float]:
        rows = self.rows
        value = slope = curvature = 0.0
        for part in rows.blocks():
            logits = rows.logits[part]
            picked = logits.gather(1, rows.labels[part].unsqueeze(1))
            behind = logits - picked
            soft = torch.softmax(behind * inverse, 1)
            mean = (soft * behind).sum(1, keepdim=True)
            value += float(torch.logsumexp(behind * inverse, 1).sum())
            slope += float(mean.sum())
            curvature += float((soft * (behind - mean).square()).sum())
        n = max(rows.n_voxels, 1.0)
        return {"value": value / n, "slope": slope / n, "curvature": curvature / n}
