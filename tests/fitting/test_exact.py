"""The exact solver against independent objectives, written here from the formulas, minimised by scipy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

from segcal.calibrators import Calibrator
from segcal.calibrators.affine import AffineCalibrator
from segcal.calibrators.ensemble_temperature import EnsembleTemperatureScaling
from segcal.calibrators.matrix import DirichletCalibration, MatrixScaling, VectorScaling
from segcal.calibrators.temperature import T_MAX, T_MIN, TemperatureScaling
from segcal.fitting import exact, newton
from segcal.fitting.adam import AdamSettings, solve_adam
from segcal.fitting.exact import KKT_PROMISE, ExactSolver, Solution
from segcal.fitting.likelihood import Likelihood
from segcal.fitting.mixture import MixtureProblem, solve_mixture
from segcal.fitting.problem import Penalty, softmax_problem
from segcal.fitting.rows import Rows, all_rows
from tests.fitting.drawn import AFFINE, draw_labels, draw_logits, draw_rows

Vector = NDArray[np.float64]

METHODS = pytest.mark.parametrize("method", list(AFFINE))
CLASSES = pytest.mark.parametrize("n_classes", [2, 3, 4])
PENALTY = Penalty(lambda_=0.02, mu=0.005)
RIDGE = 1e-6


@dataclass(frozen=True)
class Reference:
    """An independent objective of free numbers x: start, bounds and value."""

    start: Vector
    lower: Vector
    value: Callable[[Tensor], Tensor]
    upper: float = np.inf

    def minimum(self) -> float:
        def value_and_gradient(x: Vector) -> tuple[float, Vector]:
            variable = torch.tensor(x, requires_grad=True)
            value = self.value(variable)
            (gradient,) = torch.autograd.grad(value, variable)
            return float(value.detach()), gradient.numpy()

        bounds = optimize.Bounds(self.lower, np.full(len(self.start), self.upper))
        options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0.0, "gtol": 1e-9, "maxcor": 40}
        found = optimize.minimize(
            value_and_gradient, self.start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
        return float(found.fun)


def nll(scores: Tensor, labels: Tensor) -> Tensor:
    return (torch.logsumexp(scores, 1) - scores[torch.arange(len(labels)), labels]).mean()


def eq_15(weight: Tensor, bias: Tensor) -> Tensor:
    n = len(bias)
    squares = (weight**2).sum() - (torch.diag(weight) ** 2).sum()
    return PENALTY.lambda_ / (n * (n - 1)) * squares + PENALTY.mu / n * (bias**2).sum()


def ridge(weight: Tensor, bias: Tensor) -> Tensor:
    return RIDGE * (((weight - torch.eye(len(weight))) ** 2).sum() + (bias**2).sum())


def matrix_reference(features: Tensor, labels: Tensor) -> Reference:
    """ms and dc: W x + b with eq. 15 and the ridge."""
    n = features.shape[1]

    def value(x: Tensor) -> Tensor:
        weight, bias = x[: n * n].reshape(n, n), x[n * n :]
        return nll(features @ weight.T + bias, labels) + eq_15(weight, bias) + ridge(weight, bias)

    return Reference(np.append(np.eye(n), np.zeros(n)), np.full(n * n + n, -np.inf), value)


def constrained_reference(features: Tensor, labels: Tensor) -> Reference:
    """ms_c: the diagonal of W follows from its other entries and the common row sum."""
    n = features.shape[1]
    off = ~torch.eye(n, dtype=torch.bool)

    def value(x: Tensor) -> Tensor:
        others = torch.zeros(n, n, dtype=torch.float64)
        others[off] = x[: n * (n - 1)]
        weight, bias = others + torch.diag(x[n * (n - 1)] - others.sum(1)), x[n * (n - 1) + 1 :]
        return nll(features @ weight.T + bias, labels) + eq_15(weight, bias) + ridge(weight, bias)

    start = np.concatenate([np.zeros(n * (n - 1)), [1.0], np.zeros(n)])
    return Reference(start, np.full(len(start), -np.inf), value)


def vector_reference(logits: Tensor, labels: Tensor) -> Reference:
    n = logits.shape[1]

    def value(x: Tensor) -> Tensor:
        return nll(logits * x[:n] + x[n:], labels) + ridge(torch.diag(x[:n]), x[n:])

    return Reference(np.append(np.ones(n), np.zeros(n)), np.full(2 * n, -np.inf), value)


def cone_reference(logits: Tensor, labels: Tensor, *, by_rank: bool) -> Reference:
    """One expert of cms in the paper's coordinates: a, r and b_1 are free, A and beta bounded, eq. 15 on W and b."""
    n = logits.shape[1]
    winner = int(logits[0].argmax())
    if by_rank:
        order = logits.argsort(dim=1, descending=True, stable=True)
    else:
        order = torch.tensor([winner, *(k for k in range(n) if k != winner)]).expand(len(logits), n)
    canonical, columns = logits.gather(1, order), (order == labels[:, None]).int().argmax(1)
    g = torch.zeros(n, n, dtype=torch.float64)
    g[0, 0] = 1
    for k in range(1, n):
        g[k, k - 1 if by_rank else 0], g[k, k] = 1, -1
    g_inverse = torch.linalg.inv(g)

    def value(x: Tensor) -> Tensor:
        first_row, first_bias = x[:n], x[n : n + 1]
        inner, beta = x[n + 1 : n + 1 + (n - 1) ** 2].reshape(n - 1, n - 1), x[n + 1 + (n - 1) ** 2 :]
        below = torch.cat([torch.zeros(n - 1, 1, dtype=torch.float64), inner], 1)
        weight = g_inverse @ torch.cat([first_row[None], below]) @ g
        bias = torch.cat([first_bias, first_bias - (torch.cumsum(beta, 0) if by_rank else beta)])
        return nll(canonical @ weight.T + bias, columns) + eq_15(weight, bias) + ridge(inner, beta)

    start = np.concatenate([[1.0], np.zeros(n), np.eye(n - 1).ravel(), np.full(n - 1, 1e-6)])
    lower = np.concatenate([np.full(n + 1, -np.inf), np.zeros((n - 1) ** 2), np.full(n - 1, 1e-6)])
    return Reference(start, lower, value)


