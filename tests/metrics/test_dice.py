"""Dice score."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from tests.metrics import reference
from tests.metrics.cases import CASES, Case, draw_case, measure, small_cases


def check(probs: np.ndarray, labels: np.ndarray, *, include_background: bool) -> None:
    values = measure(probs, labels, include_background=include_background).values
    each = reference.dice(probs, labels)
    for c, expected in enumerate(each):
        assert values[f"dsc:c{c}"] == pytest.approx(expected, abs=1e-9, nan_ok=True)
    counted = [d for d in each[0 if include_background else 1 :] if not math.isnan(d)]
    mean = sum(counted) / len(counted) if counted else math.nan
    assert values["dsc"] == pytest.approx(mean, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("include_background", [False, True])
@pytest.mark.parametrize("name", sorted(CASES))
def test_dice_agrees_with_the_explicit_loop(name: str, include_background: bool) -> None:
    check(*CASES[name](), include_background=include_background)


@given(small_cases())
def test_dice_agrees_on_cases_full_of_coincidences(case: Case) -> None:
    check(*case, include_background=False)


def test_a_class_in_neither_map_is_undefined_and_left_out_of_the_mean() -> None:
    labels = np.array([[0, 0, 1, 1]])
    probs = np.eye(3, dtype=np.float32)[[[0, 1, 1, 1]]].transpose(2, 0, 1).copy()
    result = measure(probs, labels)
    assert math.isnan(result.values["dsc:c2"])
    assert "neither" in result.undefined["dsc:c2"]
    assert result.values["dsc"] == result.values["dsc:c1"] == pytest.approx(0.8)


def test_without_any_foreground_the_mean_is_undefined_and_not_zero() -> None:
    labels = np.zeros((2, 3), dtype=np.int64)
    probs = np.stack([np.ones((2, 3)), np.zeros((2, 3))]).astype(np.float32)
    result = measure(probs, labels)
    assert math.isnan(result.values["dsc"])
    assert result.undefined["dsc"]


def test_many_classes_do_not_overflow_the_narrow_label_type() -> None:
    probs, _ = draw_case(0, (4, 5), 300, sharpness=2.0)
    labels = np.random.default_rng(0).integers(0, 300, (4, 5))
    values = measure(probs, labels, include_background=True).values
    each = [d for d in reference.dice(probs, labels) if not math.isnan(d)]
    assert values["dsc"] == pytest.approx(sum(each) / len(each), abs=1e-9)
