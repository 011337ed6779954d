"""Slow, explicit versions of the classification metrics, written from the definitions; they share no code with segcal.

Rows are (probabilities as Python floats, label); everything loops in plain Python.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Row = tuple[list[float], int]
Scored = list[tuple[float, int]]

FLOOR = 2.0**-126


def top_label(rows: Sequence[Row]) -> Scored:
    found = []
    for probs, label in rows:
        best = 0
        for c, p in enumerate(probs):
            if p > probs[best]:
                best = c
        found.append((min(probs[best], 1.0), int(best == label)))
    return found


def one_class(rows: Sequence[Row], c: int) -> Scored:
    return [(min(probs[c], 1.0), int(label == c)) for probs, label in rows]


def accuracy(rows: Sequence[Row]) -> float:
    return sum(hit for _, hit in top_label(rows)) / len(rows)


def nll(rows: Sequence[Row]) -> float:
    return math.fsum(-math.log(max(probs[y], FLOOR)) for probs, y in rows) / len(rows)


def brier(rows: Sequence[Row]) -> float:
    return math.fsum((p - (c == y)) ** 2 for probs, y in rows for c, p in enumerate(probs)) / len(rows)


def width_bins(scored: Scored, n_bins: int) -> list[Scored]:
    bins: list[Scored] = [[] for _ in range(n_bins)]
    for score, hit in scored:
        for k in range(n_bins):
            if k == n_bins - 1 or score * n_bins < k + 1:
                bins[k].append((score, hit))
                break
    return bins


def mass_bins(scored: Scored, n_bins: int) -> list[Scored]:
    """Runs of the sorted scores; rows equal to the last of a run go with that run."""
    ordered = sorted(scored)
    n = len(ordered)
    lengths = [n // n_bins + (1 if k < n % n_bins else 0) for k in range(n_bins)]
    ends, position = [], 0
    for length in lengths:
        position += length
        if length:
            ends.append(ordered[position - 1][0])
    bins: list[Scored] = []
    left = ordered
    for end in ends:
        inside = [pair for pair in left if pair[0] <= end]
        left = [pair for pair in left if pair[0] > end]
        if inside:
            bins.append(inside)
    return bins


def mean_score(part: Scored) -> float:
    return math.fsum(score for score, _ in part) / len(part)


def frequency(part: Scored) -> float:
    return sum(hit for _, hit in part) / len(part)


def ece_bin(bins: list[Scored], p: float) -> float:
    n = sum(len(part) for part in bins)
    terms = [len(part) / n * abs(frequency(part) - mean_score(part)) ** p for part in bins if part]
    return math.fsum(terms) ** (1 / p)


def ece_lb(bins: list[Scored], p: float) -> float:
    n = sum(len(part) for part in bins)
    return (math.fsum(abs(frequency(part) - score) ** p for part in bins if part for score, _ in part) / n) ** (1 / p)


def mce(bins: list[Scored]) -> float:
    return max(abs(frequency(part) - mean_score(part)) for part in bins if part)


def ace(bins: list[Scored]) -> float:
    gaps = [abs(frequency(part) - mean_score(part)) for part in bins if part]
    return math.fsum(gaps) / len(gaps)


def classwise_ece(rows: Sequence[Row], n_bins: int, p: float = 1.0) -> float:
    n_classes = len(rows[0][0])
    return math.fsum(ece_bin(width_bins(one_class(rows, c), n_bins), p) for c in range(n_classes)) / n_classes


def cumulated(rows: Sequence[Row], c: int, n_bins: int) -> list[float]:
    bins = width_bins(one_class(rows, c), n_bins)
    found = []
    for b in range(n_bins):
        parts = [part for part in bins[: b + 1] if part]
        found.append(abs(math.fsum(len(part) / len(rows) * (frequency(part) - mean_score(part)) for part in parts)))
    return found


def ecce(rows: Sequence[Row], n_bins: int) -> float:
    n_classes = len(rows[0][0])
    return math.fsum(math.fsum(cumulated(rows, c, n_bins)) for c in range(n_classes)) / n_classes


def ecce_max(rows: Sequence[Row], n_bins: int) -> float:
    n_classes = len(rows[0][0])
    return math.fsum(max(cumulated(rows, c, n_bins)) for c in range(n_classes)) / n_classes


def debiased_2(bins: list[Scored]) -> float:
    n = sum(len(part) for part in bins)
    total = 0.0
    for part in bins:
        if len(part) < 2:
            continue
        y = frequency(part)
        total += len(part) / n * ((mean_score(part) - y) ** 2 - y * (1 - y) / (len(part) - 1))
    return math.sqrt(max(total, 0.0))


def marginal_2(rows: Sequence[Row], n_bins: int) -> float:
    n_classes = len(rows[0][0])
    squares = [debiased_2(mass_bins(one_class(rows, c), n_bins)) ** 2 for c in range(n_classes)]
    return math.sqrt(math.fsum(squares) / n_classes)


def sweep(scored: Scored, p: float) -> float:
    best = mass_bins(scored, 1)
    for b in range(2, len(scored)):
        bins = mass_bins(scored, b)
        accuracies = [frequency(part) for part in bins]
        if any(later < earlier for earlier, later in itertools.pairwise(accuracies)):
            break
        best = bins
    return ece_bin(best, p)


def ks(scored: Scored) -> float:
    """At every score that occurs: |sum over rows up to it of (score - hit)| / n."""
    found = []
    for threshold in {score for score, _ in scored}:
        found.append(abs(math.fsum(score - hit for score, hit in scored if score <= threshold)) / len(scored))
    return max(found)


def aurc(scored: Scored) -> float:
    """Mean over coverages of the selective risk; the errors of equal confidences are shared out evenly."""
    n = len(scored)
    ordered = sorted(scored, key=lambda pair: -pair[0])
    errors = []
    for score, _ in ordered:
        same = [1 - hit for other, hit in scored if other == score]
        errors.append(sum(same) / len(same))
    return math.fsum(math.fsum(errors[:k]) / k for k in range(1, n + 1)) / n


def e_aurc(scored: Scored) -> float:
    r = sum(1 - hit for _, hit in scored) / len(scored)
    return aurc(scored) - (1.0 if r == 1 else r + (1 - r) * math.log(1 - r))


def auroc(known: Sequence[float], foreign: Sequence[float]) -> float:
    pairs = [1.0 if f < k else 0.5 if f == k else 0.0 for f in foreign for k in known]
    return math.fsum(pairs) / len(pairs)


def fpr(known: Sequence[float], foreign: Sequence[float], tpr: float) -> float:
    for threshold in sorted({*known, *foreign}):
        if sum(f <= threshold for f in foreign) / len(foreign) >= tpr:
            return sum(k <= threshold for k in known) / len(known)
    raise AssertionError("every foreign row is found at the largest confidence")
