"""Exponential and logarithm in plain IEEE arithmetic: vectorised by the compiler, the same bits on every machine.

The C library's differ from version to version in their last bit and are called once a value.
"""

from __future__ import annotations

import numpy as np

from segcal.compiled.build import inlined

_LOG2_E = 1.4426950408889634
# log 2 in two parts: a whole number below 2^20 times the first is exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Adding this leaves a float's nearest whole number in its lowest bits.
_ROUNDER = 6755399441055744.0  # 1.5 * 2^52
_LOWEST = -700.0
_ONE_BITS = 1023 << 52
_ROOT_HALF_BITS = 0x3FE6A09E667F3BCD


@inlined
def exp_of_negative(x: float) -> float:
    """e^x for x <= 0 within 2 units in the last place; e^-700 below -700; NaN for NaN."""
    x = _LOWEST if x < _LOWEST else x
    shifted = x * _LOG2_E + _ROUNDER
    whole = shifted - _ROUNDER
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    # Taylor: |r| <= 0.35, so what follows the twelfth power is below 2^-52.
    p = r * (1 / 479001600) + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = np.int64((np.float64(shifted).view(np.int64) << 52) + _ONE_BITS)
    return float(p * power.view(np.float64))


@inlined
def log_of_positive(x: float) -> float:
    """Natural logarithm of a normal, positive number, within 3e-16 absolutely or relatively."""
    bits = np.float64(x).view(np.int64)
    exponent = (bits - _ROOT_HALF_BITS) >> 52
    mantissa = np.int64(bits - (exponent << 52)).view(np.float64)  # from sqrt(1/2) to sqrt(2)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    q = s * s
    # 2 atanh(s): |s| <= 0.172, so what follows the 21st power is below 2^-52.
    p = q * (1 / 21) + 1 / 19
    p = p * q + 1 / 17
    p = p * q + 1 / 15
    p = p * q + 1 / 13
    p = p * q + 1 / 11
    p = p * q + 1 / 9
    p = p * q + 1 / 7
    p = p * q + 1 / 5
    p = p * q + 1 / 3
    whole = np.float64(exponent)
    return float(whole * _LN2_HIGH + (2.0 * s + (2.0 * s * q * p + whole * _LN2_LOW)))
