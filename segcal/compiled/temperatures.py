"""The temperatures of local temperature scaling: a tree of convolutions, few channels, 5 x 5 taps two pixels apart.

A library lays channels out in sixteens, of which five classes and seven maps leave most empty. Here a slice is taken as
one long row, so that every step runs along hundreds of pixels; at the end of each row of the slice stand a few pixels
that see across the border and are left out. Products are added in a fixed order, the same for every pixel.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.agreed import DILATION, KERNEL, N_MAPS, TAU_MAX, TAU_MIN
from segcal.compiled.build import compiled, fused
from segcal.compiled.elementary import exp_of_negative32, log_of_one_and32

BLOCK = 512
HALO = DILATION * (KERNEL - 1)
"""By how much a padded slice is larger than what is read off it."""

Floats: TypeAlias = NDArray[np.float32]


@compiled
def tree_temperatures(padded: Floats, weights: Floats, biases: Floats, out: Floats) -> None:
    """Fill `out` with the temperature of every pixel.

    Args:
        padded: (n, channel, y + 8, x + 8) slices with their halo, contiguous.
        weights: (map, channel, 5, 5), four leaves, then three gates.
        biases: (map,).
        out: (n, y, x).
    """
    n_slices, n_channels, _, pitch = padded.shape
    height, width = out.shape[1:]
    maps, tau = np.empty((N_MAPS, BLOCK), np.float32), np.empty(BLOCK, np.float32)
    n_positions = (height - 1) * pitch + width
    for n in range(n_slices):
        for begin in range(0, n_positions, BLOCK):
            size = min(BLOCK, n_positions - begin)
            for m in range(N_MAPS):
                _fill(maps[m, :size], biases[m])
            for c in range(n_channels):
                channel = padded[n, c].ravel()
                for tap in range(KERNEL):
                    first = begin + DILATION * tap * pitch
                    row = channel[first : first + size + HALO]
                    for m in range(N_MAPS):
                        _add_row(row, weights[m, c, tap], maps[m, :size])
            _climb(maps, tau[:size])
            _cut(tau[:size], begin, pitch, out[n])


@compiled
def _fill(target: Floats, value: float) -> None:
    for i in range(len(target)):
        target[i] = value


@compiled
def _add_row(row: Floats, weights: Floats, target: Floats) -> None:
    """Five taps along a row at once: the sum is read and written once for them."""
    first, second, third, fourth, fifth = weights[0], weights[1], weights[2], weights[3], weights[4]
    for i in range(len(target)):
        total = fused(second, row[i + 2], fused(first, row[i], target[i]))
        target[i] = fused(fifth, row[i + 8], fused(fourth, row[i + 6], fused(third, row[i + 4], total)))


@compiled
def _climb(maps: Floats, tau: Floats) -> None:
    """Leaves (0 to 3) and gates (4 to 6) to temperatures, as `segcal.calibrators.local_temperature` says."""
    for leaf in range(4):
        _softplus(maps[leaf, : len(tau)])
    for gate in range(4, N_MAPS):
        _sigmoid(maps[gate, : len(tau)])
    _mix(maps[0], maps[1], maps[5], maps[0, : len(tau)])
    _mix(maps[2], maps[3], maps[6], maps[2, : len(tau)])
    _mix(maps[0], maps[2], maps[4], tau)
    for i in range(len(tau)):
        tau[i] = min(max(tau[i], np.float32(TAU_MIN)), np.float32(TAU_MAX))  # in this order NaN stays


@compiled
def _softplus(values: Floats) -> None:
    """log(1 + e^x)."""
    for i in range(len(values)):
        x = values[i]
        far = x if x < 0 else -x
        values[i] = (x - far) * np.float32(0.5) + log_of_one_and32(exp_of_negative32(far))


@compiled
def _sigmoid(values: Floats) -> None:
    for i in range(len(values)):
        x = values[i]
        e = exp_of_negative32(x if x < 0 else -x)
        values[i] = (e if x < 0 else np.float32(1)) / (np.float32(1) + e)


@compiled
def _mix(yes: Floats, no: Floats, gate: Floats, out: Floats) -> None:
    """gate yes + (1 - gate) no, exactly that value where both are the same: the identity does not depend on gates."""
    for i in range(len(out)):
        apart = (
            yes[i] - no[i]
        )  # from the side that is nearer: the other may be so large that its digits hide this one's
        out[i] = no[i] + gate[i] * apart if gate[i] < 0.5 else yes[i] - (np.float32(1) - gate[i]) * apart


@compiled
def _cut(tau: Floats, begin: int, pitch: int, out: Floats) -> None:
    """Write what lies within the rows of the slice; position `begin` and on of the long row."""
    width = out.shape[1]
    for y in range(begin // pitch, (begin + len(tau) - 1) // pitch + 1):
        low, high = max(begin - y * pitch, 0), min(begin + len(tau) - y * pitch, width)
        for x in range(low, high):
            out[y, x] = tau[y * pitch + x - begin]