def reference_minimum(method: str, rows: Rows) -> float:
    """The best objective scipy finds; class-conditional methods one expert after the other, weighted by their rows."""
    z, y = rows.logits, rows.labels
    if method in ("cdc", "cms_ap", "cms_op"):
        total = 0.0
        for expert in range(rows.n_classes):
            seen = rows.decision == expert
            total += float(seen.double().mean()) * expert_reference(method, z[seen], y[seen]).minimum()
        return total
    if method == "ts":
        return Reference(np.ones(1), np.array([0.01]), lambda x: nll(z * x, y), upper=100.0).minimum()
    build = {
        "vs": lambda: vector_reference(z, y),
        "ms": lambda: matrix_reference(z, y),
        "ms_c": lambda: constrained_reference(z, y),
        "dc": lambda: matrix_reference(torch.log_softmax(z, 1), y),
    }
    return build[method]().minimum()


def expert_reference(method: str, logits: Tensor, labels: Tensor) -> Reference:
    if method == "cdc":
        return matrix_reference(torch.log_softmax(logits, 1), labels)
    return cone_reference(logits, labels, by_rank=method == "cms_op")


def solve(method: str, rows: Rows, penalty: Penalty = PENALTY) -> Solution:
    return ExactSolver(AFFINE[method], rows, class_names=[f"c{k}" for k in range(rows.n_classes)]).solve(penalty)


@METHODS
@CLASSES
def test_reaches_the_optimum_an_independent_solver_finds(method: str, n_classes: int) -> None:
    rows = draw_rows(400, n_classes, seed=n_classes)
    found, expected = solve(method, rows), reference_minimum(method, rows)
    assert found.kkt <= KKT_PROMISE
    assert found.objective == pytest.approx(expected, rel=0, abs=1e-8)


