"""Projected Newton for smooth convex problems with bounds (Bertsekas 1982): few, exact steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize

from segcal.calibrators.affine import Vector

TOLERANCE = 1e-8
"""Projected gradient norm at which a fit stops; a hundred times below what is promised."""
MAX_ITERATIONS = 200
GOOD_STEP = 0.3
"""A step that shrinks the projected gradient norm to this share of it, or less, keeps the Hessian for the next one."""
DENSE_LIMIT = 1500
"""Above this many parameters the Hessian is not formed and L-BFGS-B takes over."""


class ConvexProblem(Protocol):
    """What the solver asks of a problem."""

    def value(self, theta: Vector) -> float: ...

    def value_and_gradient(self, theta: Vector) -> tuple[float, Vector]: ...

    def derivatives(self, theta: Vector) -> tuple[float, Vector, Vector]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """Where the solver stopped.

    Attributes:
        theta: (P,) parameters.
        value: objective there.
        kkt: largest entry of theta - clip(theta - gradient): 0 exactly at the optimum.
        n_iterations: Newton steps taken.
    """

    theta: Vector
    value: float
    kkt: float
    n_iterations: int


def minimise(problem: ConvexProblem, start: Vector, lower: Vector, upper: Vector) -> Minimum:
    """The minimum of a convex problem within bounds, to a projected gradient norm of `TOLERANCE`."""
    theta = np.clip(start, lower, upper)
    if theta.size > DENSE_LIMIT:
        theta = _quasi_newton(problem, theta, lower, upper)
        value, gradient = problem.value_and_gradient(theta)
        return Minimum(theta, value, kkt_norm(theta, gradient, lower, upper), 0)
    value, gradient, hessian = problem.derivatives(theta)
    kkt, fresh = kkt_norm(theta, gradient, lower, upper), True
    for iteration in range(MAX_ITERATIONS):
        if kkt <= TOLERANCE:
            return Minimum(theta, value, kkt, iteration)
        step = _newton_step(theta, gradient, hessian, lower, upper, kkt)
        candidate = np.clip(theta + step, lower, upper)
        reached, slope = problem.value_and_gradient(candidate)
        noise = 1e-14 * max(1.0, abs(value))
        if reached > value + 1e-4 * float(gradient @ (candidate - theta)) + noise:
            if not fresh:
                value, gradient, hessian = problem.derivatives(theta)
                fresh = True
                continue
            shorter = _line_search(problem, theta, value, gradient, step, lower, upper)
            if shorter is None:
                # The objective is flat to rounding: no shorter step can lower it any further.
                return Minimum(theta, value, kkt, iteration)
            candidate, (reached, slope) = shorter, problem.value_and_gradient(shorter)
        before, kkt = kkt, kkt_norm(candidate, slope, lower, upper)
        theta, value, gradient, fresh = candidate, reached, slope, False
        # The Hessian costs several gradients; an old one is good enough while it brings the optimum near this fast.
        if kkt > max(GOOD_STEP * before, TOLERANCE):
            value, gradient, hessian = problem.derivatives(theta)
            fresh = True
    return Minimum(theta, value, kkt, MAX_ITERATIONS)


def kkt_norm(theta: Vector, gradient: Vector, lower: Vector, upper: Vector) -> float:
    """How far a projected unit gradient step would move: the distance from optimality."""
    return float(np.abs(theta - np.clip(theta - gradient, lower, upper)).max(initial=0.0))


def _newton_step(theta: Vector, gradient: Vector, hessian: Vector, lower: Vector, upper: Vector, kkt: float) -> Vector:
    """Newton in the free variables; variables held at a bound move along their own scaled gradient."""
    near = min(1e-3, kkt)
    held = ((theta <= lower + near) & (gradient > 0)) | ((theta >= upper - near) & (gradient < 0))
    step = -gradient / np.maximum(np.diag(hessian), 1e-12)
    free = ~held
    if free.any():
        step[free] = -_solve(hessian[np.ix_(free, free)], gradient[free])
    return step


def _solve(matrix: Vector, right: Vector) -> Vector:
    """Solve with a positive definite matrix; a whisper on the diagonal where rounding made it indefinite."""
    jitter = 0.0
    scale = float(np.abs(np.diag(matrix)).max())
    while True:
        try:
            return linalg.cho_solve(linalg.cho_factor(matrix + jitter * np.eye(len(matrix))), right)
        except linalg.LinAlgError:
            jitter = max(10 * jitter, 1e-14 * scale, 1e-300)


def _line_search(
    problem: ConvexProblem, theta: Vector, value: float, gradient: Vector, step: Vector, lower: Vector, upper: Vector
) -> Vector | None:
    """Halve the step, which is too long, until the projected point lowers the objective enough (Armijo).

    None if it never does.
    """
    length = 0.5
    for _ in range(49):
        candidate: NDArray[np.float64] = np.clip(theta + length * step, lower, upper)
        expected = float(gradient @ (candidate - theta))
        reached = problem.value(candidate)
        if reached <= value + 1e-4 * expected:
            return candidate
        length *= 0.5
    return None


def _quasi_newton(problem: ConvexProblem, start: Vector, lower: Vector, upper: Vector) -> Vector:
    result = optimize.minimize(
        problem.value_and_gradient,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=optimize.Bounds(lower, upper),
        options={"maxiter": 20_000, "maxfun": 40_000, "ftol": 0.0, "gtol": TOLERANCE, "maxcor": 30},
    )
    return np.asarray(result.x, dtype=np.float64)
