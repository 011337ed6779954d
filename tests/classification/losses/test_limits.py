"""What the papers say about limits, thresholds and estimators."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import lambertw
from torch import Tensor

from segcal.classification.losses import make_loss
from segcal.classification.losses.aurc import rank_weights
from segcal.classification.losses.inverse_focal import GAMMA_LIMIT
from segcal.classification.losses.laplacian import laplacian_form
from segcal.classification.losses.smoothed_cdf import bin_counts, survival
from segcal.errors import ParameterError


def binary(confidence: Any) -> Tensor:
    """(n, 2) float64 logits whose first probability is `confidence`."""
    p = torch.as_tensor(np.asarray(confidence, dtype=np.float64))
    return torch.stack([p.log(), torch.log1p(-p)], dim=1)


def calibrated(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Confidences uniform on [0.5, 1] whose labels are drawn with exactly that probability."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.5, 1, n)
    return binary(confidence), torch.from_numpy((rng.uniform(size=n) >= confidence).astype(np.int64))


# Inverse focal


def test_the_limit_of_inverse_focal_is_the_minimum_of_its_quotient() -> None:
    found = minimize_scalar(lambda p: (1 + p) / (-p * math.log(p)), bounds=(0.01, 0.9), options={"xatol": 1e-12})
    assert found.fun == pytest.approx(GAMMA_LIMIT, rel=1e-12)
    assert 1 / lambertw(math.exp(-1)).real == pytest.approx(GAMMA_LIMIT, rel=1e-15)


def slopes(gamma: float) -> Tensor:
    """d loss / d z of the true class at p from 0.001 to 0.999; it has the sign of d loss / d p."""
    p = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    logits = binary(p).requires_grad_()
    labels = torch.zeros(999, dtype=torch.int64)
    (gradient,) = torch.autograd.grad(make_loss("inverse_focal", gamma=gamma, forced=True)(logits, labels), logits)
    return gradient[:, 0]


def test_inverse_focal_pushes_away_from_the_label_exactly_above_its_limit() -> None:
    assert (slopes(3.59) < 0).all()
    rising = slopes(3.6) > 0
    assert rising.any()
    assert not rising.all()
    assert rising[280]  # p = 0.281


def test_inverse_focal_refuses_such_a_gamma_unless_forced() -> None:
    make_loss("inverse_focal", gamma=3.59)
    with pytest.raises(ParameterError, match=r"rises with the probability of the true class .* forced=True"):
        make_loss("inverse_focal", gamma=3.6)
    assert make_loss("inverse_focal", gamma=4.0, forced=True).gamma == 4.0


# Dual focal


def test_the_released_dual_focal_is_the_intended_one_where_the_prediction_is_right() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (200, 5)))
    right = logits.argmax(dim=1)
    assert make_loss("dual_focal_released")(logits, right) == make_loss("dual_focal")(logits, right)
    lowest = logits.argmin(dim=1)
    # With the label on the lowest class nothing lies below it, and the released form is plain focal loss.
    assert make_loss("dual_focal_released")(logits, lowest).item() == pytest.approx(
        make_loss("focal", gamma=5.0)(logits, lowest).item()
    )
    assert make_loss("dual_focal")(logits, lowest) > make_loss("dual_focal_released")(logits, lowest)


def test_the_released_dual_focal_jumps_where_the_intended_one_is_continuous() -> None:
    label = torch.zeros(1, dtype=torch.int64)
    just_right, just_wrong = binary([0.5 + 1e-9]), binary([0.5 - 1e-9])
    intended, released = make_loss("dual_focal"), make_loss("dual_focal_released")
    assert intended(just_right, label).item() == pytest.approx(intended(just_wrong, label).item(), rel=1e-7)
    assert released(just_right, label).item() > 30 * released(just_wrong, label).item()


# SB-ECE


def hard_ece(confidence: Any, hits: Any, n_bins: int, p: float, *, label_binned: bool) -> float:
    index = np.minimum((confidence * n_bins).astype(int), n_bins - 1)
    total = 0.0
    for j in range(n_bins):
        inside = index == j
        if inside.any():
            target = confidence[inside] if label_binned else confidence[inside].mean()
            total += inside.mean() * np.mean(np.abs(hits[inside].mean() - target) ** p)
    return float(total ** (1 / p))


@pytest.mark.parametrize("label_binned", [False, True])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_soft_binned_ece_becomes_ece_as_the_temperature_falls(p: float, label_binned: bool) -> None:
    rng = np.random.default_rng(1)
    confidence = rng.uniform(0.5, 1, 3000)
    labels = (rng.uniform(size=3000) < 0.4).astype(np.int64)
    expected = hard_ece(confidence, labels == 0, 15, p, label_binned=label_binned)
    name = "sb_ece_lb" if label_binned else "sb_ece"
    gaps = [
        abs(make_loss(name, temperature=t, p=p)(binary(confidence), torch.from_numpy(labels)).item() - expected)
        for t in (1e-2, 1e-3, 1e-5, 1e-8)
    ]
    assert gaps[-1] < 1e-5
    assert gaps[0] > 10 * gaps[-1]


def test_soft_binned_ece_of_a_calibrated_model_goes_to_zero_with_more_data() -> None:
    """Proposition 1. Noise falls as 1/sqrt(n); the label-binned form keeps the spread inside its bins."""
    means = [np.mean([make_loss("sb_ece")(*calibrated(n, seed)).item() for seed in range(5)]) for n in (400, 40_000)]
    assert means[1] < 0.2 * means[0]
    assert means[1] < 0.01
    logits, labels = calibrated(40_000)
    assert make_loss("sb_ece")(logits * 3, labels) > 0.05


# AURC and its binned form


def test_harmonic_weights_are_the_average_of_selective_risks() -> None:
    rng = np.random.default_rng(2)
    scores, losses = rng.uniform(size=50), rng.exponential(size=50)
    weights = rank_weights(torch.from_numpy(scores)).numpy()
    order = np.argsort(-scores)
    risks = np.cumsum(losses[order]) / np.arange(1, 51)
    assert (weights * losses).mean() == pytest.approx(risks.mean(), rel=1e-12)


def test_both_estimators_of_aurc_agree_for_many_samples() -> None:
    logits, labels = calibrated(200_000)
    harmonic = make_loss("aurc")(logits, labels).item()
    assert make_loss("aurc", estimator="log")(logits, labels).item() == pytest.approx(harmonic, rel=1e-3)


def test_aurc_is_the_population_integral() -> None:
    """-E[ln(1 - G) CE] with G uniform: for confidence 0.5 + G/2 and calibrated labels, an integral of one variable."""
    g = (np.arange(200_000) + 0.5) / 200_000
    c = 0.5 + g / 2
    expected = np.mean(-np.log1p(-g) * -(c * np.log(c) + (1 - c) * np.log1p(-c)))
    assert make_loss("aurc")(*calibrated(400_000)).item() == pytest.approx(expected, rel=0.02)


def test_equally_confident_samples_share_their_weight() -> None:
    weights = rank_weights(torch.tensor([0.3, 0.9, 0.9, 0.9, 0.1]))
    distinct = rank_weights(torch.tensor([0.3, 0.91, 0.92, 0.93, 0.1]))
    assert weights[1] == weights[2] == weights[3]
    assert weights[1].item() == pytest.approx(distinct[1:4].mean().item())
    assert weights[0] == distinct[0]
    assert weights[4] == distinct[4]


def test_the_binned_distribution_becomes_the_empirical_one_as_nu_falls() -> None:
    scores = torch.from_numpy(np.random.default_rng(3).beta(4, 1, 5000))
    for n_bins in (64, 1024):
        counts = bin_counts(scores, n_bins)
        found = 1 - survival(scores, counts, nu=1e-7)
        empirical = (scores[None] <= scores[:, None]).double().mean(dim=1)
        # A score is compared with the centres of bins: it is off by no more than the mass of its own bin.
        assert (found - empirical).abs().max() <= counts.max() / len(scores) + 1e-9
    smooth = 1 - survival(scores, counts, nu=0.1)
    assert (smooth - empirical).abs().max() > 0.05


def test_binned_aurc_of_everything_comes_close_to_the_sorted_one() -> None:
    logits, labels = calibrated(20_000)
    sorted_form = make_loss("aurc")(logits, labels).item()
    binned = make_loss("au_p", coverage=1.0, nu=1e-4, n_bins=4096)(logits, labels).item()
    assert binned == pytest.approx(sorted_form, rel=0.01)


def test_coverage_sets_how_many_samples_have_weights_of_their_own() -> None:
    logits, labels = calibrated(1000)
    loss = make_loss("au_p", coverage=0.3)
    confidence = torch.softmax(logits, dim=1).amax(dim=1)
    assert int((confidence < loss._threshold(confidence)).sum()) == 300
    assert make_loss("au_p", coverage=0.3)(logits, labels) == make_loss(
        "au_p", threshold=float(confidence.sort().values[300])
    )(logits, labels)


# MMCE


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 0.1]), st.floats(-1, 1)), min_size=1, max_size=12),
    st.sampled_from([0.01, 0.1, 0.4, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_running_sums_are_the_double_sum_with_duplicates_and_symmetric_slopes(
    rows: list[tuple[float, float]], bandwidth: float
) -> None:
    points = torch.tensor([r for r, _ in rows], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([w for _, w in rows], dtype=torch.float64, requires_grad=True)
    kernel = torch.exp(-(points[:, None] - points).abs() / bandwidth)  # the slope of abs at 0 is 0 in torch
    expected = weights @ kernel @ weights
    found = laplacian_form(weights, points, bandwidth)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(found, (weights, points)), torch.autograd.grad(expected, (weights, points)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_mmce_is_small_for_calibrated_and_large_for_overconfident_models() -> None:
    logits, labels = calibrated(20_000)
    loss = make_loss("mmce_m", square_root=True)
    assert loss(logits, labels) < 0.01
    assert loss(logits * 4, labels) > 0.1


def test_weighted_mmce_does_not_vanish_for_a_calibrated_model() -> None:
    """E[a(1-r)k] = E[(1-a)rk] there, and the weights 1/m and 1/m' of unequal kinds pull the two apart."""
    for n in (1000, 100_000):
        assert make_loss("mmce_w")(*calibrated(n)) > 0.1


