"""The compiled loop over voxels: everything the metrics count, in one pass over the probabilities of a chunk.

It counts what `segcal.metrics.torch_sums` counts with torch operations, and every number in it is whole or an exact
sum, so the two agree bit for bit. Voxels are taken in blocks. What can be said of a block by arithmetic alone
(`_arithmetic`, `_find_plain`) runs over contiguous voxels in vector registers. Then most voxels of a medical volume are
plain: all but certain, right, and decided as before; each is one count. The others are looked at one by one
(`_count_others`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.compiled import agreed
from segcal.compiled.build import compiled
from segcal.compiled.voxel_tables import Bytes, Counts, Doubles, Floats, Index, Seen, Steps, Tables

BLOCK = 256
UNITS_PER_ONE = float(agreed.UNITS_PER_ONE)
TO_WHOLE = 1.5 * 2.0**52
"""Adding and taking away this number rounds a float64 below 2^51 to the nearest whole one, the even one if in doubt."""
SETTLED = np.float32(agreed.SETTLED)
STEPS_PER_ONE = float(2**24)
"""Settled confidences up to 1 are whole steps of 2^-24 away from it: 2^14 different ones in all."""
DROPPED_BITS = agreed.DROPPED_BITS
SMALLEST_NORMAL = agreed.SMALLEST_NORMAL
"""Probabilities of the label below this float32 are counted as floored."""


class _Block(NamedTuple):
    """What arithmetic says of the voxels of a block, and sums that are kept apart for every place in it."""

    top: Floats
    low: Floats
    total: Floats
    distance: Floats
    distance_bits: NDArray[np.int32]
    winner: NDArray[np.int32]
    plain: NDArray[np.int32]
    step: NDArray[np.int32]
    squares: Doubles
    of_label: Doubles
    units: Doubles  # (class, place)
    brier: Doubles


@compiled
def count_voxels(
    probs: Floats,
    seen: Seen,
    tables: Tables,
    steps: Steps,
    first_cell: int,
    tolerance: float,
    open_probs: Doubles,
    doubtful: Counts,
) -> tuple[int, int]:
    """Add the voxels of a chunk to `tables`, but for those of the classes; see `count_classes`.

    Args:
        probs: (C, n) probabilities, contiguous.
        seen: of the same voxels.
        tables: added to.
        steps: of the settled confidences.
        first_cell: what to subtract from the leading bits of 1 - p to get a fine cell.
        tolerance: how far above 1 a probability and how far from 1 their sum may be.
        open_probs: (n,) filled with the probabilities of the label whose logarithm is still to be taken.
        doubtful: (n,) filled with the positions of the doubtful voxels.

    Returns:
        How many of `open_probs` and of `doubtful` were filled; -1 for both if a voxel does not hold probabilities: the
        tables mean nothing then.
    """
    n_classes, n_voxels = probs.shape
    block = _new_block(n_classes)
    plain_steps = np.zeros(len(steps.cells), np.int64)
    n_open, n_doubtful = 0, 0
    for begin in range(0, n_voxels, BLOCK):
        size = min(BLOCK, n_voxels - begin)
        if not _arithmetic(probs, begin, size, block, tolerance):
            return -1, -1
        _find_plain(begin, size, block, seen)
        if _count_plain(begin, size, block, seen, tables, plain_steps) < size:
            n_open, n_doubtful = _count_others(
                probs, begin, size, block, seen, tables, first_cell, open_probs, n_open, doubtful, n_doubtful
            )
        _add_brier(size, block)
    _share_out(block, plain_steps, steps, tables)
    return n_open, n_doubtful


@compiled
def count_classes(probs: Floats, labels: Bytes, doubtful: Counts, tables: Tables) -> None:
    """Add the doubtful voxels to the class tables, each of their probabilities in its own bin."""
    n_bins = tables.class_counts.shape[1]
    for c in range(len(probs)):
        row, counts = probs[c], tables.class_counts[c]
        units, positives = tables.class_units[c], tables.class_positives[c]
        for k in doubtful:
            value = np.float64(row[k])
            bin_ = min(int(value * n_bins), n_bins - 1)
            counts[bin_] += 1
            units[bin_] += int((value * UNITS_PER_ONE + TO_WHOLE) - TO_WHOLE)
            positives[bin_] += labels[k] == c


@compiled
def _new_block(n_classes: int) -> _Block:
    distance = np.empty(BLOCK, np.float32)
    return _Block(
        np.empty(BLOCK, np.float32),
        np.empty(BLOCK, np.float32),
        np.empty(BLOCK, np.float32),
        distance,
        distance.view(np.int32),
        np.empty(BLOCK, np.int32),
        np.empty(BLOCK, np.int32),
        np.empty(BLOCK, np.int32),
        np.empty(BLOCK, np.float64),
        np.empty(BLOCK, np.float64),
        np.zeros((n_classes, BLOCK), np.float64),
        np.zeros(BLOCK, np.float64),
    )


@compiled
def _arithmetic(probs: Floats, begin: int, size: int, block: _Block, tolerance: float) -> bool:
    """Largest, smallest, sum, squares and units of some voxels; False if one does not hold probabilities (or NaN)."""
    top, low, total, winner, squares = block.top, block.low, block.total, block.winner, block.squares
    for c in range(probs.shape[0]):
        row, units = probs[c, begin : begin + size], block.units[c]
        if c == 0:
            for i in range(size):
                value = row[i]
                top[i], low[i], total[i], winner[i] = value, value, value, 0
                squares[i] = np.float64(value) * np.float64(value)
        else:
            for i in range(size):
                value = row[i]
                ahead = value > top[i]
                winner[i] = c if ahead else winner[i]
                top[i] = value if ahead else top[i]
                low[i] = value if value < low[i] else low[i]
                total[i] += value
                squares[i] += np.float64(value) * np.float64(value)
        for i in range(size):
            units[i] += (np.float64(row[i]) * UNITS_PER_ONE + TO_WHOLE) - TO_WHOLE
    n_good = 0
    for i in range(size):
        gap = 1.0 - np.float64(total[i])
        n_good += (low[i] >= 0) & (np.float64(top[i]) <= 1.0 + tolerance) & (gap <= tolerance) & (-gap <= tolerance)
    return n_good == size


@compiled
def _find_plain(begin: int, size: int, block: _Block, seen: Seen) -> None:
    """Which voxels are settled, not above 1, hits, and of the class they were before; how far each is from 1."""
    top, winner, plain = block.top, block.winner, block.plain
    labels = seen.labels[begin : begin + size]
    for i in range(size):
        away = np.float32(1.0) - top[i]
        block.distance[i] = away if away > 0 else np.float32(0.0)
        block.step[i] = np.int32(away * np.float32(STEPS_PER_ONE))
        block.of_label[i] = top[i]
        plain[i] = (top[i] > SETTLED) & (away >= 0) & (labels[i] == winner[i])
    if len(seen.reference) > 0:
        before = seen.reference[begin : begin + size]
        for i in range(size):
            plain[i] &= before[i] == winner[i]
    if len(seen.deployed) > 0:
        before = seen.deployed[begin : begin + size]
        for i in range(size):
            plain[i] &= before[i] == winner[i]


@compiled
def _count_plain(begin: int, size: int, block: _Block, seen: Seen, tables: Tables, plain_steps: Counts) -> int:
    """Plain voxels by step; by band and winner, which stay the same over long runs, in numbers kept until they change.

    Returns:
        How many there are.
    """
    has_band = len(seen.band) > 0
    n_plain, band, winner, n_run, steps_run = 0, np.intp(0), np.intp(0), 0, 0
    for i in range(size):
        if not block.plain[i]:
            continue
        band_here = np.intp(seen.band[begin + i]) if has_band else np.intp(0)
        winner_here = np.intp(block.winner[i])
        if band_here != band or winner_here != winner:
            tables.settled_counts[band, winner, 1] += n_run
            tables.settled_sums[band, winner] += n_run - steps_run / STEPS_PER_ONE
            n_plain += n_run
            band, winner, n_run, steps_run = band_here, winner_here, 0, 0
        step = int(block.step[i])
        plain_steps[step] += 1
        n_run += 1
        steps_run += step
    tables.settled_counts[band, winner, 1] += n_run
    tables.settled_sums[band, winner] += n_run - steps_run / STEPS_PER_ONE
    return n_plain + n_run


@compiled
def _count_others(
    probs: Floats,
    begin: int,
    size: int,
    block: _Block,
    seen: Seen,
    tables: Tables,
    first_cell: int,
    open_probs: Doubles,
    n_open: int,
    doubtful: Counts,
    n_doubtful: int,
) -> tuple[int, int]:
    """Count the voxels that are not plain; returns how many of `open_probs` and `doubtful` are filled now."""
    has_band = len(seen.band) > 0
    has_reference, has_deployed = len(seen.reference) > 0, len(seen.deployed) > 0
    n_bins = tables.bin_sums.shape[1]
    for i in range(size):
        if block.plain[i]:
            continue
        k = begin + i
        top, winner, label = block.top[i], np.intp(block.winner[i]), np.intp(seen.labels[k])
        band = np.intp(seen.band[k]) if has_band else 0
        confidence, hit = np.float64(top), np.intp(winner == label)
        of_label = np.float64(probs[label, k])
        block.of_label[i] = open_probs[n_open] = of_label
        n_open += 1
        cell = max((block.distance_bits[i] >> DROPPED_BITS) - first_cell, 0)
        tables.fine_counts[cell, hit] += 1
        tables.fine_sums[cell] += confidence
        if top > SETTLED:
            tables.settled_counts[band, winner, hit] += 1
            tables.settled_sums[band, winner] += confidence
        else:
            doubtful[n_doubtful] = k
            n_doubtful += 1
            bin_ = min(int(confidence * n_bins), n_bins - 1)
            tables.bin_counts[band, bin_, hit] += 1
            tables.bin_sums[band, bin_] += confidence
        if not hit:
            _count_miss(k, label, winner, top, of_label, seen.outside, tables)
        if has_reference and seen.reference[k] != winner:
            _count_flip(np.intp(seen.reference[k]), winner, label, tables.flips[0])
        if has_deployed and seen.deployed[k] != winner:
            _count_flip(np.intp(seen.deployed[k]), winner, label, tables.flips[1])
    return n_open, n_doubtful


@compiled
def _count_miss(
    k: int, label: Index, winner: Index, top: float, of_label: float, outside: Bytes, tables: Tables
) -> None:
    """One voxel whose label is not the winner."""
    tables.missed[label, winner] += 1
    if top > SETTLED:
        tables.settled_missed[label] += 1
    if of_label < SMALLEST_NORMAL:
        tables.scores[2] += 1
        if len(outside) > 0:
            tables.scores[3] += outside[k]


@compiled
def _count_flip(before: Index, winner: Index, label: Index, flips: Counts) -> None:
    """One voxel whose winner is not what it was before: harmful if that was right, beneficial if this is."""
    flips[0] += 1
    flips[1] += before == label
    flips[2] += winner == label


@compiled
def _add_brier(size: int, block: _Block) -> None:
    """sum_c p_c^2 - 2 p_y + 1 of every voxel, rounded to units."""
    for i in range(size):
        score = (block.squares[i] - 2.0 * block.of_label[i]) + 1.0
        block.brier[i] += (score * UNITS_PER_ONE + TO_WHOLE) - TO_WHOLE


@compiled
def _share_out(block: _Block, plain_steps: Counts, steps: Steps, tables: Tables) -> None:
    """What was kept apart goes into the tables: sums by place, plain voxels by step."""
    for place in range(BLOCK):
        tables.scores[0] += int(block.brier[place])
        for c in range(len(block.units)):
            tables.total_units[c] += int(block.units[c, place])
    for step in range(len(plain_steps)):
        count = plain_steps[step]
        if count > 0:
            tables.fine_counts[steps.cells[step], 1] += count
            tables.fine_sums[steps.cells[step]] += count * (1.0 - step / STEPS_PER_ONE)
            tables.scores[1] += count * steps.losses[step]
