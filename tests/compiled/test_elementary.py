"""Exponential and logarithm in plain arithmetic: accurate, and the same bits as the same operations one by one."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from segcal.compiled import elementary
from segcal.compiled.build import compiled
from segcal.compiled.elementary import exp_of_negative, log_of_positive

Values = NDArray[np.float64]


@compiled
def exponentials(values: Values, found: Values) -> None:
    for i in range(values.size):
        found[i] = exp_of_negative(values[i])


@compiled
def logarithms(values: Values, found: Values) -> None:
    for i in range(values.size):
        found[i] = log_of_positive(values[i])


def exp_of(values: Values) -> Values:
    found = np.empty_like(values)
    exponentials(values, found)
    return found


def log_of(values: Values) -> Values:
    found = np.empty_like(values)
    logarithms(values, found)
    return found


NEGATIVE = np.concatenate([-np.geomspace(1e-300, 700, 40_001), -np.linspace(0, 50, 40_001)])
POSITIVE = np.concatenate(
    [np.geomspace(1e-300, 1e300, 40_001), np.linspace(0.5, 5, 40_001), 1 + np.geomspace(1e-15, 1)]
)


def test_the_exponential_is_right_to_two_units_in_the_last_place() -> None:
    exact = np.exp(NEGATIVE.astype(np.longdouble))
    assert float(np.abs(exp_of(NEGATIVE) / exact - 1).max()) < 2 * 2.0**-52
    assert exp_of(np.zeros(1)).tolist() == [1.0]


def test_the_logarithm_is_right_to_rounding() -> None:
    exact = np.log(POSITIVE.astype(np.longdouble))
    error = np.abs(log_of(POSITIVE) - exact) / np.maximum(np.abs(exact), 1)
    assert float(error.max()) < 3e-16
    assert log_of(np.ones(1)).tolist() == [0.0]


@pytest.mark.parametrize(("value", "expected"), [(-1e9, np.exp(-700.0)), (-np.inf, np.exp(-700.0)), (np.nan, np.nan)])
def test_far_below_the_exponential_stays_positive_and_nan_stays_nan(value: float, expected: float) -> None:
    np.testing.assert_allclose(exp_of(np.array([value])), [expected], rtol=1e-15)


def test_compiled_loops_round_every_single_operation() -> None:
    """numpy does one operation after the other: fused products or reordered sums would give other last bits."""
    by_numpy = elementary.exp_of_negative.py_func  # type: ignore[attr-defined]
    values = NEGATIVE[::80]
    assert exp_of(values).tolist() == [by_numpy(np.float64(value)) for value in values]


def test_the_place_of_a_value_in_a_loop_does_not_change_its_bits() -> None:
    values = NEGATIVE[:1000]
    assert np.concatenate([exp_of(values[:1]), exp_of(values[1:38]), exp_of(values[38:])]).tobytes() == (
        exp_of(values).tobytes()
    )
