"""The default solver: the global optimum of every convex calibrator, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from segcal.calibrators import Calibrator
from segcal.calibrators.affine import AffineCalibrator, AffineDesign, Vector
from segcal.calibrators.temperature import TemperatureScaling
from segcal.fitting.newton import DENSE_LIMIT, Minimum, minimise
from segcal.fitting.problem import Penalty, SoftmaxProblem, softmax_problem
from segcal.fitting.rows import Rows

KKT_PROMISE = 1e-6
"""What `exact` promises: projected gradient norm on its own data."""
MANY_ROWS, THINNED = 1 << 18, 32
"""With more rows than this, the optimum of every 32nd row is where Newton begins: most steps are then cheap ones."""
FEW_VOXELS = 500
"""An expert fitted on fewer voxels is named in the warnings."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A fitted calibrator with the evidence that it is the optimum.

    Attributes:
        calibrator: the result.
        objective: penalised mean NLL, averaged over experts by the voxels they see.
        kkt: largest projected gradient norm over the experts.
        warnings: what a user has to know: starved experts, parameters at a bound.
    """

    calibrator: Calibrator
    objective: float
    kkt: float
    warnings: tuple[str, ...] = ()


class ExactSolver:
    """Fits one method on one set of rows, under as many penalties as tuning asks for."""

    def __init__(self, method: type[AffineCalibrator], rows: Rows, *, class_names: Sequence[str] | None = None) -> None:
        self.method = method
        self.n_classes = rows.n_classes
        self._experts = [
            _Expert(index, expert_name(method, index, class_names), seen, softmax_problem(method, seen))
            for index, seen in experts_of(method, rows)
        ]
        self._n_voxels = rows.n_voxels

    def solve(
        self, penalty: Penalty, *, start: AffineCalibrator | None = None, linear: Vector | None = None
    ) -> Solution:
        """The global optimum.

        Args:
            penalty: lambda and mu.
            start: where to begin (the optimum does not depend on it), e.g. the fit of another penalty.
            linear: (E, P) extra linear term per expert (see `segcal.fitting.polish`).
        """
        design = self.method.design(self.n_classes)
        theta = np.tile(design.start, (design.n_experts, 1))
        begin = theta.copy() if start is None else start.theta()
        objective, kkt, warnings = 0.0, 0.0, list[str]()
        for expert in self._experts:
            warnings.extend(starved(expert.name, expert.rows))
            if expert.rows.n_rows == 0:
                continue
            problem = expert.problem.with_penalty(penalty, None if linear is None else linear[expert.index])
            first = np.clip(begin[expert.index], design.lower, design.upper)
            if start is not None and first.size <= DENSE_LIMIT:
                expert.problem.anchor(first)
            if start is None and expert.rows.n_rows > MANY_ROWS:
                first = minimise(problem.thinned(THINNED), first, design.lower, design.upper).theta
            minimum = minimise(problem, first, design.lower, design.upper)
            theta[expert.index] = minimum.theta
            objective += expert.rows.n_voxels / self._n_voxels * minimum.value
            kkt = max(kkt, minimum.kkt)
            warnings.extend(_doubts(expert, minimum, self.method, design))
        return Solution(self.method.from_theta(theta, self.n_classes), objective, kkt, tuple(warnings))


@dataclass(frozen=True, slots=True, eq=False)
class _Expert:
    index: int
    name: str
    rows: Rows
    problem: SoftmaxProblem


def experts_of(method: type[AffineCalibrator], rows: Rows) -> Iterator[tuple[int, Rows]]:
    """The independent problems of a method: one, or one per predicted class."""
    if not method.class_conditional:
        yield 0, rows
        return
    for expert in range(rows.n_classes):
        yield expert, rows.of_expert(expert)


def expert_name(method: type[AffineCalibrator], expert: int, class_names: Sequence[str] | None) -> str:
    if not method.class_conditional:
        return method.name
    label = str(expert) if class_names is None else class_names[expert]
    return f"{method.name}: the expert of class `{label}`"


def starved(name: str, rows: Rows) -> Iterator[str]:
    """What to say about an expert that has too little to learn from."""
    if rows.n_rows == 0:
        yield f"{name} saw no voxel and stays at identity: the class was never predicted here"
    elif rows.n_voxels < FEW_VOXELS:
        yield f"{name} was fitted on only {rows.n_voxels:.0f} voxels"


def _doubts(expert: _Expert, minimum: Minimum, method: type[AffineCalibrator], design: AffineDesign) -> Iterator[str]:
    name = expert.name
    if minimum.kkt > KKT_PROMISE:
        yield f"{name} stopped at a projected gradient of {minimum.kkt:.1e}, above {KKT_PROMISE:g}"
    if method is TemperatureScaling and minimum.theta[0] in (design.lower[0], design.upper[0]):
        yield f"{name}: the temperature ran to its bound {1 / minimum.theta[0]:g}; the labels are separable or constant"
    if expert.problem.separates(minimum.theta):
        yield f"{name} gets every calibration voxel right (separable data); only the ridge or a bound keeps it finite"
