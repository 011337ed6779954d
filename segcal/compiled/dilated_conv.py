"""The convolutions of local temperature scaling: few channels, 5 x 5 taps two pixels apart.

A library lays channels out in sixteens, of which five classes and seven maps leave most empty. This loop runs along the
pixels of a row and took 0.30 against 0.52 CPU s for a volume of BraTS size. Products are added in a fixed order, the
same for every pixel.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.agreed import DILATION, KERNEL
from segcal.compiled.build import compiled

Floats: TypeAlias = NDArray[np.float32]


@compiled
def dilated_conv(slices: Floats, weights: Floats, biases: Floats, out: Floats) -> None:
    """Fill `out` with the convolutions of slices that have their halo.

    Args:
        slices: (n, channel, y + 8, x + 8).
        weights: (map, channel, 5, 5).
        biases: (map,).
        out: (n, map, y, x).
    """
    n_slices, n_channels = slices.shape[:2]
    n_maps, height, width = out.shape[1:]
    for n in range(n_slices):
        for y in range(height):
            for m in range(n_maps):
                target, bias = out[n, m, y], biases[m]
                for x in range(width):
                    target[x] = bias
            for c in range(n_channels):
                for tap in range(KERNEL):
                    row = slices[n, c, y + DILATION * tap]
                    for m in range(n_maps):
                        _add_row(row, weights[m, c, tap], out[n, m, y])


@compiled
def _add_row(row: Floats, weights: Floats, target: Floats) -> None:
    """Five taps along a row at once: the sum is read and written once for them."""
    first, second, third, fourth, fifth = weights[0], weights[1], weights[2], weights[3], weights[4]
    for x in range(len(target)):
        left = first * row[x] + second * row[x + 2]
        right = third * row[x + 4] + fourth * row[x + 6]
        target[x] += (left + right) + fifth * row[x + 8]
