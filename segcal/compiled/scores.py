"""Everything a fit asks of every voxel, in one loop: score, random number, control losses, free energy, confidence.

One exponential a class serves all of them. With h_k = (z_k - max z) / 2, e_k = exp(h_k), S = sum e_k, S2 = sum e_k^2:

    softmax(z / 2) = e_k / S          NLL at T = 2: log S - h_label
    softmax(z)     = e_k^2 / S2       NLL at T = 1: log S2 - 2 h_label
    free energy    = max z + log S2   confidence = 1 / S2

The distance of softmax(z / 2) from the label is sqrt(sum' e_k^2 + (sum' e_k)^2) / S, where the sums leave the label
out: nothing is subtracted, so certain voxels lose no digits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from segcal.compiled import agreed
from segcal.compiled.build import compiled, inlined
from segcal.compiled.elementary import exp_of_negative, log_of_positive

PIECE = 512
"""Voxels whose sums are taken together; fixed, because it decides the rounding of sums."""

N_SUMS = 6
NLL_1, NLL_2, CONFIDENCE, COUNT, ENERGY_MEAN, ENERGY_SQUARES = range(N_SUMS)

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(agreed.GOLDEN), np.uint64(agreed.MIX_1), np.uint64(agreed.MIX_2)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@compiled
def score_voxels(
    logits: NDArray[np.float32],
    labels: NDArray[np.int64],
    decision: NDArray[np.int64],
    voxels: NDArray[np.int64],
    begin: int,
    end: int,
    stream: np.uint64,
    floor: float,
    thresholds: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
    chosen: NDArray[np.int64],
    priorities: NDArray[np.float64],
    scores: NDArray[np.float64],
) -> int:
    """Go over the voxels from `begin` to `end` and note those whose priority is above their class's threshold.

    Args:
        logits: (class, n), contiguous.
        labels: (n,) class index.
        decision: (n,) class index.
        voxels: (n,) position in the volume; empty where that is the position here.
        begin: a multiple of PIECE, for sums that do not depend on where a pass is cut.
        end: after the last voxel.
        stream: what (seed, case) make of the hash, see `segcal.fitting.hashing`.
        floor: lowest score.
        thresholds: (class,) by decision.
        sums: (N_SUMS,), added to.
        counts: (class,) voxels by decision, added to.
        chosen: where the noted voxels' indices go; room for end - begin.
        priorities: likewise.
        scores: likewise.

    Returns:
        How many were noted; -1 if a label or a decision is no class index.
    """
    # Arrays of their own, and pieces that are inlined: the compiler then sees that nothing overlaps, and vectorises.
    top = np.empty(PIECE, dtype=np.float32)
    own_half, own, others, squares = np.empty(PIECE), np.empty(PIECE), np.empty(PIECE), np.empty(PIECE)
    loss_1, loss_2, energy, confidence = np.empty(PIECE), np.empty(PIECE), np.empty(PIECE), np.empty(PIECE)
    n_noted = 0
    for start in range(begin, end, PIECE):
        stop = min(start + PIECE, end)
        label, decided = labels[start:stop], decision[start:stop]
        if not (_are_classes(label, logits.shape[0]) and _are_classes(decided, logits.shape[0])):
            return -1
        _exponentials(logits, start, label, top, own_half, own, others, squares)
        for i in range(stop - start):
            total = squares[i] + own[i] * own[i]
            log_total = log_of_positive(total)
            loss_1[i] = log_total - 2.0 * own_half[i]
            energy[i] = np.float64(top[i]) + log_total
            confidence[i] = 1.0 / total
        for i in range(stop - start):
            total = others[i] + own[i]
            loss_2[i] = log_of_positive(total) - own_half[i]
            others[i] = np.sqrt(squares[i] + others[i] * others[i]) / total + floor
        score, priority = others, squares
        _divide_by_uniforms(score, start, stop, voxels, stream, priority)
        for i in range(stop - start):
            counts[decided[i]] += 1
            if priority[i] > thresholds[decided[i]]:
                chosen[n_noted], priorities[n_noted], scores[n_noted] = start + i, priority[i], score[i]
                n_noted += 1
        _add(sums, loss_1, loss_2, energy, confidence, stop - start)
    return n_noted


@inlined
def _are_classes(index: NDArray[np.int64], n_classes: int) -> bool:
    wrong = False
    for i in range(index.size):
        wrong |= (index[i] < 0) | (index[i] >= n_classes)
    return not wrong


@inlined
def _exponentials(
    logits: NDArray[np.float32],
    start: int,
    label: NDArray[np.int64],
    top: NDArray[np.float32],
    own_half: NDArray[np.float64],
    own: NDArray[np.float64],
    others: NDArray[np.float64],
    squares: NDArray[np.float64],
) -> None:
    """Of the piece from `start`: max z, h and e of the label, and sums of e and e^2 over the other classes."""
    size = label.size
    channel = logits[0, start : start + size]
    for i in range(size):
        top[i] = channel[i]
        own[i] = own_half[i] = others[i] = squares[i] = 0.0
    for k in range(1, logits.shape[0]):
        channel = logits[k, start : start + size]
        for i in range(size):
            top[i] = top[i] if channel[i] <= top[i] else channel[i]
    for k in range(logits.shape[0]):
        channel = logits[k, start : start + size]
        for i in range(size):
            half = (np.float64(channel[i]) - np.float64(top[i])) * 0.5
            e = exp_of_negative(half)
            is_label = label[i] == k
            own[i] = e if is_label else own[i]
            own_half[i] = half if is_label else own_half[i]
            others[i] += 0.0 if is_label else e
            squares[i] += 0.0 if is_label else e * e


@inlined
def _divide_by_uniforms(
    score: NDArray[np.float64],
    start: int,
    stop: int,
    voxels: NDArray[np.int64],
    stream: np.uint64,
    priority: NDArray[np.float64],
) -> None:
    """`segcal.fitting.hashing.voxel_uniforms`, bit for bit."""
    for i in range(stop - start):
        place = np.uint64(start + i) if voxels.size == 0 else np.uint64(voxels[start + i])
        state = place * _GOLDEN + stream
        state = (state ^ (state >> _30)) * _MIX_1
        state = (state ^ (state >> _27)) * _MIX_2
        state = state ^ (state >> _31)
        priority[i] = score[i] / ((np.float64(np.int64(state >> _11)) + 0.5) * 2.0**-53)


@inlined
def _add(
    sums: NDArray[np.float64],
    loss_1: NDArray[np.float64],
    loss_2: NDArray[np.float64],
    energy: NDArray[np.float64],
    confidence: NDArray[np.float64],
    size: int,
) -> None:
    """Add one piece; the moments of the energy as `segcal.metrics.energy.Moments` adds them."""
    nll_1 = nll_2 = sure = total = 0.0
    for i in range(size):
        nll_1 += loss_1[i]
        nll_2 += loss_2[i]
        sure += confidence[i]
        total += energy[i]
    mean, spread = total / size, 0.0
    for i in range(size):
        spread += (energy[i] - mean) * (energy[i] - mean)
    sums[NLL_1] += nll_1
    sums[NLL_2] += nll_2
    sums[CONFIDENCE] += sure
    before, after = sums[COUNT], sums[COUNT] + size
    apart = mean - sums[ENERGY_MEAN]
    sums[COUNT] = after
    sums[ENERGY_MEAN] += apart * (size / after)
    sums[ENERGY_SQUARES] += spread + apart * apart * (before * size / after)
