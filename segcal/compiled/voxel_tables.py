"""What the compiled loop over voxels (`voxel_counts`) is given and what it fills: arrays by name."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Counts: TypeAlias = NDArray[np.int64]
Index: TypeAlias = int | np.signedinteger[Any]
"""Bytes are widened to `np.intp` before they count: mixed with signed numbers, unsigned ones become floats."""


class Seen(NamedTuple):
    """What is known of the n voxels besides their probabilities; an empty array stands for what is not known.

    Attributes:
        labels, reference, deployed: class index.
        outside: 1 outside the crop.
        band: distance band.
    """

    labels: Bytes
    reference: Bytes
    deployed: Bytes
    outside: Bytes
    band: Bytes


class Tables(NamedTuple):
    """What is counted; `settled` voxels are those with a confidence above SETTLED, the others are doubtful.

    Attributes:
        fine_counts: (cell, missed or hit).
        fine_sums: (cell,) confidence.
        settled_counts: (band, winner, missed or hit) of settled voxels.
        settled_sums: (band, winner) their confidence.
        settled_missed: (label,) settled voxels whose label is another class.
        bin_counts, bin_sums: (band, bin, missed or hit) and (band, bin) confidence of doubtful voxels.
        class_counts, class_units, class_positives: (class, bin) of doubtful voxels; units of `fixed_point`.
        total_units: (class,) sum of the probabilities of all voxels in units.
        missed: (label, winner) of voxels where they differ.
        flips: (pooled or deployed, flipped or harmful or beneficial).
        scores: Brier units, NLL units of settled hits, floored, floored outside.
    """

    fine_counts: Counts
    fine_sums: Doubles
    settled_counts: Counts
    settled_sums: Doubles
    settled_missed: Counts
    bin_counts: Counts
    bin_sums: Doubles
    class_counts: Counts
    class_units: Counts
    class_positives: Counts
    total_units: Counts
    missed: Counts
    flips: Counts
    scores: Counts


class Steps(NamedTuple):
    """Of the settled confidences 1 - s / 2^24, s = 0 ... 2^14 - 1: their fine cell and -log of them in units."""

    cells: Counts
    losses: Counts
