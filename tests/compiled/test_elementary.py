"""Exponential and logarithm in plain arithmetic: accurate, and the same bits as the same operations one by one."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from segcal.compiled import elementary
from segcal.compiled.build import compiled
from segcal.compiled.elementary import (
    exp_of_negative,
    exp_of_negative32,
    log_of_one_and32,
    log_of_positive,
    log_of_positive32,
)

Values = NDArray[np.float64]
Singles = NDArray[np.float32]


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


def test_the_logarithm_of_nan_is_nan() -> None:
    """Its bits are those of 89 to a loop that takes numbers apart."""
    assert np.isnan(log_of(np.full(9, np.nan))).all()
    found = np.empty(20, np.float32)
    logarithms32(np.full(20, np.nan, np.float32), found)
    assert np.isnan(found).all()


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


@compiled
def exponentials32(values: Singles, found: Singles) -> None:
    for i in range(values.size):
        found[i] = exp_of_negative32(values[i])


@compiled
def falls_of_exponential(first: int, last: int) -> int:
    """How often the next larger number below zero has a smaller exponential; by the bits of the numbers."""
    n_falls, before = 0, np.float32(0)
    values, found = np.empty(4096, np.float32), np.empty(4096, np.float32)
    bits = values.view(np.int32)
    for begin in range(last, first, -4096):
        for i in range(4096):
            bits[i] = np.int32(begin - i - 2**31)  # the sign, and falling magnitudes
        exponentials32(values, found)
        n_falls += found[0] < before
        before = found[4095]
        for i in range(1, 4096):
            n_falls += found[i] < found[i - 1]
    return n_falls


@compiled
def logarithms32(values: Singles, found: Singles) -> None:
    for i in range(values.size):
        found[i] = log_of_positive32(values[i])


@compiled
def logarithms_of_one_and32(values: Singles, found: Singles) -> None:
    for i in range(values.size):
        found[i] = log_of_one_and32(values[i])


def single(values: Values) -> Singles:
    return values.astype(np.float32)


NEGATIVE_32 = np.concatenate([-np.geomspace(1e-30, 87.3365, 40_001), -np.linspace(0, 20, 40_001)])
POSITIVE_32 = np.concatenate(
    [np.geomspace(2e-38, 3e38, 40_001), np.linspace(0.5, 5, 40_001), 1 + np.geomspace(1e-7, 1)]
)
UP_TO_ONE_32 = np.concatenate([np.geomspace(2e-38, 1, 40_001), np.linspace(0, 1, 40_001)])


# Bounds as near as can be, so that a coefficient which is a little off, or missing, is noticed.
def test_the_exponential_in_single_precision_is_right_to_rounding() -> None:
    values = single(NEGATIVE_32)
    found = np.empty_like(values)
    exponentials32(values, found)
    assert float(np.abs(found / np.exp(values.astype(np.float64)) - 1).max()) < 0.75 * 2.0**-23
    assert float(found.max()) == 1.0


def test_the_exponential_in_single_precision_never_falls() -> None:
    """All 276 million numbers from -90 to -2^-26, above which it is 1: calibrators promise to keep the order."""
    first, last = (int(np.float32(value).view(np.int32)) for value in (2.0**-26, 90.0))
    assert falls_of_exponential(first, last) == 0


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 1.0), (-87.4, 0.0), (-1e9, 0.0), (-np.inf, 0.0), (np.nan, np.nan)]
)
def test_single_precision_ends_at_zero_below_its_normal_numbers(value: float, expected: float) -> None:
    found = np.empty(20, np.float32)
    exponentials32(np.full(20, value, np.float32), found)
    np.testing.assert_array_equal(found, np.full(20, expected, np.float32))


def test_the_logarithm_in_single_precision_is_right_to_rounding() -> None:
    values = single(POSITIVE_32)
    found = np.empty_like(values)
    logarithms32(values, found)
    exact = np.log(values.astype(np.float64))
    assert float((np.abs(found - exact) / np.maximum(np.abs(exact), 1)).max()) < 0.9 * 2.0**-23
    assert found[values == 1].tolist() == [0.0] * int((values == 1).sum())


def test_the_logarithm_beside_one_keeps_its_digits_however_small_it_is() -> None:
    values = single(UP_TO_ONE_32)
    found = np.empty_like(values)
    logarithms_of_one_and32(values, found)
    exact = np.log1p(values.astype(np.float64))
    assert float((np.abs(found - exact) / np.maximum(exact, 1e-300)).max()) < 1.4 * 2.0**-23


def test_fused_operations_round_once_in_every_lane() -> None:
    """exp(x) by exact fractions, rounded to single precision where the loop rounds, is what the loop gives."""
    values = single(NEGATIVE_32[::400])
    found = np.empty_like(values)
    exponentials32(values, found)
    assert found.tolist() == [float(_exponential_by_fractions(value)) for value in values]


def _exponential_by_fractions(x: np.float32) -> np.float32:
    def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        near = np.float32(float(exact))  # may be rounded twice: the closest of its neighbours is right
        around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        return min(around, key=lambda one: (abs(Fraction(float(one)) - exact), one.view(np.int32) & 1))

    e = elementary
    shifted = fused(x, e._LOG2_E_32, e._ROUNDER_32)
    whole = np.float32(shifted - e._ROUNDER_32)
    r = fused(whole, -e._LN2_LOW_32, fused(whole, -e._LN2_HIGH_32, x))
    p = fused(r, e._E6, e._E5)
    for term in (e._E4, e._E3, e._E2):
        p = fused(p, r, term)
    p = np.float32(1) + fused(np.float32(r * r), p, r)
    return np.float32(np.ldexp(p, int(whole)))
