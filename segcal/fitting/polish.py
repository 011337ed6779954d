"""From the sample's optimum to that of all voxels, one read of the data per pass.

A pass sums the exact gradient of all voxels at the current parameters. The sample's problem gets the linear
term (full gradient - sample gradient)' theta, which makes its slope exact there, and is solved again. The
curvature comes from the sample and is nearly right, so the error shrinks by a large factor with each pass:
one pass is `polish`, passes until the full gradient vanishes are `full`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from segcal.calibrators import Calibrator
from segcal.calibrators.affine import AffineCalibrator, Vector
from segcal.calibrators.ensemble_temperature import EnsembleTemperatureScaling
from segcal.errors import DataError
from segcal.fitting.exact import KKT_PROMISE, ExactSolver, Solution, experts_of
from segcal.fitting.mixture import MixtureProblem, solve_mixture
from segcal.fitting.newton import TOLERANCE, kkt_norm
from segcal.fitting.problem import Penalty, softmax_problem
from segcal.fitting.rows import Rows

MAX_PASSES = 12

Key: TypeAlias = tuple[int, str]
"""A channel (0 unless the model has regions) and a method."""

Sums: TypeAlias = Mapping[Key, "Gradient"]
"""What one case, or all of them, adds to the gradient of every method."""

FullRead: TypeAlias = Callable[[Mapping[Key, Calibrator]], Iterable[Sums]]
"""Reads all voxels once: the sums of every method, case by case and always in the same order."""


@dataclass(frozen=True, slots=True, eq=False)
class Polished:
    """A solution on all voxels.

    Attributes:
        solution: as from the sample, with `kkt` measured on all voxels.
        nll: exact mean NLL over all voxels.
        n_passes: reads of the data it took.
    """

    solution: Solution
    nll: float
    n_passes: int


def polish(
    solutions: Mapping[Key, Solution],
    penalties: Mapping[Key, Penalty],
    samples: Sequence[Rows],
    read: FullRead,
    *,
    max_passes: int,
) -> dict[Key, Polished]:
    """Bring several fitted methods to the optimum of all voxels; they share every read.

    A method is finished when its projected gradient norm on all voxels is that of an exact fit; what is promised is
    enough once a pass no longer gains a digit. The last read only measures: gradient norm and NLL of what is returned
    are exact.

    Args:
        solutions: fits on the samples.
        penalties: that they were fitted with.
        samples: weighted rows by channel.
        read: reads all voxels.
        max_passes: corrections at most; one already divides the error by a large factor.
    """
    current, finished, best = dict(solutions), dict[Key, Polished](), dict[Key, Polished]()
    for n_pass in range(1, max_passes + 2):
        open_ = {key: solution.calibrator for key, solution in current.items() if key not in finished}
        sums = {key: gradient_of(each, samples[key[0]].n_classes) for key, each in open_.items()}
        # Case by case, so that the last digits do not depend on how many machines the cases are read on.
        for part in read(open_):
            for key, total in sums.items():
                total.merge(part[key])
        for key, total in sums.items():
            measured = replace(current[key], kkt=total.kkt(penalties[key]))
            before = best[key].solution.kkt if key in best else inf
            # A sample that misjudges the curvature badly could make a correction overshoot: the best point is kept.
            if measured.kkt < before:
                best[key] = Polished(measured, total.nll, n_pass)
            stalled = measured.kkt <= KKT_PROMISE and measured.kkt > 0.1 * before
            if measured.kkt <= TOLERANCE or stalled or n_pass > max_passes:
                finished[key] = replace(best[key], n_passes=n_pass)
            else:
                corrected = total.correct(samples[key[0]], penalties[key])
                current[key] = replace(corrected, warnings=measured.warnings)
        if len(finished) == len(current):
            break
    return finished


def sum_gradients(
    calibrators: Mapping[Key, Calibrator], n_classes: int, blocks: Iterable[tuple[int, Rows]]
) -> dict[Key, Gradient]:
    """The sums of every method over (channel, unweighted rows): what a `FullRead` gives for one case."""
    sums = {key: gradient_of(each, n_classes) for key, each in calibrators.items()}
    for channel, block in blocks:
        for key, total in sums.items():
            if key[0] == channel:
                total.add(block)
    return sums


class Gradient(Protocol):
    """Sums of one method's exact gradient over voxels."""

    @property
    def nll(self) -> float: ...

    def add(self, block: Rows) -> None: ...

    def merge(self, other: Any) -> None: ...

    def kkt(self, penalty: Penalty) -> float: ...

    def correct(self, sample: Rows, penalty: Penalty) -> Solution: ...


