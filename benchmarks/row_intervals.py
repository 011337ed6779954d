"""Do the intervals of `segcal classify evaluate` hold what they say? Coverage of nominal 95 % over drawn classifiers.

    python benchmarks/row_intervals.py [--sets 200] [--rows 2000] [--ranked]

The truth is that of 8 million / classes rows of the same classifier with the same bins. For every setting
it prints how often the interval of the report (percentile for the NLL, basic for errors) and the percentile interval of
errors hold the truth, for the values and for the paired difference to the true probabilities, and how often that
difference is overstated (its interval lies above the truth). A perfectly calibrated comparison is the hardest one.
"""

from __future__ import annotations

import argparse

import numpy as np

from segcal.classification.intervals import RowBootstrap
from segcal.classification.metrics import ScoredRows, measure
from segcal.evaluation.summary import BootstrapSettings

BINNED = ("nll", "ece", "adaptive_ece", "classwise_ece")
RANKED = ("ks_error", "ece_lb", "sweep_ce", "marginal_ce", "aurc", "e_aurc")
SETTINGS = ((200, 4), (2000, 4), (10_000, 4), (4000, 20))
"""Rows and classes."""


def drawn(rng: np.random.Generator, n: int, n_classes: int, sharpen: float) -> dict[str, ScoredRows]:
    """The true probabilities of n rows and the same too sharp, with labels drawn from the true ones."""
    true = rng.dirichlet(np.full(n_classes, 0.5), size=n).clip(1e-6)
    true /= true.sum(1, keepdims=True)
    labels = (true.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=n_classes - 1)
    sharp = true**sharpen
    return {
        "true": ScoredRows.of(true, labels),
        "sharp": ScoredRows.of(sharp / sharp.sum(1, keepdims=True), labels),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=200, help="drawn data sets a setting")
    parser.add_argument("--rows", type=int, nargs="*", help="only the settings with so many rows")
    parser.add_argument("--ranked", action="store_true", help="the metrics that look at the order of all rows")
    chosen = parser.parse_args()
    n_sets, metrics = chosen.sets, RANKED if chosen.ranked else BINNED
    heads = ("value", "percentile", "difference", "overstated")
    print(f"{'rows':>6} {'classes':>7} {'sharpened':>9} {'metric':>14}", *(f"{head:>10}" for head in heads))
    for n, n_classes in (each for each in SETTINGS if each[0] in (chosen.rows or dict(SETTINGS))):
        for sharpen in (1.2, 2.0):
            rng = np.random.default_rng([n, n_classes, int(10 * sharpen)])
            truth = {
                k: measure(rows, metrics) for k, rows in drawn(rng, 8_000_000 // n_classes, n_classes, sharpen).items()
            }
            held = np.zeros((4, len(metrics)))
            for _ in range(n_sets):
                rows = drawn(rng, n, n_classes, sharpen)
                found = RowBootstrap(rows, "true", None, n_bins=15, how=BootstrapSettings(n_replicates=500))
                for k, metric in enumerate(metrics):
                    one = found.estimate("sharp", metric)
                    other = one.get("percentile", one)
                    gap = found.compare("sharp", "true", metric)
                    wanted = truth["sharp"][metric]
                    held[:, k] += [
                        one["low"] <= wanted <= one["high"],
                        other["low"] <= wanted <= other["high"],
                        gap["low"] <= wanted - truth["true"][metric] <= gap["high"],
                        gap["low"] > wanted - truth["true"][metric],
                    ]
            for k, metric in enumerate(metrics):
                shares = [f"{100 * share:8.0f} %" for share in held[:, k] / n_sets]
                print(f"{n:6} {n_classes:7} {sharpen:9} {metric:>14}", *shares, flush=True)


if __name__ == "__main__":
    main()
