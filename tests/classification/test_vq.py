"""VQ local Dirichlet calibration: codes, the moving average, the map, what the fit promises."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from scipy import stats
from torch import Tensor

from segcal.classification.samples import Samples
from segcal.classification.vq import LocalDirichletCalibration, QuantisedDirichlet, QuantisedHead
from segcal.classification.vq_codebook import assign, choose_slots, cut, draw_codebook, update_codebook
from segcal.classification.vq_dirichlet import LocalDirichlet
from segcal.errors import ParameterError
from tests.classification.feature_rows import draw_rows


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n_slots", "n_codes", "size"), [(1, 5, 3), (2, 4, 1), (3, 4, 2), (4, 3, 2)])
def test_slot_wise_codes_are_the_nearest_of_all_combinations(n_slots: int, n_codes: int, size: int) -> None:
    features, codebook = _normal(20, n_slots * size), _normal(n_codes, size, seed=1)
    codes = assign(cut(features, size), codebook)
    combinations = torch.tensor(list(product(range(n_codes), repeat=n_slots)))
    whole = codebook[combinations].flatten(1)  # (K^w, d)
    distances = (features.unsqueeze(1) - whole).square().sum(-1)
    assert torch.equal(combinations[distances.argmin(1)], codes)


def test_the_default_number_of_slots_is_the_largest_divisor_up_to_64() -> None:
    assert [choose_slots(d) for d in (2048, 128, 100, 64, 32, 97, 1)] == [64, 64, 50, 64, 32, 1, 1]
    assert choose_slots(100, 20) == 20


def test_slots_that_do_not_divide_the_features_are_refused_with_those_that_do() -> None:
    with pytest.raises(ParameterError, match="choose one of 1, 2, 5, 10, or"):
        LocalDirichletCalibration.fit(draw_rows(n_features=10), n_slots=4)


def test_zeros_appended_to_the_features_change_no_code() -> None:
    features, codebook = _normal(30, 6), _normal(5, 2, seed=1)
    codebook[0] = 0.0
    longer = torch.cat([features, torch.zeros(30, 2, dtype=torch.float64)], 1)
    assert torch.equal(assign(cut(longer, 2), codebook)[:, :3], assign(cut(features, 2), codebook))


def test_the_moving_average_follows_its_definition_and_leaves_unmet_codewords() -> None:
    slots, codebook = _normal(7, 2, 3), _normal(4, 3, seed=1)
    codebook[3] = 1e3  # far from everything
    counts = torch.ones(4, dtype=torch.float64)
    sums, numbers = [codebook[k].clone() for k in range(4)], [1.0] * 4
    moved = codebook.clone()
    for _ in range(3):
        codes = assign(slots, moved)
        for k in range(4):
            met = [slots[i, s] for i in range(7) for s in range(2) if codes[i, s] == k]
            numbers[k] = 0.9 * numbers[k] + 0.1 * len(met)
            sums[k] = 0.9 * sums[k] + 0.1 * sum(met, torch.zeros(3, dtype=torch.float64))
        update_codebook(moved, counts, slots, codes, decay=0.9)
        expected = torch.stack([total / n for total, n in zip(sums, numbers, strict=True)])
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=0)
    assert torch.equal(moved[3], codebook[3])


def test_the_codebook_starts_from_distinct_slots_and_repeats_only_when_it_must() -> None:
    slots = torch.arange(12, dtype=torch.float64).reshape(3, 2, 2)
    generator = torch.Generator().manual_seed(0)
    assert len(torch.unique(draw_codebook(slots, 6, generator), dim=0)) == 6
    assert draw_codebook(slots, 20, generator).shape == (20, 2)


def _drawn_map(n_codes: int, n_classes: int, n_slots: int) -> LocalDirichlet:
    return LocalDirichlet(
        _normal(n_codes, n_classes, seed=1),
        _normal(n_codes, n_classes, seed=2),
        _normal(n_slots, seed=3),
        _normal(n_classes, seed=4),
    )


def _log_p_literally(local: LocalDirichlet, codes: Tensor, log_p: Tensor) -> Tensor:
    """VQ eq. 9, 10, 15, 16 and 70, one number at a time."""
    n, n_classes = log_p.shape
    rows = []
    for r in range(n):
        scores = []
        for j in range(n_classes):
            alpha = []
            for i in range(n_classes):
                inner = sum(
                    local.receiver[k, i] * local.sigma[s] ** 2 * local.sender[k, j] for s, k in enumerate(codes[r])
                )
                alpha.append(torch.log1p(torch.exp(torch.as_tensor(inner))) + (1.0 if i == j else 0.0))
            log_beta = sum(torch.lgamma(a) for a in alpha) - torch.lgamma(sum(alpha))  # type: ignore[arg-type]
            score = local.log_prior[j] - log_beta
            for i in range(n_classes):
                score = score + (alpha[i] - 1) * log_p[r, i]
            scores.append(score)
        stacked = torch.stack(scores)
        rows.append(stacked - torch.logsumexp(stacked, 0))
    return torch.stack(rows)


def test_the_map_is_its_formula_and_so_is_its_gradient() -> None:
    local, codes = _drawn_map(5, 3, 4), torch.randint(5, (6, 4), generator=torch.Generator().manual_seed(0))
    log_p = torch.log_softmax(_normal(6, 3), 1)
    torch.testing.assert_close(local.log_probs(codes, log_p), _log_p_literally(local, codes, log_p), rtol=1e-12, atol=0)
    parts = [p.requires_grad_(True) for p in (local.receiver, local.sender, local.sigma, local.log_prior)]
    assert torch.autograd.gradcheck(lambda *p: LocalDirichlet(*p).log_probs(codes, log_p), parts)


def test_the_map_is_the_posterior_of_the_dirichlets_it_assumes() -> None:
    local, codes = _drawn_map(4, 3, 2), torch.tensor([[0, 3], [2, 2]])
    log_p = torch.log_softmax(_normal(2, 3), 1)
    found = local.log_probs(codes, log_p).exp()
    alpha = local.concentrations(codes)
    for r in range(2):
        point = log_p[r].exp().numpy()
        joint = [
            math.exp(local.log_prior[j]) * stats.dirichlet.pdf(point / point.sum(), alpha[r, :, j].numpy())
            for j in range(3)
        ]
        torch.testing.assert_close(found[r], torch.tensor(joint) / sum(joint), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("n_slots", "n_classes"), [(1, 2), (64, 10), (7, 30)])
def test_the_start_is_the_identity_map(n_slots: int, n_classes: int) -> None:
    generator = torch.Generator().manual_seed(5)
    local = LocalDirichlet.start(16, n_classes, n_slots, generator)
    codes = torch.randint(16, (40, n_slots), generator=generator)
    log_p = torch.log_softmax(5 * _normal(40, n_classes), 1)
    torch.testing.assert_close(local.log_probs(codes, log_p), log_p, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(local.sigma, local.sigma[0]) or n_slots == 1


def test_the_calibration_has_2kc_w_and_c_parameters() -> None:
    fitted = LocalDirichletCalibration.fit(draw_rows(), n_slots=4, n_codes=6, max_steps=4)
    assert fitted.n_parameters == 2 * 6 * 3 + 4 + 3
    stored = fitted.tensors()
    assert sum(stored[name].numel() for name in ("A", "B", "sigma", "log_prior")) == fitted.n_parameters


def test_a_negative_sigma_acts_like_a_positive_one() -> None:
    local, codes = _drawn_map(5, 3, 4), torch.zeros(2, 4, dtype=torch.int64)
    flipped = LocalDirichlet(local.receiver, local.sender, -local.sigma, local.log_prior)
    assert bool((local.concentrations(codes) > 0).all())
    assert torch.equal(local.concentrations(codes), flipped.concentrations(codes))


def test_the_three_methods_share_their_first_stage() -> None:
    rows, short = draw_rows(), {"max_steps": 40, "seed": 2}
    heads = [m.fit(rows, **short).head for m in (QuantisedHead, QuantisedDirichlet, LocalDirichletCalibration)]
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert torch.equal(heads[0].codebook, heads[2].codebook)


def test_the_quantised_head_learns_classes_that_the_cells_tell_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (400,), generator=generator)
    corners = torch.tensor([[0.0, 0, 5, 5], [5, 5, 0, 0], [5, 0, 5, 0]])
    features = corners[labels] + 0.1 * torch.randn(400, 4, generator=generator)
    rows = Samples.of(torch.zeros(400, 3), labels, features)
    fitted = QuantisedHead.fit(rows, n_slots=2, n_codes=8, learning_rate=0.05, max_steps=300)
    assert float((fitted.probabilities(rows).argmax(1) == labels).double().mean()) > 0.99


def test_the_local_map_tells_cells_apart_that_one_map_for_all_cannot() -> None:
    """The same signal, right nearly always in one cell and hardly better than chance in the other."""
    generator = torch.Generator().manual_seed(0)
    n = 300
    cell, labels = torch.randint(2, (n,), generator=generator), torch.randint(2, (n,), generator=generator)
    right = torch.rand(n, generator=generator) < torch.where(cell == 1, 0.6, 0.98)
    shown = torch.where(right, labels, 1 - labels)
    # Slot 1 holds the cell, slot 2 the signal; a linear head cannot take their product.
    features = torch.stack([10 + 20.0 * cell, 1.0 * shown], 1)
    rows = Samples.of(torch.zeros(n, 2), labels, features)

    def worst_gap(method: type[QuantisedDirichlet] | type[LocalDirichletCalibration]) -> float:
        fitted = method.fit(rows, n_slots=2, n_codes=8, learning_rate=0.05, max_steps=400, patience=150)
        confidence, decision = fitted.probabilities(rows).max(1)
        gap = confidence - (decision == labels).double()
        return max(abs(float(gap[cell == c].mean())) for c in (0, 1))

    assert worst_gap(QuantisedDirichlet) > 0.1
    assert worst_gap(LocalDirichletCalibration) < 0.06
