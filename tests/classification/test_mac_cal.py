"""MaC-Cal's second stage: masks, the masked step, the retention rate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from segcal.classification.files import fit
from segcal.classification.mac_cal import (
    MaskedClassifier,
    MaskedTraining,
    Net,
    draw_masks,
    masked_step,
    next_retention,
    retrain,
    scores_of,
    step_limit,
)
from segcal.errors import ParameterError
from tests.classification.feature_rows import draw_rows

unit = st.floats(0, 1)


def _net(seed: int = 0) -> Net:
    generator = torch.Generator().manual_seed(seed)
    first, first_bias, second, second_bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((8, 5), (5,), (5, 3), (3,))
    )
    return first, first_bias, second, second_bias


def _batch() -> tuple[Tensor, Tensor]:
    rows = draw_rows(n=128)
    return rows.known_features.to(torch.float64), rows.known_labels


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_masked_weight_does_not_move_whatever_its_velocity_and_decay(momentum: float) -> None:
    net, generator = _net(), torch.Generator().manual_seed(1)
    velocity = [torch.ones_like(value) for value in net]
    training = MaskedTraining(momentum=momentum, weight_decay=0.1)
    for _ in range(3):
        before, speed = [value.clone() for value in net], [value.clone() for value in velocity]
        masks = draw_masks(net, 0.5, generator)
        masked_step(net, velocity, masks, *_batch(), training)
        for value, old, fast, old_fast, mask in zip(net, before, velocity, speed, masks, strict=True):
            assert torch.equal(value[~mask], old[~mask])
            assert torch.equal(fast[~mask], old_fast[~mask])
        assert bool((net[0] != before[0])[masks[0]].any())
        assert bool((net[2] != before[2])[masks[2]].all())


def test_the_mask_also_masks_the_forward_pass() -> None:
    """Changing a masked weight changes no other weight's step."""
    masks = draw_masks(_net(), 0.5, torch.Generator().manual_seed(1))
    one, two = _net(), _net()
    two[0][~masks[0]] += 10.0
    two[2][~masks[2]] -= 10.0
    training = MaskedTraining(weight_decay=0.0)
    for net in (one, two):
        masked_step(net, [torch.zeros_like(value) for value in net], masks, *_batch(), training)
    for a, b, mask in zip(one, two, masks, strict=True):
        assert torch.equal(a[mask], b[mask])


def test_without_a_mask_the_step_is_that_of_torch() -> None:
    net, training = _net(), MaskedTraining(learning_rate=0.1, momentum=0.9, weight_decay=5e-4)
    reference = [value.clone().requires_grad_(True) for value in net]
    optimiser = torch.optim.SGD(reference, lr=0.1, momentum=0.9, weight_decay=5e-4)
    velocity = [torch.zeros_like(value) for value in net]
    features, labels = _batch()
    for _ in range(5):
        masked_step(net, velocity, draw_masks(net, 1.0, torch.Generator()), features, labels, training)
        optimiser.zero_grad()
        first, first_bias, second, second_bias = reference
        torch.nn.functional.cross_entropy(
            scores_of((first, first_bias, second, second_bias), features), labels
        ).backward()
        optimiser.step()
    for value, expected in zip(net, reference, strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-14)


