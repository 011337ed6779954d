"""Calibration errors that need all rows at once: their bins, or their definition, depend on the order of the scores.

All take a score for each row and whether the row was a hit: the confidence and `prediction == label` for the top
label, a class's probability and `label == class` for one class. Equal scores are treated together, so no value depends
on the order of rows.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from segcal.classification.metrics.binning import Binning, bin_index, bin_table, equal_mass_edges
from segcal.classification.metrics.rows import Floats, ScoredRows
from segcal.classification.metrics.tables import N_BINS, check_order, ece_bin
from segcal.metrics.bins import BinTable

Hits = NDArray[np.bool_]

MOST_SWEEP_BINS = 10_000
"""The sweep tries at most so many bins (and n - 1); its cost grows with the square of this."""


def binned(scores: Floats, hits: Hits, n_bins: int = N_BINS, binning: Binning = "width") -> BinTable:
    """The table of one set of scores; bins that ties made superfluous are left out."""
    index = bin_index(scores, n_bins, binning)
    return bin_table(index, scores, hits, n_bins if binning == "width" else int(index.max()) + 1)


def expected_error(
    scores: Floats, hits: Hits, *, n_bins: int = N_BINS, p: float = 1.0, binning: Binning = "width"
) -> float:
    """ECE_bin,p (SOFT eq. 6); with equal-mass bins and p = 1 the adaptive ECE (Nguyen & O'Connor 2015)."""
    return ece_bin(binned(scores, hits, n_bins, binning), p)


def label_binned_error(
    scores: Floats, hits: Hits, *, n_bins: int = N_BINS, p: float = 1.0, binning: Binning = "width"
) -> float:
    """ECE_lb,p = (1/n sum_i |accuracy of i's bin - score_i|^p)^(1/p) (SOFT eq. 7); never below ECE_bin,p."""
    check_order(p)
    index = bin_index(scores, n_bins, binning)
    table = bin_table(index, scores, hits, n_bins)
    accuracy = table.hits / np.maximum(table.counts, 1)
    return float(np.mean(np.abs(accuracy[index] - scores) ** p) ** (1.0 / p))


def debiased_error(
    scores: Floats,
    hits: Hits,
    *,
    n_bins: int = N_BINS,
    p: float = 2.0,
    binning: Binning = "mass",
    n_resamples: int = 1000,
    seed: int = 0,
) -> float:
    """Calibration error less the part that noise in the bins' frequencies puts in (Kumar, Liang & Ma 2019).

    p = 2: sqrt(max(0, sum_b n_b/n [(confidence_b - hits_b)^2 - hits_b (1 - hits_b)/(n_b - 1)])), where a bin of one
    row counts nothing. Other p: twice the plain error minus its mean over `n_resamples` draws of the frequencies from
    N(hits_b, hits_b (1 - hits_b)/n_b); that difference may be negative. A bin of one row has no such noise.
    """
    check_order(p)
    table = binned(scores, hits, n_bins, binning)
    filled = table.counts > 0
    table = BinTable(table.counts[filled], table.confidence[filled], table.hits[filled])
    share = table.counts / table.total
    confidence, frequency = table.reliability()
    variance = frequency * (1.0 - frequency)
    if p == 2.0:
        several = table.counts > 1
        terms = (confidence - frequency) ** 2 - variance / np.maximum(table.counts - 1, 1)
        return math.sqrt(max(0.0, float(share[several] @ terms[several])))
    rng = np.random.default_rng(seed)
    drawn = rng.normal(frequency, np.sqrt(variance / table.counts), size=(n_resamples, len(share)))
    resampled = (np.abs(drawn - confidence) ** p @ share) ** (1.0 / p)
    return float(2.0 * ece_bin(table, p) - resampled.mean())


def marginal_error(rows: ScoredRows, *, n_bins: int = N_BINS, p: float = 2.0, binning: Binning = "mass") -> float:
    """((1/C) sum_c CE_c^p)^(1/p) with the debiased error CE_c of every class, classes alike (Kumar et al. 2019)."""
    each = [
        debiased_error(scores, rows.labels == c, n_bins=n_bins, p=p, binning=binning)
        for c, scores in enumerate(np.minimum(rows.probabilities, 1.0).T)
    ]
    # Where p is not 2 a debiased error may be negative; as a calibration error it then is 0.
    return float(np.mean(np.maximum(each, 0.0) ** p) ** (1.0 / p))


def plain_marginal_error(rows: ScoredRows, *, n_bins: int = N_BINS) -> float:
    """The marginal error of order 2 with its noise: the root mean square over classes of ECE_bin,2, equal mass."""
    each = [
        expected_error(scores, rows.labels == c, n_bins=n_bins, p=2.0, binning="mass")
        for c, scores in enumerate(np.minimum(rows.probabilities, 1.0).T)
    ]
    return float(np.sqrt(np.mean(np.square(each))))


def sweep_error(scores: Floats, hits: Hits, *, p: float = 2.0) -> float:
    """Mean-sweep error (Roelofs et al. 2022): ECE_bin,p with as many equal-mass bins as keep the accuracies rising."""
    check_order(p)
    return ece_bin(_cut(*_sorted_sums(scores, hits), sweep_bins(scores, hits)), p)


def sweep_bins(scores: Floats, hits: Hits) -> int:
    """How many bins the sweep ends with.

    b = 2, 3, ... are tried until the bins' accuracies are no longer non-decreasing, and the last b before that is
    taken; one bin when 2 already fail. At most n - 1 and MOST_SWEEP_BINS bins.
    """
    ordered, before = _sorted_sums(scores, hits)
    best = 1
    for n_bins in range(2, min(len(scores), MOST_SWEEP_BINS + 1)):
        table = _cut(ordered, before, n_bins)
        if np.any(np.diff(table.hits / table.counts) < 0):
            break
        best = n_bins
    return best


def ks_error(scores: Floats, hits: Hits) -> float:
    """Kolmogorov-Smirnov error (Gupta et al. 2021): max over scores s of |sum over rows up to s of (score - hit)| / n.

    The sums are taken where the score changes: within equal scores they would depend on the order of rows.
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    sums = np.cumsum(ordered - hits[order])
    ends = np.append(ordered[1:] != ordered[:-1], True)
    return float(np.abs(sums[ends]).max() / len(scores))


def _sorted_sums(scores: Floats, hits: Hits) -> tuple[Floats, tuple[Floats, NDArray[np.int64]]]:
    """Sorted scores, and the sums of scores and hits before every position."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    right = np.concatenate([[0], np.cumsum(hits[order])])
    return ordered, (sums, right)


def _cut(ordered: Floats, before: tuple[Floats, NDArray[np.int64]], n_bins: int) -> BinTable:
    """The equal-mass table of sorted scores, at a cost of `n_bins` look-ups."""
    ends = np.searchsorted(ordered, equal_mass_edges(ordered, n_bins), side="right")
    edges = np.concatenate([[0], ends])
    return BinTable(np.diff(edges), np.diff(before[0][edges]), np.diff(before[1][edges]))
