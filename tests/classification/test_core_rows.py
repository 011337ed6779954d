"""The core's calibrators on rows: the same optimum by either solver, tuning, limits of size."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest
import torch
from scipy import optimize

from segcal.calibrators.temperature import TemperatureScaling
from segcal.classification import METHODS, Samples, fit
from segcal.classification.core import CoreMethod, DirichletRows, MatrixRows, TemperatureRows
from segcal.classification.drawing import some_rows, stratified
from segcal.classification.matrix_free import solve_matrix_free
from segcal.errors import DataError, ParameterError, UsageError
from segcal.fitting.exact import ExactSolver
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import all_rows
from tests.classification.rows import draw_rows, nll


@pytest.mark.parametrize("name", ["ts", "vs", "ms", "ms_c", "dc", "cdc"])
@pytest.mark.parametrize("penalty", [Penalty(1e-3, 1e-3), Penalty(1.0, 0.0)])
def test_the_solver_without_hessian_finds_the_dense_solvers_optimum(name: str, penalty: Penalty) -> None:
    method = METHODS[name]
    assert issubclass(method, CoreMethod)
    data = draw_rows(1500, 5)
    rows = all_rows(data.logits, data.known_labels)
    dense = ExactSolver(method.core, rows).solve(penalty)  # type: ignore[arg-type]
    free = solve_matrix_free(method.core, rows, penalty)  # type: ignore[arg-type]
    assert free.kkt <= 1e-6
    assert free.objective == pytest.approx(dense.objective, abs=1e-9)
    test = draw_rows(200, 5, seed=1).logits
    found, expected = (s.calibrator.probabilities(test, class_axis=1) for s in (free, dense))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("n_classes", [3, 40])
def test_temperature_is_what_scipy_finds(n_classes: int) -> None:
    data = draw_rows(2000, n_classes)
    made = TemperatureRows.fit(data).calibrator
    assert isinstance(made, TemperatureScaling)
    best = optimize.minimize_scalar(
        lambda t: nll(torch.softmax(data.logits / t, 1), data.known_labels), bounds=(0.05, 20), method="bounded"
    )
    assert made.temperature == pytest.approx(best.x, rel=1e-4)


def test_tuning_prefers_the_regulariser_that_generalises() -> None:
    data, test = draw_rows(150, 6), draw_rows(4000, 6, seed=1)
    tuned = DirichletRows.fit(data, trials=12)
    free = DirichletRows.fit(data, lambda_=0.0, mu=0.0)
    assert nll(tuned.probabilities(test), test.known_labels) < nll(free.probabilities(test), test.known_labels)
    assert set(tuned.values) == {"lambda", "mu"}
    assert tuned.validation_nll is not None


def test_fixed_values_skip_tuning_and_given_validation_rows_are_used() -> None:
    data = draw_rows(300, 3)
    assert MatrixRows.fit(data, lambda_=0.1, mu=0.2).validation_nll is None
    judge = draw_rows(200, 3, seed=5)
    made = MatrixRows.fit(data, trials=3, validation=judge)
    assert made.validation_nll == pytest.approx(nll(made.probabilities(judge), judge.known_labels), abs=1e-6)
    with pytest.raises(DataError, match="validation rows must be some"):
        MatrixRows.fit(data, validation=draw_rows(10, 4))


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_a_share_is_taken_of_every_class(share: float) -> None:
    labels = torch.as_tensor(np.random.default_rng(0).choice(4, 1000, p=[0.6, 0.3, 0.09, 0.01]))
    kept, aside = stratified(labels, share, seed=3)
    assert sorted(torch.cat([kept, aside]).tolist()) == list(range(1000))
    assert len(aside) == int(1000 * share)
    for k in range(4):
        assert abs(int((labels[aside] == k).sum()) - share * int((labels == k).sum())) <= 1
    assert not torch.equal(aside, stratified(labels, share, seed=4)[1])
    assert len(some_rows(labels, 300, 0)) == 300
    with pytest.raises(ParameterError, match="between 0 and 1"):
        stratified(labels, 1.0, 0)


@pytest.mark.parametrize(
    ("name", "count"), [("ms", "1,001,000"), ("cdc", "1,001,000,000"), ("cms_ap", "1,000,001,000")]
)
def test_a_thousand_classes_are_too_many_for_matrices_and_the_message_counts(name: str, count: str) -> None:
    data = draw_rows(20, 1000)
    with pytest.raises(UsageError, match=f"{name} has {count} parameters at 1,000 classes"):
        fit(name, data)


@pytest.mark.parametrize(
    "name", ["ts", "ets", "vs", "isotonic", "platt", "beta", "histogram", "ts_sb_ece", "ts_hb_ece"]
)
def test_many_classes_are_fine_for_the_others(name: str) -> None:
    data, test = draw_rows(1500, 300), draw_rows(200, 300, seed=1)
    probs = fit(name, data).probabilities(test)
    assert float((probs.sum(1) - 1).abs().max()) < 1e-9
    assert bool(torch.isfinite(probs).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ts", "ets", "vs", "isotonic", "platt", "beta", "histogram"])
def test_a_thousand_classes_and_20_000_rows_take_seconds(name: str) -> None:
    data = draw_rows(20_000, 1000)
    begin = time.process_time()
    made = fit(name, data)
    taken = time.process_time() - begin
    print(f"{name}: {taken:.1f} CPU s")
    assert taken < 120
    assert bool(torch.isfinite(made.probabilities(data.rows(torch.arange(100)))).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ts", "ets", "vs", "dc", "isotonic", "platt", "beta", "histogram", "ts_hb_ece"])
def test_a_million_rows_fit_in_memory_and_time(name: str) -> None:
    data = draw_rows(1_000_000, 10)
    begin = time.process_time()
    made = fit(name, data)
    taken = time.process_time() - begin
    print(f"{name}: {taken:.1f} CPU s, peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    assert taken < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6
    truth = nll(torch.softmax(data.logits / 2, 1), data.known_labels)
    assert nll(made.probabilities(data), data.known_labels) < truth + 0.02


def test_kind_is_kept_and_probabilities_make_the_pipeline_invariant() -> None:
    data = draw_rows(300, 3)
    probs = Samples.of(torch.softmax(data.logits, 1), data.known_labels, kind="probabilities")
    made = fit("vs", probs)
    assert (made.info.kind, made.info.pooling, made.info.translation_invariant) == (
        "probabilities",
        "probabilities",
        True,
    )
    assert not fit("vs", data).info.translation_invariant
