"""NLL and Brier score."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from tests.metrics import reference
from tests.metrics.cases import CASES, Case, measure, small_cases


@pytest.mark.parametrize("name", sorted(CASES))
def test_nll_and_brier_agree_with_the_explicit_loop(name: str) -> None:
    probs, labels = CASES[name]()
    values = measure(probs, labels).values
    assert values["nll"] == pytest.approx(reference.nll(probs, labels), abs=1e-9)
    assert values["brier"] == pytest.approx(reference.brier(probs, labels), abs=1e-9)


@given(small_cases())
def test_nll_and_brier_agree_on_cases_full_of_coincidences(case: Case) -> None:
    values = measure(*case).values
    assert values["nll"] == pytest.approx(reference.nll(*case), abs=1e-9)
    assert values["brier"] == pytest.approx(reference.brier(*case), abs=1e-9)


def test_a_true_class_below_the_smallest_normal_float32_is_floored_and_counted() -> None:
    probs, labels = CASES["tiny probabilities"]()
    values = measure(probs, labels).values
    assert values["n_floored"] == 3  # 0, a subnormal, and the largest subnormal
    assert math.isfinite(values["nll"])


def test_foreground_that_cropping_cut_off_is_counted_apart() -> None:
    probs = np.zeros((2, 2, 3), dtype=np.float32)
    probs[0] = 1.0  # certain background everywhere
    labels = np.array([[0, 1, 1], [0, 0, 1]])
    inside = np.array([[True, True, False], [True, False, False]])
    values = measure(probs, labels, inside=inside).values
    assert (values["n_floored"], values["n_floored_outside"]) == (3, 2)
    assert values["nll"] == pytest.approx(3 * -math.log(reference.FLOOR) / 6, abs=1e-9)
