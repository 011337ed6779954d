"""The paper's protocol (SEG App. B): Adam, early stopping on validation NLL, a learning rate that drops on plateaus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from segcal.calibrators import Calibrator
from segcal.calibrators.affine import AffineCalibrator, AffineDesign
from segcal.fitting.exact import Solution, expert_name, experts_of, starved
from segcal.fitting.likelihood import Likelihood
from segcal.fitting.problem import Penalty, SoftmaxProblem, softmax_problem
from segcal.fitting.rows import Rows

MAX_EPOCHS = 2000
SOFTPLUS_START = 1e-4
"""Where a bounded parameter that is 0 in the identity map begins: softplus cannot say 0."""


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """One trial's hyper-parameters."""

    learning_rate: float = 1e-2
    patience: int = 20
    max_epochs: int = MAX_EPOCHS


def solve_adam(
    method: type[AffineCalibrator],
    rows: Rows,
    validation: Likelihood,
    penalty: Penalty,
    settings: AdamSettings,
    *,
    class_names: Sequence[str] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> Solution:
    """Fit an affine calibrator by full-batch Adam on the sample.

    Experts share the step count; the parameters of the epoch with the best validation NLL are returned.
    `on_epoch(epoch, validation_nll)` may raise to stop a hopeless trial.
    """
    design = method.design(rows.n_classes)
    experts = dict(experts_of(method, rows))
    problems = {e: softmax_problem(method, seen, penalty) for e, seen in experts.items() if seen.n_rows}
    warnings = [text for e, seen in experts.items() for text in starved(expert_name(method, e, class_names), seen)]
    raw = _unconstrained(design).expand(design.n_experts, -1).clone().requires_grad_(True)
    optimiser = torch.optim.Adam([raw], lr=settings.learning_rate)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, patience=max(settings.patience // 2, 1))
    best_nll, best_theta, stale = np.inf, _constrained(raw.detach(), design), 0
    for epoch in range(settings.max_epochs):
        theta = _constrained(raw.detach(), design)
        nll = validation.mean(method.from_theta(theta.numpy(), rows.n_classes))
        if nll < best_nll:
            best_nll, best_theta, stale = nll, theta, 0
        else:
            stale += 1
        if on_epoch is not None:
            on_epoch(epoch, nll)
        if stale >= settings.patience:
            break
        scheduler.step(nll)
        _step(raw, optimiser, problems, design)
    objective = sum(
        experts[e].n_voxels / rows.n_voxels * problem.value(best_theta[e].numpy()) for e, problem in problems.items()
    )
    calibrator: Calibrator = method.from_theta(best_theta.numpy(), rows.n_classes)
    return Solution(calibrator, float(objective), float("nan"), tuple(warnings))


def _step(raw: Tensor, optimiser: torch.optim.Adam, problems: dict[int, SoftmaxProblem], design: AffineDesign) -> None:
    """One Adam step; every expert's gradient is that of its own problem, so experts do not disturb each other."""
    optimiser.zero_grad()
    theta = _constrained(raw, design)
    gradient = torch.zeros_like(raw)
    for expert, problem in problems.items():
        _, slope = problem.value_and_gradient(theta[expert].detach().numpy())
        gradient[expert] = torch.as_tensor(slope)
    theta.backward(gradient)
    optimiser.step()


def _bounded(design: AffineDesign) -> Tensor:
    return torch.as_tensor(np.isfinite(design.lower))


def _constrained(raw: Tensor, design: AffineDesign) -> Tensor:
    """Parameters with a lower bound are that bound plus a softplus, the others are free."""
    lower = torch.as_tensor(np.where(np.isfinite(design.lower), design.lower, 0.0))
    return torch.where(_bounded(design), lower + softplus(raw), raw)


def _unconstrained(design: AffineDesign) -> Tensor:
    start = torch.as_tensor(design.start)
    room = torch.as_tensor(np.where(np.isfinite(design.lower), design.start - design.lower, 1.0))
    inverse = torch.log(torch.expm1(room.clamp(min=SOFTPLUS_START)))
    return torch.where(_bounded(design), inverse, start)
