"""Local Nets: the objective against loops, where the fit starts, what it keeps."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from segcal.classification.local_nets import (
    LocalNets,
    _start,
    bernoulli_js_distance,
    neighbour_frequencies,
    net_heads,
)
from segcal.classification.principal import Standardiser, principal_axes
from segcal.errors import ParameterError
from tests.classification.feature_rows import draw_rows


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _truth(n: int, n_classes: int) -> Tensor:
    labels = torch.randint(n_classes, (n,), generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.one_hot(labels, n_classes)


def test_the_neighbours_frequencies_are_their_double_loop() -> None:
    similar, truth = _normal(9, 4), _truth(9, 3).double()
    found = neighbour_frequencies(similar, truth, 0.8)
    for i in range(9):
        top, bottom = torch.zeros(3, dtype=torch.float64), 0.0
        for j in range(9):
            if j == i:
                continue
            weight = math.exp(-sum(float(similar[i, a] - similar[j, a]) ** 2 for a in range(4)) / (2 * 0.8**2))
            top += weight * truth[j]
            bottom += weight
        torch.testing.assert_close(found[i], top / bottom, rtol=1e-10, atol=1e-12)


def test_a_row_far_from_all_others_takes_the_label_of_the_nearest() -> None:
    similar = torch.tensor([[0.0], [1.0], [1e4]], dtype=torch.float64)
    truth = torch.tensor([[1, 0], [0, 1], [1, 0]])
    found = neighbour_frequencies(similar, truth, 0.1)
    assert found[2].tolist() == pytest.approx([0.0, 1.0])


def test_the_divergence_is_that_of_scipy_number_by_number() -> None:
    p, q = torch.softmax(_normal(6, 3), 1), torch.softmax(_normal(6, 3, seed=1), 1)
    each = []
    for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True):
        each.append(max(float(jensenshannon([a, 1 - a], [b, 1 - b])), 0.01))
    assert float(bernoulli_js_distance(p, q)) == pytest.approx(sum(each) / len(each), rel=1e-9)


def test_the_divergence_is_finite_at_0_and_1_and_for_equal_probabilities() -> None:
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    value = bernoulli_js_distance(p, torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64))
    value.backward()
    assert math.isfinite(float(value.detach()))
    assert p.grad is not None
    assert bool(torch.isfinite(p.grad).all())


def test_the_gradient_of_the_whole_objective_is_right() -> None:
    features, log_p, truth = _normal(6, 5), torch.log_softmax(_normal(6, 3, seed=2), 1), _truth(6, 3)
    near = features @ principal_axes(features, 2)
    net = _start(5, 4, 2, 3, torch.Generator().manual_seed(0))
    net["class_weight"] = _normal(4, 3, seed=3)
    names = list(net)

    def objective(*values: Tensor) -> Tensor:
        log_q, similar = net_heads(dict(zip(names, values, strict=True)), features, near, log_p, None)
        seen = neighbour_frequencies(similar, truth, 2.0)
        return bernoulli_js_distance(log_q.exp(), seen) - (log_q * truth).sum(1).mean()

    assert torch.autograd.gradcheck(objective, [value.requires_grad_(True) for value in net.values()])


@pytest.mark.parametrize("n_classes", [3, 12])
def test_the_fit_starts_at_the_identity_map(n_classes: int) -> None:
    rows = draw_rows(n_classes=n_classes)
    features = rows.known_features.to(torch.float64)
    net = _start(8, 16, 4, n_classes, torch.Generator().manual_seed(0))
    log_p = torch.log_softmax(rows.logits, 1)
    log_q, _ = net_heads(net, features, features[:, :4], log_p, None)
    torch.testing.assert_close(log_q, log_p, rtol=0, atol=1e-12)
    assert net["class_alpha"].numel() == (1 if n_classes <= 10 else n_classes)


def test_a_fit_that_helps_nowhere_returns_the_identity_map() -> None:
    rows = draw_rows()
    # A learning rate so large that every pass is worse than the start on the rows kept apart.
    fitted = LocalNets.fit(rows, learning_rate=1e3, max_steps=20)
    torch.testing.assert_close(fitted.probabilities(rows), rows.logits.softmax(1), rtol=0, atol=1e-12)


def test_overconfident_logits_are_mended() -> None:
    rows, new = draw_rows(n=300), draw_rows(1, n=300)
    fitted = LocalNets.fit(rows, learning_rate=0.01, max_steps=150)

    def nll(probs: Tensor) -> float:
        return float(torch.nn.functional.nll_loss(probs.log(), new.known_labels))

    assert nll(fitted.probabilities(new)) < 0.8 * nll(new.logits.softmax(1))


@pytest.mark.parametrize("wrong", [{"hidden": 0}, {"dropout": 1.0}, {"bandwidth": 0.0}, {"n_components": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match="local_nets"):
        LocalNets.fit(draw_rows(), **wrong)


def test_standardised_features_and_axes_are_those_of_scikit_learn() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    features = draw_rows(n=60).known_features.to(torch.float64)
    ours = Standardiser.fit(features)(features, "test")
    theirs = preprocessing.StandardScaler().fit_transform(features.numpy())
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=0, atol=1e-12)
    axes = principal_axes(ours, 3)
    reference = decomposition.PCA(3, svd_solver="full").fit(theirs).components_.T
    torch.testing.assert_close(axes.abs(), torch.tensor(reference).abs(), rtol=0, atol=1e-9)


def test_a_constant_feature_becomes_zero() -> None:
    features = torch.cat([torch.full((50, 1), 0.1), torch.randn(50, 1, generator=torch.Generator().manual_seed(0))], 1)
    standardised = Standardiser.fit(features)(features, "test")
    assert float(standardised[:, 0].abs().max()) < 1e-6
    assert float(standardised[:, 1].std(correction=0)) == pytest.approx(1.0)