@METHODS
@CLASSES
def test_gradient_and_hessian_match_finite_differences(method: str, n_classes: int) -> None:
    rng = np.random.default_rng(n_classes)
    rows = draw_rows(60, n_classes)
    rows = rows.of_expert(0) if AFFINE[method].class_conditional else rows
    rows = replace(rows, weights=torch.tensor(rng.exponential(1, rows.n_rows)))
    design = AFFINE[method].design(n_classes)
    problem = softmax_problem(AFFINE[method], rows).with_penalty(PENALTY, rng.normal(0, 1, design.n_parameters))
    theta = design.start + rng.exponential(0.3, design.n_parameters)
    value, gradient, hessian = problem.derivatives(theta)

    step = 1e-6
    moves = step * np.eye(design.n_parameters)
    by_differences = [(problem.value(theta + m) - problem.value(theta - m)) / (2 * step) for m in moves]
    slopes = [
        (problem.value_and_gradient(theta + m)[1] - problem.value_and_gradient(theta - m)[1]) / (2 * step)
        for m in moves
    ]
    assert value == pytest.approx(problem.value(theta), rel=1e-14)
    np.testing.assert_allclose(gradient, by_differences, rtol=0, atol=1e-7)
    np.testing.assert_allclose(gradient, problem.value_and_gradient(theta)[1], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(hessian, np.array(slopes), rtol=0, atol=1e-7)


@METHODS
def test_a_start_from_a_part_of_the_rows_leads_to_the_same_optimum(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = draw_rows(3000, 3)
    directly = solve(method, rows)
    monkeypatch.setattr(exact, "MANY_ROWS", 200)
    by_parts = solve(method, rows)

    assert by_parts.kkt <= KKT_PROMISE
    assert by_parts.objective == pytest.approx(directly.objective, rel=0, abs=1e-10)


@METHODS
def test_the_optimum_does_not_depend_on_the_start(method: str) -> None:
    rows = draw_rows(400, 3)
    solver = ExactSolver(AFFINE[method], rows)
    cold = solver.solve(PENALTY)
    elsewhere = solver.solve(Penalty(1e-6, 0.1)).calibrator
    assert isinstance(elsewhere, AffineCalibrator)
    warm = solver.solve(PENALTY, start=elsewhere)
    assert warm.objective == pytest.approx(cold.objective, rel=0, abs=1e-12)


@METHODS
def test_large_problems_take_another_road_to_the_same_optimum(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = draw_rows(400, 3)
    dense = solve(method, rows)
    monkeypatch.setattr(newton, "DENSE_LIMIT", 0)
    quasi = solve(method, rows)
    assert quasi.kkt <= KKT_PROMISE
    assert quasi.objective == pytest.approx(dense.objective, rel=0, abs=1e-9)


@METHODS
def test_adam_never_ends_below(method: str) -> None:
    rows = draw_rows(300, 3)
    start, adam = (
        solve_adam(AFFINE[method], rows, Likelihood(rows), PENALTY, AdamSettings(3e-2, 50, max_epochs))
        for max_epochs in (1, 250)
    )
    exact = solve(method, rows)
    assert exact.objective <= adam.objective + 1e-12
    assert adam.objective < start.objective - 0.05  # adam did work for it


@METHODS
def test_rows_count_by_their_weight(method: str) -> None:
    rows = draw_rows(300, 3)
    twice = all_rows(torch.cat([rows.logits] * 2), torch.cat([rows.labels] * 2))
    weighted = replace(rows, weights=2 * rows.weights, counts=2 * rows.counts)
    expected = solve(method, rows)
    for other in (twice, weighted):
        found = solve(method, other)
        assert found.objective == pytest.approx(expected.objective, rel=0, abs=1e-12)
        for key, value in expected.calibrator.tensors().items():
            torch.testing.assert_close(found.calibrator.tensors()[key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("true_temperature", [0.5, 1.0, 2.5])
def test_ts_recovers_the_temperature_that_drew_the_labels(true_temperature: float) -> None:
    logits = draw_logits(60_000, 4)
    labels = draw_labels(torch.log_softmax(logits / true_temperature, 1))
    calibrator = solve("ts", all_rows(logits, labels)).calibrator
    assert isinstance(calibrator, TemperatureScaling)
    assert calibrator.temperature == pytest.approx(true_temperature, rel=0.02)


def test_dc_recovers_the_map_that_drew_the_labels() -> None:
    weight = torch.tensor([[0.7, 0.1, 0.0], [-0.2, 0.5, 0.1], [0.1, 0.0, 0.9]], dtype=torch.float64)
    truth = DirichletCalibration(weight, torch.tensor([0.3, -0.2, -0.1], dtype=torch.float64))
    logits = draw_logits(60_000, 3)
    rows = all_rows(logits, draw_labels(truth.log_probs(logits)))
    found = solve("dc", rows, Penalty()).calibrator
    apart = found.log_probs(logits).exp() - truth.log_probs(logits).exp()
    # The standard error of a probability with 8 parameters and 60,000 rows is about sqrt(0.2 * 8 / 60000) = 0.005.
    assert float(apart.abs().mean()) < 8e-3


# Data that starve or overwhelm a fit. Each gives rows and what the warnings must name, by method.


def separable() -> Rows:
    logits = draw_logits(900, 3, scale=5.0)
    return all_rows(logits, logits.argmax(1))


def permuted() -> Rows:
    logits = draw_logits(900, 3, scale=5.0)
    return all_rows(logits, (logits.argmax(1) + 1) % 3)


def constant() -> Rows:
    return all_rows(torch.full((600, 3), 2.5), torch.arange(600) % 3)


def never_predicted() -> Rows:
    logits = draw_logits(2000, 3)
    logits[:, 1] -= 100
    return all_rows(logits, torch.tensor(np.random.default_rng(0).integers(0, 3, 2000)))


def never_labelled() -> Rows:
    rows = draw_rows(3000, 3)
    return all_rows(rows.logits, rows.labels.where(rows.labels != 2, 0))


def one_row() -> Rows:
    return all_rows(torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([0]))


def tiny_weights() -> Rows:
    rows = draw_rows(1000, 3)
    return replace(rows, weights=rows.weights * 1e-12, counts=rows.counts * 1e-12)


def zero_weights() -> Rows:
    rows = draw_rows(1000, 3)
    return replace(rows, weights=torch.where(torch.arange(1000) < 500, 0.0, 1.0).double())


def two_classes() -> Rows:
    return draw_rows(1000, 2)


def huge_logits() -> Rows:
    rows = draw_rows(1000, 3)
    return all_rows(1e4 * rows.logits, rows.labels)


ODD = [
    separable, permuted, constant, never_predicted, never_labelled, one_row, tiny_weights, zero_weights, two_classes,
    huge_logits,
]  # fmt: skip


@pytest.mark.parametrize("method", [*AFFINE, "ets"])
@pytest.mark.parametrize("data", ODD)
@pytest.mark.parametrize("penalty", [Penalty(), Penalty(1e-3, 1e-3)])
def test_odd_data_end_in_a_finite_answer(method: str, data: Callable[[], Rows], penalty: Penalty) -> None:
    rows = data()
    found = solve_mixture(rows) if method == "ets" else solve(method, rows, penalty)
    assert np.isfinite(found.objective)
    for value in found.calibrator.tensors().values():
        assert value.isfinite().all()
        assert value.abs().max() < 1e3  # no silent huge weight
    log_probs = found.calibrator.log_probs(draw_logits(100, rows.n_classes, seed=9))
    assert log_probs.isfinite().all()
    if method != "ets" and data is not huge_logits:
        assert found.kkt <= KKT_PROMISE


@pytest.mark.parametrize("method", ["cdc", "cms_ap", "cms_op"])
def test_an_expert_without_rows_stays_at_identity_and_is_named(method: str) -> None:
    found = solve(method, never_predicted())
    assert any("`c1`" in text and "saw no voxel" in text and "identity" in text for text in found.warnings)
    assert not any("`c0`" in text or "`c2`" in text for text in found.warnings)
    identity, tensors = AFFINE[method].identity(3).tensors(), found.calibrator.tensors()
    same = {
        expert: all(torch.equal(tensors[key][expert], identity[key][expert]) for key in identity) for expert in range(3)
    }
    assert same == {0: False, 1: True, 2: False}


@METHODS
def test_separable_data_are_named(method: str) -> None:
    found = solve(method, separable(), Penalty())
    n_experts = AFFINE[method].design(3).n_experts
    told = [text for text in found.warnings if "separable" in text and "every calibration voxel right" in text]
    assert len(told) == n_experts
    if n_experts > 1:
        assert [f"`c{k}`" in text for k, text in enumerate(told)] == [True] * n_experts


@pytest.mark.parametrize("method", ["ms", "dc", "cdc"])
def test_data_that_only_the_fitted_map_separates_are_named_too(method: str) -> None:
    assert any("separable" in text for text in solve(method, permuted(), Penalty()).warnings)


@METHODS
def test_few_voxels_are_named(method: str) -> None:
    found = solve(method, one_row())
    assert any("only 1 voxels" in text for text in found.warnings)


@METHODS
def test_ordinary_data_need_no_warning(method: str) -> None:
    assert solve(method, draw_rows(3000, 3)).warnings == ()


def test_the_temperature_stops_at_its_bounds_and_says_so() -> None:
    logits = draw_logits(1000, 3, scale=10.0)
    random = all_rows(logits, torch.tensor(np.random.default_rng(0).integers(0, 3, 1000)))
    hot = solve("ts", all_rows(logits, (logits.argmax(1) + 1) % 3))
    assert hot.calibrator == TemperatureScaling(T_MAX)
    assert any("ran to its bound 100" in text for text in hot.warnings)
    cold = solve("ts", all_rows(logits * 1e-3, logits.argmax(1)))
    assert cold.calibrator == TemperatureScaling(T_MIN)
    assert any("ran to its bound 0.01" in text for text in cold.warnings)
    assert solve("ts", random).objective <= np.log(3) + 0.05


def mixture_objective(rows: Rows, temperature: float, weights: Vector) -> Vector:
    """Mean NLL of w1 S(z/T) + w2 S(z) + w3/C for (k, 3) weights, by the formula."""
    z, rest = rows.logits.double(), torch.arange(rows.n_rows)
    parts = [torch.softmax(z / temperature, 1), torch.softmax(z, 1), torch.full_like(z, 1 / rows.n_classes)]
    picked = torch.stack([part[rest, rows.labels] for part in parts], 1).numpy()
    return -np.log(picked @ weights.T).mean(0)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("kind", ["tempered", "noisy", "sharp"])
def test_ets_is_the_best_of_a_brute_force_grid(n_classes: int, kind: str) -> None:
    logits = draw_logits(400, n_classes)
    truth = torch.log_softmax(logits / {"tempered": 2.0, "noisy": 1.0, "sharp": 0.3}[kind], 1)
    labels = draw_labels(truth)
    if kind == "noisy":  # a tenth of the labels is random: the uniform part has to carry them
        rng = np.random.default_rng(0)
        random = torch.tensor(rng.integers(0, n_classes, 400))
        labels = torch.where(torch.tensor(rng.random(400) < 0.2), random, labels)
    rows = all_rows(logits, labels)
    steps = np.linspace(0, 1, 41)
    simplex = np.array([(a, b, 1 - a - b) for a in steps for b in steps if a + b <= 1 + 1e-12]).clip(1e-12)
    grid = min(mixture_objective(rows, t, simplex).min() for t in np.geomspace(T_MIN, T_MAX, 121))

    found = solve_mixture(rows)
    calibrator = found.calibrator
    assert isinstance(calibrator, EnsembleTemperatureScaling)
    own = mixture_objective(rows, calibrator.temperature, np.array([calibrator.mixture]))[0]
    assert found.objective == pytest.approx(own, rel=0, abs=1e-10)
    assert grid - 2e-3 <= found.objective <= grid + 1e-9


def test_ets_gradient_matches_finite_differences() -> None:
    rows = draw_rows(200, 3)
    problem = MixtureProblem(rows, np.zeros(4))
    beta, mixture = 0.6, np.array([0.5, 0.3, 0.2])

    def value(x: Vector) -> float:
        return float(mixture_objective(rows, 1 / x[0], x[None, 1:])[0])

    at = np.concatenate([[beta], mixture])
    by_differences = [(value(at + step) - value(at - step)) / 2e-6 for step in 1e-6 * np.eye(4)]
    np.testing.assert_allclose(problem.gradient(1 / beta, mixture), by_differences, rtol=0, atol=1e-7)


def test_ets_at_a_bound_says_so() -> None:
    logits = draw_logits(1000, 3, scale=10.0)
    found = solve_mixture(all_rows(logits * 1e-3, logits.argmax(1)))
    assert any("ets" in text and "ran to its bound" in text for text in found.warnings)


def test_a_method_with_more_freedom_never_fits_worse() -> None:
    """ts within vs within ms, ms_c within ms; the ridge costs a little."""
    rows = draw_rows(800, 3, seed=5)
    nlls = {name: mean_nll_of(solve(name, rows, Penalty()).calibrator, rows) for name in ("ts", "vs", "ms_c", "ms")}
    assert nlls["ms"] <= nlls["vs"] + 1e-4 <= nlls["ts"] + 2e-4
    assert nlls["ms"] <= nlls["ms_c"] + 1e-4


def mean_nll_of(calibrator: Calibrator, rows: Rows) -> float:
    assert isinstance(calibrator, TemperatureScaling | VectorScaling | MatrixScaling)
    return float(-calibrator.log_probs(rows.logits)[torch.arange(rows.n_rows), rows.labels].mean())
