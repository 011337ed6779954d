"""Exponential and logarithm in plain IEEE arithmetic: vectorised by the compiler, the same bits on every machine.

The C library's differ from version to version in their last bit and are called once a value. Those whose name ends in
`32` take and give single precision: a vector register holds twice as many, and polynomials are half as long.
"""

from __future__ import annotations

import numpy as np

from segcal.compiled.build import fused, inlined

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
    """Natural logarithm of a normal, positive number, within 3e-16 absolutely or relatively; NaN for NaN."""
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
    log = whole * _LN2_HIGH + (2.0 * s + (2.0 * s * q * p + whole * _LN2_LOW))
    return float(log if x > 0 else x)  # bits of NaN look like those of a number


_F = np.float32
_LOG2_E_32 = _F(1.4426950408889634)
_LN2_HIGH_32, _LN2_LOW_32 = _F(0.693359375), _F(-2.12194440e-4)
_ROUNDER_32 = _F(12582912.0)  # 1.5 * 2^23
_LOG_SMALLEST_32 = _F(-87.336544)  # of 2^-126
_ONE_BITS_32, _ROOT_HALF_BITS_32 = np.int32(127 << 23), np.int32(0x3F3504F3)
_MANTISSA_BITS_32 = np.int32(23)
_0, _1, _2, _HALF = _F(0), _F(1), _F(2), _F(0.5)
# exp(r) - 1 - r over r^2 for |r| <= 0.347, the best in the least-squares sense: within 4e-9 of it.
_E2, _E3, _E4, _E5, _E6 = _F(0.50000001), _F(0.16666516), _F(0.04166626), _F(0.00836917), _F(0.00139465)
_3RD, _5TH, _7TH, _9TH, _11TH, _13TH = _F(1 / 3), _F(1 / 5), _F(1 / 7), _F(1 / 9), _F(1 / 11), _F(1 / 13)


@inlined
def exp_of_negative32(x: np.float32) -> np.float32:
    """e^x for x <= 0 within 2 units in the last place, never falling; 0 below the normal numbers; NaN for NaN."""
    near = _LOG_SMALLEST_32 if x < _LOG_SMALLEST_32 else x
    shifted = fused(near, _LOG2_E_32, _ROUNDER_32)
    whole = shifted - _ROUNDER_32
    r = fused(whole, -_LN2_LOW_32, fused(whole, -_LN2_HIGH_32, near))
    p = fused(r, _E6, _E5)
    p = fused(p, r, _E4)
    p = fused(p, r, _E3)
    p = fused(p, r, _E2)
    p = _1 + fused(r * r, p, r)  # in this order no larger x has a smaller result
    power = np.int32((np.float32(shifted).view(np.int32) << _MANTISSA_BITS_32) + _ONE_BITS_32)
    return _0 if x < _LOG_SMALLEST_32 else p * power.view(np.float32)


@inlined
def log_of_positive32(x: np.float32) -> np.float32:
    """Natural logarithm of a normal, positive number, within 1e-7 absolutely or relatively; NaN for NaN."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32((bits - _ROOT_HALF_BITS_32) >> _MANTISSA_BITS_32)
    mantissa = np.int32(bits - (exponent << _MANTISSA_BITS_32)).view(np.float32)  # from sqrt(1/2) to sqrt(2)
    s = (mantissa - _1) / (mantissa + _1)
    q = s * s
    # 2 atanh(s): |s| <= 0.172, so what follows the ninth power is below 2^-28.
    p = fused(q, _9TH, _7TH)
    p = fused(p, q, _5TH)
    p = fused(p, q, _3RD)
    whole = np.float32(exponent)
    double = s + s
    log = fused(whole, _LN2_HIGH_32, fused(double * q, p, fused(whole, _LN2_LOW_32, double)))
    return log if x > 0 else x


@inlined
def log_of_one_and32(x: np.float32) -> np.float32:
    """log(1 + x) for 0 <= x <= 1 within 3 units in the last place, however small x is."""
    s = x / (_2 + x)
    q = s * s
    # 2 atanh(s): s <= 1/3, so what follows the thirteenth power is below 2^-25.
    p = fused(q, _13TH, _11TH)
    p = fused(p, q, _9TH)
    p = fused(p, q, _7TH)
    p = fused(p, q, _5TH)
    p = fused(p, q, _3RD)
    double = s + s
    return fused(double * q, p, double)
