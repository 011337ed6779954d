"""Replicates of the metrics that look at the order of all rows: KS, label-binned, sweep, marginal, AURC, foreign rows.

The rows are sorted once by score and put into at most MAX_RUNS runs of neighbours; a replicate is then a table of
numbers of rows, scores and hits a run, the same sparse product as for bins. Up to MAX_RUNS distinct scores nothing is
lost. Beyond, a run counts as one score; what that changes on all rows is taken off every replicate again (`shifted` in
segcal.classification.intervals), so only the spread comes from runs.

Bins of equal mass (marginal, sweep), and how many bins the sweep takes, stay those of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from segcal.classification.metrics.binning import bin_index, equal_width_index
from segcal.classification.metrics.calibration import sweep_bins
from segcal.classification.metrics.rows import Floats, ScoredRows, Whole
from segcal.classification.resampling import Draws, Replicates, debiased_squares, drawn_table, each_class, gap_errors

MAX_RUNS = 500

RANKED_ERRORS = ("ece_lb", "ece_lb_2", "marginal_ce", "sweep_ce", "ks_error")
"""Calibration errors (segcal.classification.error_intervals)."""
PLAIN_MARGINAL = "plain_marginal_ce"
"""The marginal error with its noise; no metric of its own, but what the interval of `marginal_ce` comes from."""
RANKINGS = ("aurc", "e_aurc")
"""How well confidence ranks rows: smooth in the rows, with percentile intervals."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Rows of neighbouring scores put together.

    Attributes:
        index: (n,) the run of every row, rising with the score.
        centres: (run,) mean scores.
        bins: (run,) equal-width bin; no run lies in two.
    """

    index: Whole
    centres: Floats
    bins: Whole

    @property
    def n(self) -> int:
        return len(self.centres)

    @classmethod
    def of(cls, scores: Floats, n_bins: int) -> Runs:
        """Distinct scores, or where there are too many, runs of equally many rows cut at the ends of bins."""
        values, place = np.unique(scores, return_inverse=True)
        coarse = place if len(values) <= MAX_RUNS else bin_index(scores, MAX_RUNS, "mass")
        cells, index = np.unique(coarse * n_bins + equal_width_index(scores, n_bins), return_inverse=True)
        return cls(index.astype(np.int64), np.bincount(index, scores) / np.bincount(index), cells % n_bins)


def replicate_ranked(rows: ScoredRows, draws: Draws, n_bins: int) -> Replicates:
    """RANKED_ERRORS and RANKINGS of every draw; the marginal error with its noise."""
    found = replicate_runs(rows, draws, n_bins)
    marginal, noise = _marginal(rows, draws, n_bins)
    return Replicates({**found.values, PLAIN_MARGINAL: marginal}, {**found.noise, **noise})


def replicate_runs(rows: ScoredRows, draws: Draws, n_bins: int) -> Replicates:
    """Those of them that putting rows into runs, or a limit of bins, can change."""
    found, quiet = _along_runs(rows, draws, Runs.of(rows.confidence, n_bins))
    found["sweep_ce"], quiet["sweep_ce"] = _sweep(rows, draws)
    return Replicates(found, quiet)


def replicate_foreign(confidence: Floats, ood: NDArray[np.bool_], draws: Draws) -> dict[str, Floats]:
    """AUROC and FPR95 of every draw of known and foreign rows; NaN where a draw has only one of both."""
    runs = Runs.of(confidence, 1)
    known, foreign = (draws.total(draws.units.table(runs.index, one.astype(float), runs.n)) for one in (~ood, ood))
    n_known, n_foreign = known.sum(axis=1), foreign.sum(axis=1)
    pairs = np.where(n_known * n_foreign > 0, n_known * n_foreign, np.nan)
    above = n_known[:, None] - np.cumsum(known, axis=1)
    first = np.argmax(np.cumsum(foreign, axis=1) >= 0.95 * n_foreign[:, None], axis=1)
    wrong = np.take_along_axis(np.cumsum(known, axis=1), first[:, None], axis=1)[:, 0]
    return {
        "ood_auroc": (foreign * (above + known / 2)).sum(axis=1) / pairs,
        "ood_fpr95": wrong * n_foreign / pairs,
    }


def _along_runs(rows: ScoredRows, draws: Draws, runs: Runs) -> tuple[dict[str, Floats], dict[str, Floats]]:
    values = (None, rows.confidence - rows.hit, rows.hit.astype(float))
    tables = [draws.units.table(runs.index, each, runs.n) for each in values]
    counts, excess, hits = np.split(draws.total(np.hstack(tables)), 3, axis=1)
    every, share = tables[1].sum(axis=0), draws.n_rows[:, None] / rows.n_rows
    found = {"ks_error": _largest_sum(excess) / draws.n_rows, "aurc": aurc_of_runs(counts, counts - hits)}
    quiet = {"ks_error": _largest_sum(excess - share * every) / draws.n_rows}
    rate = 1.0 - hits.sum(axis=1) / draws.n_rows
    found["e_aurc"] = found["aurc"] - (rate + (1.0 - rate) * np.log1p(-np.minimum(rate, 1.0 - 1e-12)))
    starts = np.flatnonzero(np.diff(runs.bins, prepend=-1))
    in_bin = [np.add.reduceat(part, starts, axis=1) for part in (counts, excess, counts * runs.centres)]
    gap = np.add.reduceat(every, starts) / np.add.reduceat(tables[0].sum(axis=0), starts)
    for kind, gaps in ((found, in_bin[1]), (quiet, in_bin[1] - in_bin[0] * gap)):
        accuracy = (in_bin[2] - gaps) / np.maximum(in_bin[0], 1.0)
        apart = np.abs(np.repeat(accuracy, np.diff(starts, append=runs.n), axis=1) - runs.centres)
        kind["ece_lb"] = (counts * apart).sum(axis=1) / draws.n_rows
        kind["ece_lb_2"] = np.sqrt((counts * apart**2).sum(axis=1) / draws.n_rows)
    return found, quiet


def _largest_sum(excess: Floats) -> Floats:
    return np.asarray(np.abs(np.cumsum(excess, axis=1)).max(axis=1))


def aurc_of_runs(counts: Floats, errors: Floats) -> Floats:
    """(replicate,) AURC of (replicate, run) numbers of rows and errors, runs in rising confidence.

    A run of w rows, e of them wrong, behind N more confident rows with A errors adds
    sum over j = 1 … w of (A + j e/w) / (N + j) = A D + (e/w) (w - N D), D = H(N + w) - H(N), H the harmonic numbers:
    its rows share their mean loss, as ties do in the metric.
    """
    sizes, wrong = counts[:, ::-1], errors[:, ::-1]
    after = np.cumsum(sizes, axis=1)
    before, wrong_before = after - sizes, np.cumsum(wrong, axis=1) - wrong
    most = int(after[:, -1].max())
    harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, most + 1))])
    step = harmonic[np.rint(after).astype(np.int64)] - harmonic[np.rint(before).astype(np.int64)]
    share = wrong / np.maximum(sizes, 1.0)
    return np.asarray((wrong_before * step + share * (sizes - before * step)).sum(axis=1) / after[:, -1])


def _sweep(rows: ScoredRows, draws: Draws) -> tuple[Floats, Floats]:
    """ECE_bin,2 in the bins the sweep ends with on all rows (at most MAX_RUNS)."""
    index = bin_index(rows.confidence, min(sweep_bins(rows.confidence, rows.hit), MAX_RUNS), "mass")
    counts, excess, calibrated = drawn_table(index, rows.confidence, rows.hit, draws, int(index.max()) + 1)
    found, quiet = (gap_errors(counts, gaps, draws.n_rows)[1] for gaps in (excess, calibrated))
    return found, quiet


def _marginal(rows: ScoredRows, draws: Draws, n_bins: int) -> tuple[Floats, dict[str, Floats]]:
    """Root mean square over classes of the errors, class by class; what noise makes of it, plain and debiased."""
    found, quiet, debiased = (np.zeros(len(draws.n_rows)) for _ in range(3))
    for scores, hits in each_class(rows):
        index = bin_index(scores, n_bins, "mass")
        n_groups = int(index.max()) + 1
        counts, excess, calibrated = drawn_table(index, scores, hits, draws, n_groups)
        right = draws.total(draws.units.table(index, hits.astype(np.float64), n_groups))
        for total, gaps in ((found, excess), (quiet, calibrated)):
            total += (gaps**2 / np.maximum(counts, 1.0)).sum(axis=1)
        debiased += np.maximum(debiased_squares(counts, calibrated, right), 0.0)
    scale = rows.n_classes * draws.n_rows
    return np.sqrt(found / scale), {
        PLAIN_MARGINAL: np.sqrt(quiet / scale),
        "marginal_ce": np.sqrt(debiased / scale),
    }
