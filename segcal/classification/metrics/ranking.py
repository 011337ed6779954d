"""Does confidence rank rows well? Selective risk (AURC), and telling foreign rows from known ones (AUROC, FPR95)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from segcal.classification.metrics.rows import Floats


def aurc(confidence: Floats, losses: Floats) -> float:
    """Area under the risk-coverage curve: mean over coverages 1/n, ..., n/n of the mean loss of the most confident.

    With rank r from the least confident row it is (1/n) sum_r (H_n - H_(n-r)) loss_r (Zhou et al. 2025), H the harmonic
    numbers. Rows of equal confidence share their mean loss: that is the expectation over their order.
    """
    n = len(confidence)
    _, group, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    shared = np.bincount(group, losses)[group] / counts[group]
    ordered = shared[np.argsort(-confidence, kind="stable")]
    return float(np.mean(np.cumsum(ordered) / np.arange(1, n + 1)))


def excess_aurc(confidence: Floats, errors: NDArray[np.bool_]) -> float:
    """AURC of 0/1 errors less that of the best ranking, r + (1 - r) ln(1 - r) at error rate r (Geifman et al. 2019).

    At r = 1 the best ranking has AURC 1 (the limit). The subtracted form is that of many rows, so that the value of a
    few rows can be slightly below 0.
    """
    rate = float(errors.mean())
    best = 1.0 if rate == 1.0 else rate + (1.0 - rate) * math.log1p(-rate)
    return aurc(confidence, errors.astype(np.float64)) - best


def ood_auroc(confidence: Floats, ood: NDArray[np.bool_]) -> float:
    """P(a foreign row is less confident than a known one), equal confidences counted half.

    The positive class is out-of-distribution and its score is minus the confidence. NaN when there is only one of both.
    """
    n_ood, n_known = int(ood.sum()), int((~ood).sum())
    if not n_ood or not n_known:
        return math.nan
    values, group = np.unique(confidence, return_inverse=True)
    foreign = np.bincount(group[ood], minlength=len(values))
    known = np.bincount(group[~ood], minlength=len(values))
    above = n_known - np.cumsum(known)
    # Twice the number of ordered pairs, a whole number: exact up to 2^52 pairs.
    return float((foreign * (2 * above + known)).sum() / 2 / (n_ood * n_known))


def ood_fpr(confidence: Floats, ood: NDArray[np.bool_], *, tpr: float = 0.95) -> float:
    """Share of known rows called foreign at the first threshold that finds at least `tpr` of the foreign rows.

    Rows with confidence at or below the threshold are called foreign; thresholds are the confidences that occur, so
    the share found may be above `tpr`. The positive class matters: with known rows as positive the number is another
    one. NaN when there is only one of both.
    """
    n_ood, n_known = int(ood.sum()), int((~ood).sum())
    if not n_ood or not n_known:
        return math.nan
    values, group = np.unique(confidence, return_inverse=True)
    found = np.cumsum(np.bincount(group[ood], minlength=len(values)))
    wrong = np.cumsum(np.bincount(group[~ood], minlength=len(values)))
    first = int(np.argmax(found / n_ood >= tpr))
    return float(wrong[first] / n_known)