def gradient_of(calibrator: Calibrator, n_classes: int) -> Gradient:
    """Sums of nothing yet."""
    if isinstance(calibrator, EnsembleTemperatureScaling):
        return _MixtureGradient(calibrator)
    assert isinstance(calibrator, AffineCalibrator)
    return _AffineGradient(calibrator, n_classes)


class _AffineGradient:
    """Of an affine calibrator, expert by expert."""

    def __init__(self, calibrator: AffineCalibrator, n_classes: int) -> None:
        self._calibrator = calibrator
        self._method = type(calibrator)
        self._theta = calibrator.theta()
        self._design = self._method.design(n_classes)
        self._sums = np.zeros_like(self._theta)
        self._counts = np.zeros(len(self._theta))
        self._loss = 0.0

    @property
    def nll(self) -> float:
        return _mean(self._loss, float(self._counts.sum()))

    def add(self, block: Rows) -> None:
        for expert, rows in experts_of(self._method, block):
            if rows.n_rows == 0:
                continue
            loss, gradient = softmax_problem(self._method, rows).nll_and_gradient(self._theta[expert])
            self._loss += loss * rows.n_voxels
            self._sums[expert] += gradient * rows.n_voxels
            self._counts[expert] += rows.n_voxels

    def merge(self, other: _AffineGradient) -> None:
        self._loss += other._loss
        self._sums += other._sums
        self._counts += other._counts

    def kkt(self, penalty: Penalty) -> float:
        design, worst = self._design, 0.0
        quadratic = penalty.lambda_ * design.off_diagonal + penalty.mu * design.bias
        for theta, total, count in zip(self._theta, self._sums, self._counts, strict=True):
            if count == 0:
                continue
            slope = total / count + 2.0 * (quadratic @ theta + design.ridge @ (theta - design.start))
            worst = max(worst, kkt_norm(theta, slope, design.lower, design.upper))
        return worst

    def correct(self, sample: Rows, penalty: Penalty) -> Solution:
        linear = np.zeros_like(self._theta)
        for expert, rows in experts_of(self._method, sample):
            if rows.n_rows and self._counts[expert]:
                _, sampled = softmax_problem(self._method, rows).nll_and_gradient(self._theta[expert])
                linear[expert] = self._sums[expert] / self._counts[expert] - sampled
        return ExactSolver(self._method, sample).solve(penalty, start=self._calibrator, linear=linear)


class _MixtureGradient:
    """Of ETS, in (1/T, w1, w2, w3)."""

    def __init__(self, calibrator: EnsembleTemperatureScaling) -> None:
        self._calibrator = calibrator
        self._sum: Vector = np.zeros(4)
        self._count = 0.0
        self._loss = 0.0

    @property
    def nll(self) -> float:
        return _mean(self._loss, self._count)

    def add(self, block: Rows) -> None:
        log_q = self._calibrator.log_probs(block.logits.to(torch.float64))
        self._loss -= float(log_q.gather(1, block.labels.unsqueeze(1)).sum())
        self._sum += self._at(block) * block.n_voxels
        self._count += block.n_voxels

    def merge(self, other: _MixtureGradient) -> None:
        self._loss += other._loss
        self._sum += other._sum
        self._count += other._count

    def kkt(self, penalty: Penalty) -> float:
        """Slope in 1/T and in the logarithms of the used weights along the simplex; unused ones must not gain."""
        mean = self._mean()
        mixture = np.array(self._calibrator.mixture)
        apart = mean[1:] - mixture @ mean[1:]
        return float(max(abs(mean[0]), np.where(mixture > 1e-9, mixture * np.abs(apart), -apart).max()))

    def correct(self, sample: Rows, penalty: Penalty) -> Solution:
        linear = self._mean() - self._at(sample)
        # On the simplex a constant added to the slopes of the weights changes nothing; this one leaves the least.
        linear[1:] -= np.array(self._calibrator.mixture) @ linear[1:]
        return solve_mixture(sample, linear=linear, near=self._calibrator)

    def _mean(self) -> Vector:
        if self._count == 0:
            raise DataError("no labelled voxel to fit on")
        return self._sum / self._count

    def _at(self, rows: Rows) -> Vector:
        problem = MixtureProblem(rows, np.zeros(4))
        return problem.gradient(self._calibrator.temperature, np.array(self._calibrator.mixture))


def _mean(total: float, count: float) -> float:
    if count == 0:
        raise DataError("no labelled voxel to fit on")
    return total / count
