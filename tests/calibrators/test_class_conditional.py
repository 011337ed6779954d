"""The cone maps in margins against the paper's own form: W = G^-1 W' G after a canonical permutation (SEG 3.2.1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize

from segcal.calibrators.class_conditional import BETA_MIN, ArgmaxConeScaling, ConditionalDirichlet, OrderConeScaling
from segcal.errors import ParameterError

Vector = NDArray[np.float64]
Cone = type[ArgmaxConeScaling] | type[OrderConeScaling]

BOTH = pytest.mark.parametrize("cls", [ArgmaxConeScaling, OrderConeScaling])
CLASSES = pytest.mark.parametrize("n_classes", [2, 3, 4, 5])


def paper_g(cls: Cone, n_classes: int) -> Vector:
    """Eq. 12, and its counterpart for the order cone."""
    g = np.zeros((n_classes, n_classes))
    g[0, 0] = 1
    for k in range(1, n_classes):
        g[k, 0 if cls is ArgmaxConeScaling else k - 1] = 1
        g[k, k] = -1
    return g


def paper_matrix(cls: Cone, a: float, r: Vector, inner: Vector) -> Vector:
    """W = G^-1 W' G with W' = [[a, r'], [0, A]]."""
    n_classes = len(r) + 1
    prime = np.zeros((n_classes, n_classes))
    prime[0, 0], prime[0, 1:], prime[1:, 1:] = a, r, inner
    g = paper_g(cls, n_classes)
    return np.linalg.inv(g) @ prime @ g


def paper_bias(cls: Cone, first: float, beta: Vector) -> Vector:
    """b in the cone: behind the first entry (argmax), or each behind the one before it (order)."""
    behind = beta if cls is ArgmaxConeScaling else np.cumsum(beta)
    return np.concatenate([[first], first - behind])


def permutation(cls: Cone, z: Vector) -> list[int]:
    """pi_z: the first index exchanged with the argmax, or classes sorted by falling logit."""
    if cls is OrderConeScaling:
        return [int(k) for k in np.argsort(-z, kind="stable")]
    order = list(range(len(z)))
    winner = int(np.argmax(z))
    order[0], order[winner] = winner, 0
    return order


def paper_probabilities(cls: Cone, z: Vector, slope: Vector, beta: Vector, gauge: Vector) -> Vector:
    """One row by the book; `gauge` holds the a, r and b_1 that must not matter."""
    order = permutation(cls, z)
    winner = order[0]
    inner, offset = slope[winner], beta[winner]
    if cls is ArgmaxConeScaling:
        # Ours lists the other classes in increasing order, the paper's exchange puts class 0 where the winner was.
        others = [k for k in range(len(z)) if k != winner]
        position = [others.index(k) for k in order[1:]]
        inner, offset = inner[np.ix_(position, position)], offset[position]
    h = paper_matrix(cls, gauge[0], gauge[2:], inner) @ z[order] + paper_bias(cls, gauge[1], offset)
    probs = np.exp(h - h.max())
    result = np.empty_like(z)
    result[order] = probs / probs.sum()
    return result


def draw_parameters(n_classes: int, seed: int) -> tuple[Vector, Vector]:
    """A and beta of all experts, many of them at their bound."""
    rng = np.random.default_rng(seed)
    shape = (n_classes, n_classes - 1, n_classes - 1)
    slope = rng.exponential(0.7, shape) * rng.integers(0, 2, shape)
    return slope, BETA_MIN + rng.exponential(0.5, shape[:2]) * rng.integers(0, 2, shape[:2])


@BOTH
@CLASSES
def test_margins_give_the_probabilities_of_the_paper_whatever_the_gauge(cls: Cone, n_classes: int) -> None:
    rng = np.random.default_rng(n_classes)
    slope, beta = draw_parameters(n_classes, seed=n_classes)
    logits = rng.normal(0, 3, (50, n_classes))
    expected = [paper_probabilities(cls, z, slope, beta, rng.normal(0, 2, n_classes + 1)) for z in logits]

    found = cls(torch.tensor(slope), torch.tensor(beta)).log_probs(torch.tensor(logits)).exp()
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-10)


def eq_15(weight: Vector, bias: Vector, lambda_: float, mu: float) -> float:
    n = len(bias)
    off_diagonal = weight[~np.eye(n, dtype=bool)]
    return float(lambda_ / (n * (n - 1)) * (off_diagonal**2).sum() + mu / n * (bias**2).sum())


@BOTH
@CLASSES
def test_the_penalty_is_that_of_the_paper_at_its_best_gauge(cls: Cone, n_classes: int) -> None:
    rng = np.random.default_rng(10 + n_classes)
    inner = rng.exponential(1, (n_classes - 1, n_classes - 1))
    beta = rng.exponential(1, n_classes - 1)
    lambda_, mu = 0.7, 0.3

    def penalty(gauge: Vector) -> float:
        weight = paper_matrix(cls, gauge[0], gauge[2:], inner)
        return eq_15(weight, paper_bias(cls, gauge[1], beta), lambda_, mu)

    best = optimize.minimize(penalty, np.zeros(n_classes + 1), method="BFGS", options={"gtol": 1e-9})
    design = cls.design(n_classes)
    theta = np.concatenate([inner.ravel(), beta])
    found = theta @ (lambda_ * design.off_diagonal.toarray() + mu * design.bias.toarray()) @ theta
    assert found == pytest.approx(best.fun, rel=1e-8, abs=1e-10)


@CLASSES
def test_the_closed_form_of_the_argmax_gauge(n_classes: int) -> None:
    """r_j is the mean of a_ij, i != j, and 0; s the mean row sum of A (METHODS 2)."""
    inner = np.random.default_rng(n_classes).exponential(1, (n_classes - 1, n_classes - 1))
    off_diagonal = inner * (1 - np.eye(n_classes - 1))
    r = off_diagonal.sum(0) / (n_classes - 1)
    row_sums = inner.sum(1)
    weight = paper_matrix(ArgmaxConeScaling, row_sums.mean() - r.sum(), r, inner)

    theta = np.concatenate([inner.ravel(), np.zeros(n_classes - 1)])
    found = theta @ ArgmaxConeScaling.design(n_classes).off_diagonal.toarray() @ theta
    assert found == pytest.approx(eq_15(weight, np.zeros(n_classes), 1.0, 0.0), rel=1e-12, abs=1e-15)


@BOTH
@CLASSES
def test_identity_and_multiples_of_it_cost_nothing_off_the_diagonal(cls: Cone, n_classes: int) -> None:
    theta = np.concatenate([2.5 * np.eye(n_classes - 1).ravel(), np.ones(n_classes - 1)])
    assert theta @ cls.design(n_classes).off_diagonal @ theta == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["torch", "compiled"])
