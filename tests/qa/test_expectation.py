"""Expected Dice and volumes: the formula, what it approximates, and where it has no value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segcal.metrics.base import Undefined
from segcal.qa.expectation import NOT_SEGMENTED, ClassSums, class_sums, foreground_mean, voxel_ml
from segcal.types import Grid
from tests.apply_data import rotated


def drawn_probs(seed: int, shape: tuple[int, ...] = (3, 4, 5, 6), scale: float = 3.0) -> torch.Tensor:
    logits = np.random.default_rng(seed).normal(0, scale, shape)
    return torch.softmax(torch.tensor(logits), 0).to(torch.float32)


@given(st.integers(0, 10_000))
def test_sums_are_those_of_an_explicit_loop(seed: int) -> None:
    probs = drawn_probs(seed, (3, 2, 3, 4))
    segmentation = torch.tensor(np.random.default_rng(seed + 1).integers(0, 3, (2, 3, 4)))
    found = class_sums(probs[1:], torch.stack([segmentation == c for c in (1, 2)]))
    for c, sums in zip((1, 2), found, strict=True):
        hard, expected, overlap = 0, 0.0, 0.0
        for z, y, x in np.ndindex(2, 3, 4):
            p = float(probs[c, z, y, x])
            expected += p
            if int(segmentation[z, y, x]) == c:
                hard, overlap = hard + 1, overlap + p
        assert sums.hard == hard
        assert sums.expected == pytest.approx(expected, abs=1e-12)
        assert sums.overlap == pytest.approx(overlap, abs=1e-12)
        if hard:
            assert sums.expected_dsc == pytest.approx(2 * overlap / (hard + expected), abs=1e-12)
            assert sums.volume_gap == pytest.approx((expected - hard) / hard, abs=1e-12)


@pytest.mark.parametrize(("side", "bound"), [(6, 3e-3), (24, 3e-4)])
def test_the_formula_is_the_mean_dice_of_truths_drawn_from_the_probabilities(side: int, bound: float) -> None:
    """With independent voxels the ratio of expectations is off by O(1 / voxels); the bounds hold that and the noise."""
    rng = np.random.default_rng(0)
    probs = drawn_probs(1, (2, side, side, side))
    mask = probs.argmax(0) == 1
    p, m = probs[1].double().numpy(), mask.numpy()
    (sums,) = class_sums(probs[1:], mask[None])
    dice = []
    for _ in range(1500 if side < 10 else 150):
        truth = rng.random(p.shape) < p
        dice.append(2.0 * (truth & m).sum() / (truth.sum() + m.sum()))
    noise = np.std(dice) / np.sqrt(len(dice))
    assert not isinstance(sums.expected_dsc, Undefined)
    assert abs(sums.expected_dsc - np.mean(dice)) < bound + 3 * noise
    assert noise < bound


def test_errors_that_go_together_leave_the_volume_right_and_its_spread_far_above_that_of_independent_voxels() -> None:
    """One coin for all doubtful voxels: the expectation holds, the independent-voxel variance does not."""
    p = np.full((10, 20, 20), 0.5)
    rng = np.random.default_rng(0)
    volumes = [p.size * (rng.random() < 0.5) for _ in range(2000)]
    (sums,) = class_sums(torch.tensor(p)[None], torch.ones(1, *p.shape, dtype=torch.bool))
    assert np.mean(volumes) == pytest.approx(sums.expected, rel=0.05)
    independent = np.sqrt((p * (1 - p)).sum())
    assert np.std(volumes) > 50 * independent


def test_a_map_that_is_certain_expects_exactly_one() -> None:
    segmentation = torch.tensor(np.random.default_rng(0).integers(0, 3, (3, 4, 5)))
    probs = torch.nn.functional.one_hot(segmentation, 3).movedim(-1, 0).float()
    for sums in class_sums(probs[1:], torch.stack([segmentation == c for c in (1, 2)])):
        assert sums.expected_dsc == 1.0
        assert sums.volume_gap == 0.0


def test_a_class_that_is_segmented_nowhere_has_no_dice_and_still_a_volume() -> None:
    probs = torch.full((1, 2, 2, 2), 0.25)
    (sums,) = class_sums(probs, torch.zeros(1, 2, 2, 2, dtype=torch.bool))
    assert sums.expected == 2.0
    assert sums.expected_dsc is NOT_SEGMENTED
    assert sums.volume_gap is NOT_SEGMENTED


def test_classes_without_a_value_are_left_out_of_the_mean() -> None:
    assert foreground_mean((0.5, NOT_SEGMENTED, 0.7)) == pytest.approx(0.6)
    assert isinstance(foreground_mean((NOT_SEGMENTED,)), Undefined)


def test_sums_stay_exact_beyond_single_precision() -> None:
    """2^24 + 1 voxels of probability 1: a float32 sum would stop at 2^24."""
    n = 2**24 + 1
    probs = torch.ones(1, 1, 1, n)
    (sums,) = class_sums(probs, torch.ones(1, 1, 1, n, dtype=torch.bool))
    assert sums == ClassSums(n, float(n), float(n))


def test_millilitres_come_from_the_determinant_of_an_oblique_affine() -> None:
    grid = Grid((3, 4, 5), rotated((0.8, 1.1, 2.5)))
    assert voxel_ml(grid) == pytest.approx(0.8 * 1.1 * 2.5 / 1000)
    assert voxel_ml(Grid((3, 4, 5))) is None
    assert voxel_ml(None) is None
