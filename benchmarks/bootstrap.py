"""Seconds of the vectorised bootstrap against a plain loop over replicates, on one table, in one run.

2000 replicates x 20 pipelines x 200 cases in each of 3 repeats, 6 columns and the ACE tables (B = 15), both schemes.
The loop is run on a few replicates and scaled up; both give the same intervals (checked on those replicates).

    python benchmarks/bootstrap.py [--quick]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from _results import entry, record

from segcal.metrics.ace import pooled_ace, resampled_ace
from segcal.metrics.bootstrap import Bootstrap, CaseScores

N_PIPELINES, N_CASES, N_REPEATS, N_REPLICATES, N_BINS = 20, 200, 3, 2000, 15
COLUMNS = ("nll", "brier", "dsc", "flip", "ece", "ba_ece")
LOOPED = 20


def draw_table(seed: int = 0) -> CaseScores:
    """Per-case values and bin tables with overlapping test sets (200 of 300 subjects a repeat)."""
    rng = np.random.default_rng(seed)
    subjects, values, tables = [], [], []
    for _ in range(N_REPEATS):
        subjects.append(tuple(f"subject_{k}" for k in sorted(rng.choice(300, N_CASES, replace=False))))
        values.append(rng.gamma(2.0, size=(N_PIPELINES, len(COLUMNS), N_CASES)))
        counts = rng.integers(0, 10_000, (N_PIPELINES, N_CASES, 1, N_BINS))
        hits = rng.binomial(counts, 0.8)
        tables.append(np.stack([counts, counts * 0.82, hits], axis=-2))
    names = tuple(f"pipeline_{k}" for k in range(N_PIPELINES))
    return CaseScores(names, COLUMNS, tuple(subjects), tuple(values), tuple(tables))


def vectorised(scores: CaseScores) -> tuple[float, Bootstrap]:
    start = time.perf_counter()
    bootstrap = Bootstrap(scores, n_replicates=N_REPLICATES)
    for pipeline in scores.pipelines:
        for column in scores.columns:
            bootstrap.estimate(pipeline, column)
        bootstrap.ace(pipeline)
    return time.perf_counter() - start, bootstrap


def looped(scores: CaseScores, bootstrap: Bootstrap, n_looped: int) -> float:
    """Seconds for all replicates, from a few of them a scheme: draw, index, average; pool tables, take ACE."""
    start = time.perf_counter()
    for resamples in bootstrap.resamples.values():
        for replicate in range(n_looped):
            means, aces = [], []
            for repeat, draws in enumerate(resamples.by_repeat):
                for weights in draws.weights[draws.replicate == replicate]:
                    cases = np.repeat(np.arange(weights.size), weights.astype(int))
                    for p in range(N_PIPELINES):
                        means.append(scores.values[repeat][p][:, cases].mean(axis=1))
                        aces.append(pooled_ace(scores.tables[repeat][p, cases].sum(axis=0)))
            assert np.isfinite(means).all()
            assert np.isfinite(aces).all()
    return (time.perf_counter() - start) * N_REPLICATES / n_looped


def check(scores: CaseScores, bootstrap: Bootstrap) -> None:
    """The vectorised ACE of a replicate is the ACE of its pooled tables."""
    draws = bootstrap.resamples["by_subject"].by_repeat[0]
    cases = np.repeat(np.arange(N_CASES), draws.weights[0].astype(int))
    direct = pooled_ace(scores.tables[0][:, cases].sum(axis=1))
    np.testing.assert_allclose(resampled_ace(draws.weights[:1], scores.tables[0])[0], direct, atol=1e-12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a loop over 2 replicates instead of 20")
    quick = parser.parse_args().quick
    scores = draw_table()
    runs = (vectorised(scores) for _ in range(1 if quick else 3))
    fast, bootstrap = min(runs, key=lambda timed: timed[0])
    check(scores, bootstrap)
    slow = looped(scores, bootstrap, 2 if quick else LOOPED)
    print(
        f"{N_REPLICATES} replicates x {N_PIPELINES} pipelines x {N_REPEATS} x {N_CASES} cases, both schemes, with ACE"
    )
    print(f"  vectorised          {fast:8.2f} s")
    print(f"  loop over replicates{slow:8.1f} s (scaled up from a few replicates)")
    print(f"  ratio               {slow / fast:8.0f} x")
    found = [entry("bootstrap/vectorised", fast, "s"), entry("bootstrap/loop over vectorised", slow / fast, "x")]
    record(found, quick=quick)


if __name__ == "__main__":
    main()