def test_weighted_mmce_is_zero_without_right_or_without_wrong_samples() -> None:
    logits = binary([0.7, 0.8, 0.9]).requires_grad_()
    for label in (0, 1):
        value = make_loss("mmce_w")(logits, torch.full((3,), label))
        value.backward()
        assert value == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


# AvUC


def test_avuc_takes_the_midpoint_of_mean_entropies_when_no_threshold_is_given() -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 2, (300, 4)))
    labels = torch.from_numpy(rng.integers(0, 4, 300))
    p = torch.softmax(logits, dim=1)
    entropy, hits = -(p * p.log()).sum(dim=1), p.argmax(dim=1) == labels
    kappa = float((entropy[hits].mean() + entropy[~hits].mean()) / 2)
    assert make_loss("avuc")(logits, labels) == make_loss("avuc", kappa=kappa)(logits, labels)
    right = logits.argmax(dim=1)
    assert make_loss("avuc")(logits, right) == make_loss("avuc", kappa=math.log(4) / 2)(logits, right)


def test_soft_uncertainty_is_sharp_at_a_low_temperature() -> None:
    """As T falls the soft cells become those of the threshold κ ln C."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 2, (300, 4)))
    labels = torch.from_numpy(rng.integers(0, 4, 300))
    p = torch.softmax(logits, dim=1)
    entropy, hits = -(p * p.log()).sum(dim=1), p.argmax(dim=1) == labels
    unsure, uncertain = torch.tanh(entropy), entropy > 0.4 * math.log(4)
    part = torch.where(uncertain, unsure, 1 - unsure)
    expected = torch.log1p(part[hits == uncertain].sum() / part[hits != uncertain].sum())
    found = make_loss("s_avuc", kappa=0.4, temperature=1e-9)(logits, labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_batch_that_is_wrong_and_certain_gives_a_finite_loss() -> None:
    for name, options in itertools.product(("avuc", "avuc_gs"), ({"kappa": 0.5}, {})):
        logits = torch.tensor([[30.0, 0.0], [1e4, -1e4]], requires_grad=True)
        value = make_loss(name, **options)(logits, torch.ones(2, dtype=torch.int64))
        value.backward()
        assert value.isfinite()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
