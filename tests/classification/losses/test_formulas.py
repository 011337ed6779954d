"""Every loss against the loops of `literal`, in value, and against finite differences, in gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from segcal.classification.losses import LOSSES, make_loss
from tests.classification.losses import literal

Case = tuple[str, dict[str, Any], Callable[[Any, Any], float]]

CASES: list[Case] = [
    ("ce", {}, literal.cross_entropy),
    ("focal", {"gamma": 0.0}, literal.cross_entropy),
    ("focal", {"gamma": 0.5}, lambda P, y: literal.focal(P, y, 0.5)),
    ("focal", {}, lambda P, y: literal.focal(P, y, 3)),
    ("fl53", {}, literal.fl53),
    ("inverse_focal", {}, lambda P, y: literal.inverse_focal(P, y, 1)),
    ("inverse_focal", {"gamma": 3.5}, lambda P, y: literal.inverse_focal(P, y, 3.5)),
    ("dual_focal", {}, lambda P, y: literal.dual_focal(P, y, 5, released=False)),
    ("dual_focal_released", {"gamma": 2.6}, lambda P, y: literal.dual_focal(P, y, 2.6, released=True)),
    *(("aurc", {"score": s}, lambda P, y, s=s: literal.aurc(P, y, s)) for s in ("msp", "margin", "negative_entropy")),
    ("aurc", {"estimator": "log"}, lambda P, y: literal.aurc_log(P, y, "msp")),
    *(
        (
            "au_p",
            {"score": s, "coverage": k, "nu": nu, "n_bins": b},
            lambda P, y, a=(s, k, nu, b): literal.au_p(P, y, *a),
        )
        for s, k, nu, b in [("msp", 0.9, 0.1, 64), ("margin", 0.6, 0.05, 20), ("negative_entropy", 1.0, 0.1, 64)]
    ),
    ("mmce_m", {}, lambda P, y: literal.mmce_m(P, y, 0.4)),
    ("mmce_m", {"bandwidth": 0.05, "square_root": True}, lambda P, y: math.sqrt(literal.mmce_m(P, y, 0.05) + 1e-10)),
    ("mmce_w", {}, lambda P, y: literal.mmce_w(P, y, 0.4)),
    ("kde_ce", {"bandwidth": 0.05}, lambda P, y: literal.kde_canonical(P, y, 0.05, 1)),
    ("kde_ce", {"bandwidth": 0.2, "p": 2, "kind": "marginal"}, lambda P, y: literal.kde_marginal(P, y, 0.2, 2)),
    ("kde_ce", {"bandwidth": 0.01, "kind": "top_label"}, lambda P, y: literal.kde_top_label(P, y, 0.01, 1)),
    (
        "kde_xe",
        {"bandwidth": 0.1, "weight": 0.5},
        lambda P, y: literal.cross_entropy(P, y) + 0.5 * literal.kde_canonical(P, y, 0.1, 1),
    ),
    ("avuc", {"kappa": 0.8}, lambda P, y: literal.avuc(P, y, 0.8)),
    ("avuc_gs", {"kappa": 0.6}, lambda P, y: literal.avuc(P, y, 0.6)),
    ("s_avuc", {}, lambda P, y: literal.s_avuc(P, y, 0.5, 1)),
    ("s_avuc", {"kappa": 0.2, "temperature": 0.3}, lambda P, y: literal.s_avuc(P, y, 0.2, 0.3)),
    ("sb_ece", {}, lambda P, y: literal.sb_ece(P, y, 15, 0.001, 2, label_binned=False)),
    (
        "sb_ece",
        {"n_bins": 10, "temperature": 0.01, "p": 1},
        lambda P, y: literal.sb_ece(P, y, 10, 0.01, 1, label_binned=False),
    ),
    ("sb_ece_lb", {}, lambda P, y: literal.sb_ece(P, y, 15, 0.001, 2, label_binned=True)),
    ("sb_ece_lb", {"p": 3.5}, lambda P, y: literal.sb_ece(P, y, 15, 0.001, 3.5, label_binned=True)),
]


def draw(n: int, n_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 1.5, (n, n_classes)))
    labels = torch.from_numpy(rng.integers(0, n_classes, n))
    # Half of the predictions are right.
    logits[torch.arange(n)[::2], labels[::2]] += 2
    return logits, labels


def test_every_loss_has_a_literal_transcription() -> None:
    assert {name for name, _, _ in CASES} == set(LOSSES)


@pytest.mark.parametrize("n_classes", [2, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_value_is_that_of_the_formula(case: Case, n_classes: int) -> None:
    name, options, formula = case
    logits, labels = draw(40, n_classes)
    P = [literal.softmax(row) for row in logits.tolist()]
    expected = formula(P, labels.tolist())
    assert make_loss(name, **options)(logits, labels).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    single = make_loss(name, **options)(logits.float(), labels).item()
    assert single == pytest.approx(expected, rel=2e-4, abs=1e-6)


SMOOTH: list[tuple[str, dict[str, Any]]] = [
    # τ moves with the batch and is a constant to the gradient; so is r in AvUC-GS. Those have tests of their own.
    *((name, options) for name, options, _ in CASES if name not in {"au_p", "avuc_gs"}),
    *(("au_p", {"score": s, "threshold": 0.6, "weight_gradient": True}) for s in ("msp", "margin", "negative_entropy")),
    ("au_p", {"coverage": 1.0, "weight_gradient": True}),
    ("kde_ce", {"bandwidth": "likelihood"}),
    ("avuc", {}),
]


@pytest.mark.parametrize(("name", "options"), SMOOTH, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_gradient_is_that_of_finite_differences(name: str, options: dict[str, Any], seed: int) -> None:
    logits, labels = draw(14, 4, seed)
    loss = make_loss(name, **options)
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), (logits.requires_grad_(),), eps=1e-6, atol=1e-5)


def test_avuc_gs_has_the_value_of_avuc_and_no_gradient_through_the_confidence() -> None:
    logits, labels = draw(40, 4)
    values, gradients = [], []
    for name in ("avuc", "avuc_gs"):
        z = logits.clone().requires_grad_()
        value = make_loss(name, kappa=0.8)(z, labels)
        values.append(value.item())
        gradients.append(torch.autograd.grad(value, z)[0])
    assert values[0] == values[1]
    assert not torch.allclose(*gradients)

    p = torch.softmax(logits, dim=1)
    frozen, hits = p.amax(dim=1), p.argmax(dim=1) == labels

    def only_entropy(z: Tensor) -> Tensor:
        q = torch.softmax(z, dim=1)
        h = -(q * q.log()).sum(dim=1)
        certain = h <= 0.8
        soft = torch.where(hits, frozen, 1 - frozen) * torch.where(certain, 1 - torch.tanh(h), torch.tanh(h))
        return torch.log1p(soft[hits != certain].sum() / soft[hits == certain].sum())

    z = logits.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(only_entropy(z), z)[0], gradients[1])


def test_au_p_differentiates_the_weight_of_low_confidence_samples_only() -> None:
    """Appendix C.4: d(β CE) = dβ CE + β dCE below τ, and β dCE above, where β is one constant."""
    logits, labels = draw(60, 4)
    n_bins, nu = 64, 0.1
    loss = make_loss("au_p", coverage=0.5, nu=nu, n_bins=n_bins, weight_gradient=True)
    z = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(z, labels), z)

    p = torch.softmax(logits, dim=1)
    tau = p.amax(dim=1).sort().values[30]
    counts = torch.histc(p.amax(dim=1), n_bins, 0, 1)
    centres = (torch.arange(n_bins, dtype=torch.float64) + 0.5) / n_bins

    def cdf(x: Tensor) -> Tensor:
        return (torch.sigmoid((x[:, None] - centres) / nu) * counts).sum(dim=1) / 60

    z = logits.clone().requires_grad_()
    q = torch.softmax(z, dim=1)
    g = q.amax(dim=1)
    beta = torch.where(g < tau, -torch.log(1 - cdf(g)), -torch.log(1 - cdf(tau[None])))
    ce = -q[torch.arange(60), labels].log()
    (expected,) = torch.autograd.grad((beta * ce).mean(), z)
    torch.testing.assert_close(found, expected)

    frozen = make_loss("au_p", coverage=0.5, nu=nu, n_bins=n_bins)
    z = logits.clone().requires_grad_()
    assert frozen(z, labels) == loss(z, labels)
    (found,) = torch.autograd.grad(frozen(z, labels), z)
    q = torch.softmax(z, dim=1)
    (expected,) = torch.autograd.grad((beta.detach() * -q[torch.arange(60), labels].log()).mean(), z)
    torch.testing.assert_close(found, expected)


def test_the_kernel_term_of_kde_xe_carries_gradient() -> None:
    """One released copy turns it into a number first, and trains exactly like cross-entropy."""
    logits, labels = draw(40, 4)
    z = logits.clone().requires_grad_()
    (with_kernel,) = torch.autograd.grad(make_loss("kde_xe", bandwidth=0.05)(z, labels), z)
    (plain,) = torch.autograd.grad(make_loss("ce")(z, labels), z)
    (kernel,) = torch.autograd.grad(make_loss("kde_ce", bandwidth=0.05)(z, labels), z)
    assert kernel.norm() > 0.05 * plain.norm()
    torch.testing.assert_close(with_kernel, plain + 0.3 * kernel)


def leave_one_out(P: Sequence[Sequence[float]], h: float) -> float:
    n = len(P)
    densities = [sum(literal.dirichlet(P[j], [f / h + 1 for f in P[i]]) for i in range(n) if i != j) for j in range(n)]
    return sum(math.log(density / (n - 1)) for density in densities)


def test_the_bandwidth_maximises_the_leave_one_out_likelihood() -> None:
    from segcal.classification.losses.dirichlet_kernel import BANDWIDTHS, most_likely_bandwidth

    assert len(BANDWIDTHS) == 20
    np.testing.assert_allclose(BANDWIDTHS[:15], np.logspace(-5, -1, 15))
    logits, labels = draw(30, 3)
    chosen = most_likely_bandwidth(torch.log_softmax(logits, dim=1))
    P = [literal.softmax(row) for row in logits.tolist()]
    wide = [h for h in BANDWIDTHS if h > 0.003]  # below, the densities of the plain loops underflow
    assert chosen in wide
    assert chosen == max(wide, key=lambda h: leave_one_out(P, h))
    automatic = make_loss("kde_ce", bandwidth="likelihood")(logits, labels)
    assert automatic == make_loss("kde_ce", bandwidth=chosen)(logits, labels)