def test_the_learning_rate_shrinks_with_the_batch() -> None:
    features, labels = _batch()
    moves = []
    for n in (32, 128):
        net, training = _net(), MaskedTraining(momentum=0.0, weight_decay=0.0)
        # The same 32 rows, once or four times: the same mean gradient.
        rows = torch.arange(32).repeat(n // 32)
        masked_step(
            net,
            [torch.zeros_like(value) for value in net],
            draw_masks(net, 1.0, torch.Generator()),
            features[rows],
            labels[rows],
            training,
        )
        moves.append(net[2] - _net()[2])
    torch.testing.assert_close(4 * moves[0], moves[1], rtol=1e-9, atol=1e-15)


def test_masks_keep_the_share_they_are_asked_for_and_every_bias() -> None:
    net = (torch.zeros(200, 300), torch.zeros(300), torch.zeros(300, 10), torch.zeros(10))
    for share in (0.0, 0.3, 1.0):
        masks = draw_masks(net, share, torch.Generator().manual_seed(0))
        assert float(masks[0].double().mean()) == pytest.approx(share, abs=0.01)
        assert bool(masks[1].all())
        assert bool(masks[3].all())


@given(unit, unit, unit, st.floats(0.01, 1), st.integers(1, 40))
def test_the_retention_rate_follows_its_formula_and_stays_a_probability(
    q: float, confidence: float, accuracy: float, gamma: float, epoch: int
) -> None:
    eta = 0.1 * math.exp(math.log(0.001 / 0.1) * epoch / 40)
    change = confidence - gamma * accuracy
    if change > eta:
        change = eta
    if change < -eta:
        change = -eta
    expected = q + change
    if expected > 1:
        expected = 1.0
    if expected < 0:
        expected = 0.0
    found = next_retention(q, confidence, accuracy, gamma, step_limit(epoch, 40))
    assert found == pytest.approx(expected, abs=1e-15)
    assert 0 <= found <= 1


def test_the_limit_of_a_change_falls_from_a_tenth_to_a_thousandth() -> None:
    limits = [step_limit(t, 40) for t in range(41)]
    assert limits[0] == pytest.approx(0.1)
    assert limits[40] == pytest.approx(0.001)
    assert limits == sorted(limits, reverse=True)


def test_retraining_is_algorithm_1_line_by_line() -> None:
    """Gradients of the masked weights, masked once more (eq. 11); q from the network without masks, once an epoch."""
    features, labels = (part[:24] for part in _batch())
    training = MaskedTraining(epochs=4, batch_rows=8, momentum=0.0, weight_decay=0.0, learning_rate=8.0)
    net = _net()
    found = retrain(net, features, labels, 0.9, training, torch.Generator().manual_seed(7))

    draw, q, path = torch.Generator().manual_seed(7), 0.5, [0.5]
    first, first_bias, second, second_bias = _net()
    for t in range(1, 5):
        order = torch.randperm(24, generator=draw)
        for batch in (order[:8], order[8:16], order[16:]):
            # The generator also moves on by the number of biases, whose masks are all ones.
            kept = [torch.rand(shape, generator=draw, dtype=torch.float64) < q for shape in ((8, 5), 5, (5, 3), 3)]
            used = [first * kept[0], first_bias, second * kept[2], second_bias]
            used = [value.detach().requires_grad_(True) for value in used]
            inner = (features[batch] @ used[0] + used[1]).clamp(min=0)
            log_p = torch.log_softmax(inner @ used[2] + used[3], 1)
            slope = torch.autograd.grad(-log_p[torch.arange(8), labels[batch]].mean(), used)
            rate = 8.0 * 8 / 128
            first, second = first - rate * kept[0] * slope[0], second - rate * kept[2] * slope[2]
            first_bias, second_bias = first_bias - rate * slope[1], second_bias - rate * slope[3]
        probs = torch.softmax((features @ first + first_bias).clamp(min=0) @ second + second_bias, 1)
        gap = float(probs.max(1).values.mean()) - 0.9 * float((probs.argmax(1) == labels).double().mean())
        eta = 0.1 * math.exp(math.log(0.001 / 0.1) * t / 4)
        q = min(max(q + min(max(gap, -eta), eta), 0.0), 1.0)
        path.append(q)
    assert found == pytest.approx(path, abs=1e-12)
    for value, expected in zip(net, (first, first_bias, second, second_bias), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("redraw", ["batch", "epoch"])
def test_a_fit_starts_at_one_half_and_its_rate_stays_within_0_and_1(redraw: str) -> None:
    fitted = MaskedClassifier.fit(draw_rows(), gamma=0.9, width=16, epochs=12, redraw=redraw)
    assert len(fitted.retention) == 13
    assert float(fitted.retention[0]) == 0.5
    assert bool(((fitted.retention >= 0) & (fitted.retention <= 1)).all())
    steps = fitted.retention.diff().abs()
    assert all(float(step) <= step_limit(t, 12) + 1e-12 for t, step in enumerate(steps, 1))


def test_masks_of_a_batch_and_of_an_epoch_are_different_fits() -> None:
    one = MaskedClassifier.fit(draw_rows(), gamma=0.9, width=16, epochs=3, redraw="batch")
    two = MaskedClassifier.fit(draw_rows(), gamma=0.9, width=16, epochs=3, redraw="epoch")
    assert not torch.equal(one.net[0], two.net[0])


def test_the_classifier_learns_and_answers_the_same_every_time() -> None:
    rows, new = draw_rows(n=600), draw_rows(1, n=600)
    fitted = MaskedClassifier.fit(rows, gamma=0.9, width=32, epochs=20)
    first = fitted.probabilities(new)
    torch.manual_seed(0)
    assert torch.equal(first, fitted.probabilities(new))
    assert float((first.argmax(1) == new.labels).double().mean()) > 0.85


def test_the_pair_with_the_best_validation_nll_is_taken() -> None:
    rows, judge = draw_rows(n=200), draw_rows(1, n=200)
    fitted = MaskedClassifier.fit(rows, gamma=(0.5, 0.95), width=(4, 32), validation=judge, epochs=6)

    def nll(method: MaskedClassifier) -> float:
        return float(torch.nn.functional.nll_loss(method.probabilities(judge).log(), judge.known_labels))

    each = [nll(MaskedClassifier.fit(rows, gamma=g, width=w, epochs=6)) for g in (0.5, 0.95) for w in (4, 32)]
    assert nll(fitted) == min(each)
    assert len(set(each)) == 4


def test_the_file_tells_which_pair_was_chosen() -> None:
    made = fit("mac_cal", draw_rows(n=128), gamma=(0.8, 0.9), width=(4, 8), epochs=1)
    assert isinstance(made.method, MaskedClassifier)
    settings = made.info.settings
    assert settings["gamma"] == made.method.gamma
    assert settings["gamma"] in (0.8, 0.9)
    assert settings["width"] == made.method.net[2].shape[0]
    assert settings["width"] in (4, 8)


@pytest.mark.parametrize(
    "wrong", [{"gamma": 0.0}, {"gamma": 1.5}, {"width": 0}, {"redraw": "day"}, {"epochs": 0}, {"momentum": 1.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match="mac_cal"):
        MaskedClassifier.fit(draw_rows(), **wrong)
