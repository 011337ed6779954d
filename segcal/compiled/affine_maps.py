"""Affine maps of logits and their softmax: one map for all voxels, or for each that of the class it was decided as.

A library's matrix product rounds by how many voxels it is given: with eleven or fewer, some take another routine. Here
a voxel's score is a sum over its own values in a fixed order, so its bits depend neither on the voxels around it nor on
the machine. Voxels are taken in blocks that fit the nearest cache, and what is between reading and writing stays in it;
in a block of several decisions, the voxels of each are collected first.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.build import compiled, fused
from segcal.compiled.softmax import BLOCK, LOG_PROBS, PROBS, Sums, copy, new_sums, normalise, take_out_largest

VALUES, BEHIND_LARGEST, CANONICAL, MARGINS, GAPS = range(5)
"""What a map sees of a voxel: the values as they are; less the largest of them; as logarithms of their softmax; how far
the others are behind the decided class, in the order of the classes; or in that of their ranks, each behind the one
before. For the last two, column 0 of the map is the decided class."""

SEES = ("values", "behind_largest", "canonical", "margins", "gaps")
"""Their names."""

__all__ = ["LOG_PROBS", "PROBS", "SEES", "affine_maps"]

Floats: TypeAlias = NDArray[np.float32]


class _Room(NamedTuple):
    """What is kept of one block: (class, BLOCK) each, and what its voxels have in common over the classes."""

    values: Floats
    scores: Floats
    ranks: NDArray[np.int32]
    sums: Sums


@compiled
def affine_maps(
    rows: Floats,
    stride: int,
    decision: NDArray[np.integer],
    weights: Floats,
    biases: Floats,
    sees: int,
    gives: int,
    out: Floats,
) -> None:
    """Fill `out` with the calibrated probabilities of every voxel, or with their logarithms.

    Args:
        rows: values of class c and voxel i at c * stride + i; see `flat_rows`.
        stride: from one class to the next.
        decision: (n,) which map each voxel takes; empty where there is one for all.
        weights: (map, column, feature).
        biases: (map, column).
        sees: VALUES, BEHIND_LARGEST, CANONICAL, MARGINS or GAPS.
        gives: PROBS or LOG_PROBS.
        out: (class, n).
    """
    n_classes, n_voxels = out.shape
    room = _Room(
        np.empty((n_classes, BLOCK), np.float32),
        np.empty((n_classes, BLOCK), np.float32),
        np.empty((n_classes, BLOCK), np.int32),
        new_sums(),
    )
    places = np.empty(BLOCK, np.int64)
    needed = np.zeros(len(weights), np.bool_)
    for begin in range(0, n_voxels, BLOCK):
        size = min(BLOCK, n_voxels - begin)
        chosen = decision[begin : begin + size]
        first = int(chosen[0]) if len(chosen) > 0 else 0
        if _all_are(chosen, first):
            for c in range(n_classes):
                copy(rows[c * stride + begin : c * stride + begin + size], room.values[c])
            scores = _map(room, size, first, sees, gives, weights[first], biases[first])
            for c in range(n_classes):
                copy(scores[c, :size], out[c, begin : begin + size])
            continue
        needed[:] = False
        for decided in chosen:
            needed[decided] = True
        for one in range(len(weights)):
            if needed[one]:
                n_found = _find(chosen, one, begin, places)
                for c in range(n_classes):
                    for k in range(n_found):
                        room.values[c, k] = rows[c * stride + places[k]]
                scores = _map(room, n_found, one, sees, gives, weights[one], biases[one])
                for c in range(n_classes):
                    for k in range(n_found):
                        out[c, places[k]] = scores[c, k]


@compiled
def _all_are(chosen: NDArray[np.integer], one: int) -> bool:
    n_others = 0
    for i in range(len(chosen)):
        n_others += chosen[i] != one
    return n_others == 0


@compiled
def _find(chosen: NDArray[np.integer], one: int, begin: int, places: NDArray[np.int64]) -> int:
    """Write where the voxels of one decision are; returns how many there are."""
    n_found = 0
    for i in range(len(chosen)):
        places[n_found] = begin + i
        n_found += chosen[i] == one
    return n_found


@compiled
def _map(room: _Room, size: int, decided: int, sees: int, gives: int, weights: Floats, biases: Floats) -> Floats:
    """One map (weights, biases) of the first voxels in `room.values`, which it changes; (class, BLOCK)."""
    values, scores = room.values, room.scores
    n_classes = len(values)
    if sees in (MARGINS, GAPS):
        _fall_behind(values, size, decided, sees, scores, room.ranks)
        values, scores = scores, values
    elif sees == BEHIND_LARGEST:
        take_out_largest(values, size, room.sums.top)
    elif sees == CANONICAL:
        normalise(values, size, room.sums, LOG_PROBS)
    for column in range(n_classes):
        c = column
        if sees == MARGINS:  # columns of the others are in the order of the classes
            c = decided if column == 0 else column - (column <= decided)
        _affine(weights[column], biases[column], values, scores[c, :size])
    if sees == GAPS:
        _by_class(scores, room.ranks, size, decided, values)
        values, scores = scores, values
    normalise(scores, size, room.sums, gives)
    return scores


@compiled
def _affine(weights: Floats, bias: float, features: Floats, scores: Floats) -> None:
    """One column: bias + sum over features in their order."""
    for i in range(len(scores)):
        scores[i] = bias
    for j in range(len(weights)):
        weight, feature = weights[j], features[j]
        for i in range(len(scores)):
            scores[i] = fused(weight, feature[i], scores[i])


@compiled
def _by_class(columns: Floats, ranks: NDArray[np.int32], size: int, decided: int, scores: Floats) -> None:
    """Scores by column to scores by class: the decided class has column 0, of the others the largest column 1."""
    for c in range(len(scores)):
        score = scores[c]
        if c == decided:
            copy(columns[0, :size], score)
        else:
            rank = ranks[c - (c > decided)]
            for i in range(size):
                score[i] = columns[rank[i] + 1, i]


@compiled
def _fall_behind(values: Floats, size: int, decided: int, sees: int, behind: Floats, ranks: NDArray[np.int32]) -> None:
    """Margins or gaps of the other classes into `behind`; for gaps also the rank of each among them."""
    n_others, own = len(values) - 1, values[decided]
    for other in range(n_others):
        copy(values[other + (other >= decided), :size], behind[other])
    if sees == GAPS:
        _rank(behind[:n_others], ranks, size)
    for other in range(n_others - 1, -1, -1):  # from the last: each is subtracted from the one before it
        ahead = behind[other - 1] if sees == GAPS and other > 0 else own
        one = behind[other]
        for i in range(size):
            gap = ahead[i] - one[i]
            # A deployed decision can trail by a rounding error of half precision: its margin counts as 0.
            one[i] = np.float32(0) if gap < 0 else gap  # NaN stays


@compiled
def _rank(values: Floats, ranks: NDArray[np.int32], size: int) -> None:
    """Sort (k, size) values, the largest first; `ranks` says where each went, the first of equals first."""
    n_values = len(values)
    for first in range(n_values):
        rank_one = ranks[first]
        for i in range(size):
            rank_one[i] = first
    for first in range(n_values):
        for second in range(first + 1, n_values):
            one, other, rank_one, rank_other = values[first], values[second], ranks[first], ranks[second]
            for i in range(size):
                overtaken = np.int32(one[i] < other[i])
                rank_one[i] += overtaken
                rank_other[i] -= overtaken
    for turn in range(n_values):  # odd-even transposition: k rounds of comparing neighbours sort k values
        for first in range(turn % 2, n_values - 1, 2):
            one, other = values[first], values[first + 1]
            for i in range(size):
                a, b = one[i], other[i]
                one[i], other[i] = (b, a) if a < b else (a, b)  # unlike max and min, this loses no NaN
