"""Scores of the maps that have an expert for every predicted class, each voxel by the expert of its own class.

Voxels are taken in blocks, and every expert that is needed in a block runs over all of it in vector registers; each
voxel keeps the scores of its own. A voxel's scores are sums in a fixed order of its own values: they do not depend on
the voxels around it, as they do when a matrix product is given the voxels of one expert.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.build import compiled

_BLOCK = 256
VALUES, MARGINS, GAPS = 0, 1, 2
"""What an expert sees: the values as they are; how far the others are behind its class, in the order of the classes; or
in the order of their ranks, each behind the one before."""

Floats: TypeAlias = NDArray[np.float32]
Ranks: TypeAlias = NDArray[np.int32]


@compiled
def expert_scores(
    rows: Floats, stride: int, decision: NDArray[np.uint8], weights: Floats, biases: Floats, sees: int, out: Floats
) -> None:
    """Fill `out` with the scores of every voxel.

    Args:
        rows: values of class c and voxel i at c * stride + i; see `flat_rows`.
        stride: from one class to the next.
        decision: (n,) the expert of each voxel.
        weights: (expert, column, feature).
        biases: (expert, column).
        sees: VALUES, MARGINS or GAPS; for the last two, column 0 is the expert's class.
        out: (class, n).
    """
    n_experts, n_columns, n_features = weights.shape
    features = np.empty((n_columns, _BLOCK), np.float32)
    ranks = np.empty((n_columns, _BLOCK), np.int32)
    scores = np.empty((n_columns, _BLOCK), np.float32)
    found = np.zeros((n_columns, _BLOCK), np.float32)
    needed = np.zeros(n_experts, np.bool_)
    for begin in range(0, len(decision), _BLOCK):
        size = min(_BLOCK, len(decision) - begin)
        chosen = decision[begin : begin + size]
        needed[:] = False
        for i in range(size):
            needed[chosen[i]] = True
        alone = needed.sum() == 1
        for expert in range(n_experts):
            if needed[expert]:
                _look(rows[begin:], stride, size, expert, sees, features, ranks)
                _affine(weights[expert], biases[expert], n_features, size, features, scores)
                if sees != VALUES:
                    _by_class(expert, sees, size, ranks, scores, found)
                _write(chosen, expert, alone, scores if sees == VALUES else found, out, begin)


@compiled
def _look(rows: Floats, stride: int, size: int, expert: int, sees: int, features: Floats, ranks: Ranks) -> None:
    """Features of a block, and the rank among the others of every class but the expert's."""
    n_classes = len(features)
    if sees == VALUES:
        for c in range(n_classes):
            _copy(rows[c * stride : c * stride + size], features[c])
        return
    own = rows[expert * stride : expert * stride + size]
    for other in range(n_classes - 1):
        c = other + (other >= expert)
        _copy(rows[c * stride : c * stride + size], features[other])
    if sees == GAPS:
        _rank(features[: n_classes - 1], ranks, size)
    for other in range(n_classes - 2, -1, -1):  # from the last: each is subtracted from the one before it
        ahead = features[other - 1] if sees == GAPS and other > 0 else own
        behind = features[other]
        for i in range(size):
            gap = ahead[i] - behind[i]
            # A deployed decision can trail by a rounding error of half precision: its margin counts as 0.
            behind[i] = gap if gap > 0 else np.float32(0.0)


@compiled
def _rank(values: Floats, ranks: Ranks, size: int) -> None:
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
                large, small = max(one[i], other[i]), min(one[i], other[i])
                one[i], other[i] = large, small


@compiled
def _affine(weights: Floats, biases: Floats, n_features: int, size: int, features: Floats, scores: Floats) -> None:
    """scores[column] = bias + sum over features in their order, without fused operations."""
    for column in range(len(scores)):
        score, bias = scores[column], biases[column]
        for i in range(size):
            score[i] = bias
        for j in range(n_features):
            weight, feature = weights[column, j], features[j]
            for i in range(size):
                score[i] += weight * feature[i]


@compiled
def _by_class(expert: int, sees: int, size: int, ranks: Ranks, scores: Floats, found: Floats) -> None:
    """Scores by column to scores by class: the expert's class has column 0, of the others the first has column 1."""
    for c in range(len(scores)):
        target = found[c]
        if c == expert:
            _copy(scores[0, :size], target)
            continue
        other = c - (c > expert)
        if sees == MARGINS:
            _copy(scores[other + 1, :size], target)
            continue
        rank = ranks[other]
        for i in range(size):
            target[i] = scores[rank[i] + 1, i]


@compiled
def _write(chosen: NDArray[np.uint8], expert: int, alone: bool, found: Floats, out: Floats, begin: int) -> None:
    """Write the scores of the voxels whose expert this is: all of the block if it needs no other."""
    for c in range(len(found)):
        source, target = found[c], out[c, begin : begin + len(chosen)]
        if alone:
            _copy(source[: len(chosen)], target)
        else:
            for i in range(len(chosen)):
                if chosen[i] == expert:
                    target[i] = source[i]


@compiled
def _copy(source: Floats, target: Floats) -> None:
    for i in range(len(source)):
        target[i] = source[i]
