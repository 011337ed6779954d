"""Do the intervals of `segcal classify evaluate` hold what they say? Coverage of nominal 95 % over drawn classifiers.

    python benchmarks/row_intervals.py [--sets 100] [--rows 2000]

The truth is that of 8 million / classes rows of the same classifier with the same bins. The first table has, for every
setting, how often (%) the interval of an over-confident classifier, that of the true probabilities (a perfect
classifier, the hardest to hold) and that of their difference hold the truth; the second how often the difference is
shown to be above 0, as it is, and in brackets how often its interval lies above the truth: overstated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from segcal.classification.intervals import WITHOUT_INTERVAL, RowBootstrap
from segcal.classification.metrics import METRICS, ScoredRows, measure
from segcal.evaluation.summary import BootstrapSettings

LEFT_OUT = (*WITHOUT_INTERVAL, "accuracy", "e_aurc", "ecce_max", "ece_lb_2", "ece_2")
"""The accuracy of both is the same; the others of those that have intervals have a sibling in the table."""
SETTINGS = [(n, c, sharpen) for n, c in ((200, 4), (2000, 4), (10_000, 4), (4000, 20)) for sharpen in (1.2, 2.0)]
"""Rows, classes, over-confidence."""


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


def shares(n: int, n_classes: int, sharpen: float, n_sets: int, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Metric -> % of sets: sharp held, true held, difference held, difference shown, difference overstated."""
    rng = np.random.default_rng([n, n_classes, int(10 * sharpen)])
    whole = drawn(rng, 8_000_000 // n_classes, n_classes, sharpen)
    truth = {name: measure(rows, metrics) for name, rows in whole.items()}
    found = {metric: np.zeros(5) for metric in metrics}
    for _ in range(n_sets):
        rows = drawn(rng, n, n_classes, sharpen)
        boot = RowBootstrap(rows, "true", None, n_bins=15, how=BootstrapSettings(n_replicates=500))
        for metric in metrics:
            gap, apart = boot.compare("sharp", "true", metric), truth["sharp"][metric] - truth["true"][metric]
            found[metric] += [
                *(_holds(boot.estimate(name, metric), truth[name][metric]) for name in ("sharp", "true")),
                _holds(gap, apart),
                gap["low"] > 0,
                gap["low"] > apart,
            ]
    return {metric: 100 * total / n_sets for metric, total in found.items()}


def _holds(interval: dict[str, float], truth: float) -> bool:
    return interval["low"] <= truth <= interval["high"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=100, help="drawn data sets a setting")
    parser.add_argument("--rows", type=int, nargs="*", help="only the settings with so many rows")
    chosen = parser.parse_args()
    metrics = [name for name in METRICS if name not in LEFT_OUT]
    settings = [each for each in SETTINGS if chosen.rows is None or each[0] in chosen.rows]
    found = [shares(*each, chosen.sets, metrics) for each in settings]
    heads = [f"{n:,} × {c}, p^{sharpen}" for n, c, sharpen in settings]
    for cell in (
        lambda share: f"{share[0]:.0f} {share[1]:.0f} {share[2]:.0f}",
        lambda share: f"{share[3]:.0f} ({share[4]:.0f})",
    ):
        print(f"\n| metric | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
        for metric in metrics:
            print(f"| `{metric}` | {' | '.join(cell(each[metric]) for each in found)} |")


if __name__ == "__main__":
    main()
