"""Fitting ETS: a search over the one parameter that is not convex, the convex mixture solved inside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize

from segcal.calibrators.affine import Vector
from segcal.calibrators.ensemble_temperature import EnsembleTemperatureScaling
from segcal.calibrators.temperature import T_MAX, T_MIN
from segcal.fitting.exact import Solution
from segcal.fitting.newton import minimise
from segcal.fitting.rows import Rows

GRID = np.geomspace(T_MIN, T_MAX, 41)
"""Temperatures tried to find the valley, on at most `GRID_ROWS` rows; its bottom is found on all of them."""
GRID_ROWS = 10_000
MAX_MULTIPLIERS = 20
NEAR = 1.25
"""A polishing step changes T by at most this factor."""
UNIFORM_MIN = 1e-12
"""The uniform part keeps at least this weight, so a confidently wrong voxel costs a finite loss."""


@dataclass(frozen=True, slots=True, eq=False)
class MixtureProblem:
    """Mean NLL of w1 S(z/T)_y + w2 S(z)_y + w3/C, plus a linear term in (1/T, w1, w2, w3).

    Attributes:
        rows: weighted voxels.
        linear: (4,), zero but for polishing.
    """

    rows: Rows
    linear: Vector

    def best_mixture(self, temperature: float, start: Vector) -> tuple[float, Vector]:
        """The convex inner problem: objective and weights on the simplex for one T."""
        weights = self.rows.weights.cpu().numpy() / max(self.rows.n_voxels, 1.0)
        parts = self._parts(temperature)
        lower, mixture, multiplier = np.array([0.0, 0.0, UNIFORM_MIN]), start, float(weights.sum())
        # sum(w) = 1 needs no constraint: with the multiplier mass - linear'w, a minimum over w >= 0 lies on the
        # simplex by Euler's theorem. The multiplier depends on w only through the small linear term.
        for _ in range(MAX_MULTIPLIERS):
            inner = _Mixing(parts, weights, self.linear[1:] + multiplier)
            mixture = minimise(inner, mixture, lower, np.full(3, 2.0)).theta
            before, multiplier = multiplier, float(weights.sum() - self.linear[1:] @ mixture)
            if abs(multiplier - before) <= 1e-12:
                break
        mixture = mixture / mixture.sum()
        value = -weights @ np.log(parts @ mixture) + self.linear[0] / temperature + self.linear[1:] @ mixture
        return float(value), mixture

    def gradient(self, temperature: float, mixture: Vector) -> Vector:
        """(4,) gradient of the data term in (1/T, w1, w2, w3)."""
        total = np.zeros(4)
        scale = 1.0 / max(self.rows.n_voxels, 1.0)
        for part in self.rows.blocks():
            logits, picked = self.rows.logits[part].to(torch.float64), self.rows.labels[part].unsqueeze(1)
            soft = torch.softmax(logits / temperature, 1)
            tempered, plain = soft.gather(1, picked), torch.softmax(logits, 1).gather(1, picked)
            # d S(beta z)_y / d beta = S_y (z_y - E z)
            slope = tempered * (logits.gather(1, picked) - (soft * logits).sum(1, keepdim=True))
            uniform = torch.full_like(plain, 1.0 / logits.shape[1])
            mixed = mixture[0] * tempered + mixture[1] * plain + mixture[2] * uniform
            columns = torch.cat([mixture[0] * slope, tempered, plain, uniform], 1) / mixed
            total -= scale * (self.rows.weights[part] @ columns).cpu().numpy()
        return total

    def _parts(self, temperature: float) -> Vector:
        """(n, 3): probability of the label under the tempered, the plain and the uniform distribution."""
        columns = []
        for part in self.rows.blocks():
            logits, picked = self.rows.logits[part].to(torch.float64), self.rows.labels[part].unsqueeze(1)
            tempered = torch.softmax(logits / temperature, 1).gather(1, picked)
            plain = torch.softmax(logits, 1).gather(1, picked)
            columns.append(torch.cat([tempered, plain, torch.full_like(plain, 1.0 / logits.shape[1])], 1))
        return torch.cat(columns).cpu().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class _Mixing:
    """-sum_i weight_i log(w . part_i) + slope . w, as the Newton solver wants it."""

    parts: Vector
    weights: Vector
    slope: Vector

    def value(self, theta: Vector) -> float:
        return float(-self.weights @ np.log(self.parts @ theta) + self.slope @ theta)

    def value_and_gradient(self, theta: Vector) -> tuple[float, Vector]:
        value, gradient, _ = self.derivatives(theta)
        return value, gradient

    def derivatives(self, theta: Vector) -> tuple[float, Vector, Vector]:
        mixed = self.parts @ theta
        relative = self.weights / mixed
        hessian = self.parts.T @ (self.parts * (relative / mixed)[:, None])
        value = float(-self.weights @ np.log(mixed) + self.slope @ theta)
        return value, -self.parts.T @ relative + self.slope, hessian


def solve_mixture(
    rows: Rows, *, linear: Vector | None = None, near: EnsembleTemperatureScaling | None = None
) -> Solution:
    """Fit ETS: a grid over T finds the valley, a bounded search its bottom.

    Args:
        rows: weighted voxels.
        linear: (4,) extra linear term in (1/T, w1, w2, w3), see `segcal.fitting.polish`.
        near: look around this fit only; the problem is not convex and a linear term means nothing far away.
    """
    problem = MixtureProblem(rows, np.zeros(4) if linear is None else linear)
    if near is None:
        start = np.array([0.9, 0.09, 0.01])
        low, high = _valley(rows, start)
    else:
        start = np.array(near.mixture)
        low, high = max(near.temperature / NEAR, T_MIN), min(near.temperature * NEAR, T_MAX)

    def value(log_t: float) -> float:
        return problem.best_mixture(float(np.exp(log_t)), start)[0]

    refined = optimize.minimize_scalar(
        value, bounds=(np.log(low), np.log(high)), method="bounded", options={"xatol": 1e-8}
    )
    temperature = float(np.exp(refined.x))
    objective, weights = problem.best_mixture(temperature, start)
    first, second, third = (float(w) for w in weights)
    calibrator = EnsembleTemperatureScaling(temperature, (first, second, third))
    at_bound = not T_MIN * 1.01 < temperature < T_MAX / 1.01
    warnings = (f"ets: the temperature ran to its bound {temperature:g}",) if at_bound else ()
    return Solution(calibrator, objective, float("nan"), warnings)


def _valley(rows: Rows, start: Vector) -> tuple[float, float]:
    """Temperatures on both sides of the best one of the grid."""
    thinned = MixtureProblem(_thin(rows), np.zeros(4))
    best = int(np.argmin([thinned.best_mixture(float(t), start)[0] for t in GRID]))
    return float(GRID[max(best - 1, 0)]), float(GRID[min(best + 1, len(GRID) - 1)])


def _thin(rows: Rows) -> Rows:
    """Every k-th row, weighted to stand for all."""
    step = max(rows.n_rows // GRID_ROWS, 1)
    weights = rows.weights[::step] * step
    return Rows(rows.logits[::step], rows.labels[::step], rows.decision[::step], weights, rows.counts)
