"""The published protocol: Adam, early stopping on the validation NLL, every expert on its own problem."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.fitting.adam import AdamSettings, solve_adam
from segcal.fitting.exact import ExactSolver, Solution
from segcal.fitting.likelihood import Likelihood
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import Rows, all_rows
from tests.fitting.drawn import AFFINE, draw_labels, draw_logits, draw_rows

METHODS = pytest.mark.parametrize("method", list(AFFINE))
PENALTY = Penalty(1e-3, 1e-3)


def run(method: str, rows: Rows, validation: Rows, settings: AdamSettings) -> tuple[Solution, list[float]]:
    """The solution and the validation NLL of every epoch."""
    seen: list[float] = []

    def on_epoch(epoch: int, nll: float) -> None:
        assert epoch == len(seen)
        seen.append(nll)

    return solve_adam(AFFINE[method], rows, Likelihood(validation), PENALTY, settings, on_epoch=on_epoch), seen


@METHODS
def test_the_best_epoch_is_returned(method: str) -> None:
    drawn = draw_rows(500, 3)
    rows, validation = (all_rows(drawn.logits[p], drawn.labels[p]) for p in (slice(0, 300), slice(300, 500)))
    solution, seen = run(method, rows, validation, AdamSettings(3e-2, 10, 120))
    assert Likelihood(validation).mean(solution.calibrator) == pytest.approx(min(seen), rel=1e-12)
    assert min(seen) < seen[0]


@METHODS
def test_it_starts_at_identity(method: str) -> None:
    rows = draw_rows(50, 3)
    solution, seen = run(method, rows, rows, AdamSettings(max_epochs=1))
    assert len(seen) == 1
    logits = draw_logits(200, 3, seed=5)
    # Softplus cannot say 0: entries off the diagonal start at 1e-4.
    apart = solution.calibrator.log_probs(logits).exp() - torch.softmax(logits, 1)
    assert float(apart.abs().max()) < 1e-3


def test_it_stops_when_the_validation_nll_stays_stale() -> None:
    logits = draw_logits(2000, 3)
    hotter = all_rows(logits, draw_labels(torch.log_softmax(logits / 3, 1)))
    as_it_is = all_rows(logits, draw_labels(torch.log_softmax(logits / 0.8, 1)))
    for patience in (3, 10):
        solution, seen = run("ts", hotter, as_it_is, AdamSettings(1e-2, patience, 500))
        assert len(seen) == patience + 1
        assert solution.calibrator == AFFINE["ts"].identity(3)


@METHODS
def test_left_alone_it_comes_close_to_the_exact_optimum(method: str) -> None:
    rows = draw_rows(200, 3)
    solution, _ = run(method, rows, rows, AdamSettings(3e-2, 50, 400))
    exact = ExactSolver(AFFINE[method], rows).solve(PENALTY)
    assert solution.objective == pytest.approx(exact.objective, abs=0.03)


@METHODS
def test_the_same_call_gives_the_same_bits(method: str) -> None:
    rows = draw_rows(100, 3)
    first, second = (run(method, rows, rows, AdamSettings(max_epochs=30))[0].calibrator for _ in range(2))
    for key, value in first.tensors().items():
        assert torch.equal(second.tensors()[key], value)


@pytest.mark.parametrize("method", ["cms_ap", "cms_op"])
def test_bounds_hold_whatever_the_step(method: str) -> None:
    rows = draw_rows(100, 3)
    calibrator = run(method, rows, rows, AdamSettings(1.0, 50, 60))[0].calibrator
    design = AFFINE[method].design(3)
    assert isinstance(calibrator, AFFINE[method])
    assert (calibrator.theta() >= design.lower).all()
    assert np.isfinite(calibrator.theta()).all()


@pytest.mark.parametrize("method", ["cdc", "cms_ap"])
def test_experts_do_not_disturb_each_other(method: str) -> None:
    rows = draw_rows(300, 3)
    shuffled = rows.labels.where(rows.decision != 0, rows.labels.flip(0))
    # So few epochs that every one is the best so far: early stopping, which experts share, plays no part.
    settings = AdamSettings(1e-3, 50, 5)
    first, seen = run(method, rows, rows, settings)
    other = all_rows(rows.logits, shuffled)
    second, _ = run(method, other, rows, settings)
    assert seen == sorted(seen, reverse=True)
    for key, value in first.calibrator.tensors().items():
        changed = second.calibrator.tensors()[key]
        assert torch.equal(changed[1:], value[1:])
        assert not torch.equal(changed[0], value[0])


@pytest.mark.parametrize("method", ["cdc", "cms_op"])
def test_a_starved_expert_is_named(method: str) -> None:
    logits = draw_logits(900, 3)
    logits[:, 2] -= 100
    rows = all_rows(logits, torch.arange(900) % 3)
    solution = solve_adam(
        AFFINE[method], rows, Likelihood(rows), PENALTY, AdamSettings(max_epochs=3), class_names=["a", "b", "c"]
    )
    assert any("`c` saw no voxel and stays at identity" in text for text in solution.warnings)
    assert np.isfinite(solution.objective)


def test_the_caller_may_stop_a_hopeless_run() -> None:
    class HopelessError(Exception):
        pass

    def on_epoch(epoch: int, nll: float) -> None:
        if epoch == 4:
            raise HopelessError

    rows = draw_rows(50, 3)
    with pytest.raises(HopelessError):
        solve_adam(AFFINE["dc"], rows, Likelihood(rows), PENALTY, AdamSettings(), on_epoch=on_epoch)