@BOTH
def test_a_decision_that_trails_counts_as_level(cls: Cone, dtype: torch.dtype) -> None:
    """A deployed decision may trail; its expert then sees a margin or gap of 0, never a negative one."""
    slope, beta = draw_parameters(3, seed=0)
    calibrator = cls(torch.tensor(slope), torch.tensor(beta))
    trailing = torch.tensor([[1.5, 1.0, -2.0]], dtype=dtype)
    # By class the last one is 3 behind the decision; by rank it is 3.5 behind the class before it.
    level = torch.tensor([[1.0, 1.0, -2.0 if cls is ArgmaxConeScaling else -2.5]], dtype=dtype)
    decision = torch.tensor([1])
    found = calibrator.log_probs(trailing, decision)
    torch.testing.assert_close(found, calibrator.log_probs(level, decision), rtol=0, atol=1e-6)
    assert int(found.argmax()) == 1


def test_cdc_is_one_dirichlet_map_per_predicted_class() -> None:
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(0, 1, (3, 3, 3)), rng.normal(0, 1, (3, 3))
    logits = rng.normal(0, 3, (40, 3))
    found = ConditionalDirichlet(torch.tensor(weight), torch.tensor(bias)).log_probs(torch.tensor(logits)).exp().numpy()
    for z, probs in zip(logits, found, strict=True):
        expert = int(np.argmax(z))
        h = weight[expert] @ (z - np.log(np.exp(z).sum())) + bias[expert]
        np.testing.assert_allclose(probs, np.exp(h) / np.exp(h).sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", [-1, 5, 256])
def test_a_decision_that_is_no_class_is_refused(wrong: int) -> None:
    with pytest.raises(ParameterError, match="expected 0 to 4"):
        ArgmaxConeScaling.identity(5).log_probs(torch.zeros(3, 5), torch.tensor([0, wrong, 2]))


def test_no_voxels_give_no_rows() -> None:
    rows = ArgmaxConeScaling.identity(5).log_probs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert rows.shape == (0, 5)
