"""Slow, explicit float64 versions of every metric, written from the definitions and sharing no code with segcal.

Everything loops over voxels in plain Python, so that a reader can check it against METHODS line by line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

FLOOR = float(np.finfo(np.float32).tiny)
BANDS = ((0.0, 3.0), (3.0, 7.0), (7.0, 15.0), (15.0, math.inf))


def voxels(probs: np.ndarray, labels: np.ndarray) -> list[tuple[list[float], int, tuple[int, ...]]]:
    """(probabilities as Python floats, label, position) of every voxel that counts."""
    found = []
    for position in itertools.product(*(range(n) for n in labels.shape)):
        if labels[position] >= 0:
            found.append(([float(p) for p in probs[(slice(None), *position)]], int(labels[position]), position))
    return found


def top(row: Sequence[float]) -> tuple[float, int]:
    best = 0
    for c, p in enumerate(row):
        if p > row[best]:
            best = c
    return row[best], best


def nll(probs: np.ndarray, labels: np.ndarray) -> float:
    rows = voxels(probs, labels)
    return math.fsum(-math.log(max(row[y], FLOOR)) for row, y, _ in rows) / len(rows)


def brier(probs: np.ndarray, labels: np.ndarray) -> float:
    rows = voxels(probs, labels)
    return math.fsum((p - (c == y)) ** 2 for row, y, _ in rows for c, p in enumerate(row)) / len(rows)


def bins(scores: Iterable[tuple[float, bool]], n_bins: int) -> list[list[tuple[float, bool]]]:
    filled: list[list[tuple[float, bool]]] = [[] for _ in range(n_bins)]
    for score, hit in scores:
        filled[min(int(score * n_bins), n_bins - 1)].append((score, hit))
    return filled


def gap(members: Sequence[tuple[float, bool]]) -> float:
    """|mean confidence - accuracy| with exact sums."""
    return abs(math.fsum(s for s, _ in members) - sum(hit for _, hit in members)) / len(members)


def top_scores(probs: np.ndarray, labels: np.ndarray) -> list[tuple[float, bool]]:
    scored = []
    for row, y, _ in voxels(probs, labels):
        confidence, predicted = top(row)
        scored.append((confidence, predicted == y))
    return scored


def ece(probs: np.ndarray, labels: np.ndarray, n_bins: int) -> float:
    scored = top_scores(probs, labels)
    return math.fsum(len(b) / len(scored) * gap(b) for b in bins(scored, n_bins) if b)


def mce(probs: np.ndarray, labels: np.ndarray, n_bins: int) -> float:
    return max(gap(b) for b in bins(top_scores(probs, labels), n_bins) if b)


def ace(cases: Iterable[tuple[np.ndarray, np.ndarray]], n_bins: int) -> float:
    """Pooled over all cases of a repeat."""
    pooled = [scored for probs, labels in cases for scored in top_scores(probs, labels)]
    gaps = [gap(b) for b in bins(pooled, n_bins) if b]
    return math.fsum(gaps) / len(gaps)


def classwise_ece(probs: np.ndarray, labels: np.ndarray, n_bins: int) -> list[float]:
    rows = voxels(probs, labels)
    each = []
    for c in range(len(probs)):
        filled = bins([(row[c], y == c) for row, y, _ in rows], n_bins)
        each.append(math.fsum(len(b) / len(rows) * gap(b) for b in filled if b))
    return each


def equal_mass_ece(probs: np.ndarray, labels: np.ndarray, n_groups: int) -> float:
    """Sort all confidences; ties at an edge are shared out in proportion, in exact fractions."""
    scored = top_scores(probs, labels)
    values = sorted({confidence for confidence, _ in scored})
    left = {v: Fraction(sum(1 for c, _ in scored if c == v)) for v in values}
    excess = {v: sum((Fraction(c) - int(hit) for c, hit in scored if c == v), Fraction(0)) / left[v] for v in values}
    size = Fraction(len(scored), n_groups)
    total = Fraction(0)
    queue = iter(values)
    current = next(queue)
    for _ in range(n_groups):
        need, collected = size, Fraction(0)
        while need > 0:
            used = min(need, left[current])
            collected += used * excess[current]
            left[current] -= used
            need -= used
            if left[current] == 0:
                current = next(queue, current)
                if left[current] == 0:
                    break
        total += abs(collected)
    return float(total / len(scored))


def dice(probs: np.ndarray, labels: np.ndarray) -> list[float]:
    rows = [(top(row)[1], y) for row, y, _ in voxels(probs, labels)]
    each = []
    for c in range(len(probs)):
        both = sum(1 for k, y in rows if k == c and y == c)
        either = sum(1 for k, _ in rows if k == c) + sum(1 for _, y in rows if y == c)
        each.append(2 * both / either if either else math.nan)
    return each


def flips(probs: np.ndarray, labels: np.ndarray, decision: np.ndarray) -> tuple[float, float, float, float]:
    """(all, harmful, beneficial, neutral) shares."""
    harmful = beneficial = neutral = 0
    rows = voxels(probs, labels)
    for row, y, position in rows:
        before, now = int(decision[position]), top(row)[1]
        if before != now:
            harmful += before == y
            beneficial += now == y
            neutral += y not in (before, now)
    return tuple(k / len(rows) for k in (harmful + beneficial + neutral, harmful, beneficial, neutral))  # type: ignore


def boundary(labels: np.ndarray) -> list[tuple[int, ...]]:
    """Voxels with a face neighbour of another label; ignored ones and the border make none."""
    found = []
    for position in itertools.product(*(range(n) for n in labels.shape)):
        for axis, step in itertools.product(range(labels.ndim), (-1, 1)):
            other = tuple(p + step * (k == axis) for k, p in enumerate(position))
            if not all(0 <= p < n for p, n in zip(other, labels.shape, strict=True)):
                continue
            if labels[position] >= 0 and labels[other] >= 0 and labels[position] != labels[other]:
                found.append(position)
                break
    return found


def ba_ece(probs: np.ndarray, labels: np.ndarray) -> float:
    edge = boundary(labels)
    filled: list[list[tuple[float, float, bool]]] = [[] for _ in BANDS]
    for row, y, position in voxels(probs, labels):
        confidence, predicted = top(row)
        if not edge:
            filled[-1].append((0.0, confidence, predicted == y))
            continue
        distance = math.sqrt(min(sum((a - b) ** 2 for a, b in zip(position, e, strict=True)) for e in edge))
        band = next(k for k, (low, high) in enumerate(BANDS) if low <= distance < high)
        filled[band].append((distance, confidence, predicted == y))
    weighted, weights = [], []
    for members in filled:
        if members:
            weight = 1.0 / (1.0 + math.fsum(d for d, _, _ in members) / len(members))
            weighted.append(weight * gap([(c, hit) for _, c, hit in members]))
            weights.append(weight)
    return math.fsum(weighted) / math.fsum(weights)
