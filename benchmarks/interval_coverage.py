"""How often the 95 % intervals hold the truth: a simulation of the study design with R = 3 repeats.

A score is  y(case, repeat) = case effect + fit effect of the repeat + interaction,  all with mean 0, so the truth is 0.
Test sets are disjoint, or drawn anew from one pool in every repeat as studies do. ACE is simulated through bin tables
whose true gap is known. The tables of docs/intervals.md are the output of this script.

    python benchmarks/interval_coverage.py [--simulations 1000] [--replicates 2000] [--quick]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from _results import Entry, entry, record
from numpy.typing import NDArray

from segcal.metrics.ace import pooled_ace, resampled_ace, without_gaps
from segcal.metrics.resampling import Resamples, draw_by_subject, draw_two_level

Floats = NDArray[np.float64]
N_REPEATS, BLOCK, N_BINS = 3, 100, 15
SCHEMES = ("two_level", "by_subject")


@dataclass(frozen=True)
class Design:
    """Test sets of the repeats: `n_test` cases each, from a pool of `n_pool` subjects."""

    name: str
    n_test: int
    n_pool: int
    disjoint: bool

    def draw(self, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        if self.disjoint:
            return np.split(rng.permutation(self.n_pool), N_REPEATS)
        return [rng.permutation(self.n_pool)[: self.n_test] for _ in range(N_REPEATS)]


DESIGNS = (
    Design("disjoint, 20 each", 20, 60, disjoint=True),
    Design("overlapping, 20 of 60", 20, 60, disjoint=False),
    Design("disjoint, 194 each", 194, 582, disjoint=True),
    Design("overlapping, 194 of 271", 194, 271, disjoint=False),
)


def resamples_of(tests: list[NDArray[np.int64]], scheme: str, n_replicates: int, seed: int) -> Resamples:
    if scheme == "two_level":
        return draw_two_level([len(test) for test in tests], n_replicates=n_replicates, seed=seed)
    subjects = [[str(case) for case in test] for test in tests]
    return draw_by_subject(subjects, n_replicates=n_replicates, seed=seed)


def case_effects(rng: np.random.Generator, shape: tuple[int, ...], skewed: bool) -> Floats:
    """Standard deviation 1: normal, or log-normal with a few cases much worse than the rest (as NLL and ECE are)."""
    if not skewed:
        return rng.normal(size=shape)
    sigma = 0.8
    mean, variance = math.exp(sigma**2 / 2), (math.exp(sigma**2) - 1) * math.exp(sigma**2)
    return (rng.lognormal(0, sigma, shape) - mean) / math.sqrt(variance)


def simulate_means(
    design: Design, fit_sd: float, skewed: bool, n_simulations: int, n_replicates: int
) -> dict[str, float]:
    """Coverage of each scheme. Simulations are run in blocks that share one design and one set of resamples."""
    covered = dict.fromkeys(SCHEMES, 0)
    for block in range(n_simulations // BLOCK):
        rng = np.random.default_rng([block, design.n_pool, design.disjoint, round(100 * fit_sd), skewed])
        tests = design.draw(rng)
        cases = case_effects(rng, (design.n_pool, BLOCK), skewed)
        values = [cases[test] + rng.normal(0, fit_sd, BLOCK) + rng.normal(0, 0.3, (len(test), BLOCK)) for test in tests]
        for scheme in SCHEMES:
            replicates = resamples_of(tests, scheme, n_replicates, seed=block).means(values)
            low, high = np.quantile(replicates, [0.025, 0.975], axis=0)
            covered[scheme] += int(((low <= 0) & (high >= 0)).sum())
    return {scheme: count / n_simulations for scheme, count in covered.items()}


def draw_tables(rng: np.random.Generator, gap: float, n_cases: int) -> Floats:
    """(simulation, case, 1, 3, B): confidence at bin centres above 1/3, true accuracy below it by `gap` in every bin.

    Cases differ in size and, bin by bin, in accuracy (standard deviation about 0.08).
    """
    confidence = 1 / 3 + 2 / 3 * (np.arange(N_BINS) + 0.5) / N_BINS
    rate = np.clip(confidence - gap, 0.01, 0.99)
    size = rng.gamma(4.0, 0.25, (BLOCK, n_cases, 1, 1))
    counts = np.rint(size * np.where(np.arange(N_BINS) == N_BINS - 1, 5000, 200)) + 1
    spread = np.maximum(rate * (1 - rate) / 0.08**2 - 1, 2.0)
    accuracy = rng.beta(rate * spread, (1 - rate) * spread, counts.shape)
    hits = rng.binomial(counts.astype(np.int64), accuracy)
    return np.stack([counts, counts * (rate + gap), hits], axis=-2)


def resample(resamples: Resamples, by_repeat: list[Floats]) -> Floats:
    """(replicate, simulation) ACE."""
    pairs = zip(resamples.by_repeat, by_repeat, strict=True)
    return resamples.over_repeats([resampled_ace(draws.weights, tables) for draws, tables in pairs])


def simulate_ace(design: Design, gap: float, n_simulations: int, n_replicates: int) -> dict[str, float]:
    """Coverage of the percentile and basic interval of each scheme and of the range over repeats; mean bias."""
    found: dict[str, float] = dict.fromkeys(
        ("bias", "range", "above noise", *(f"{s} {kind}" for s in SCHEMES for kind in ("percentile", "basic"))), 0.0
    )
    for block in range(n_simulations // BLOCK):
        rng = np.random.default_rng([block, design.n_pool, design.disjoint, round(1000 * gap)])
        tests = design.draw(rng)
        tables = draw_tables(rng, gap, design.n_pool)
        each = np.stack([pooled_ace(tables[:, test].sum(axis=1)) for test in tests])
        estimate = each.mean(axis=0)
        found["bias"] += float((estimate - gap).sum())
        found["range"] += int(((each.min(axis=0) <= gap) & (each.max(axis=0) >= gap)).sum())
        for scheme in SCHEMES:
            resamples = resamples_of(tests, scheme, n_replicates, seed=block)
            by_repeat = [tables[:, test] for test in tests]
            replicates = resample(resamples, by_repeat)
            low, high = np.quantile(replicates, [0.025, 0.975], axis=0)
            basic_low, basic_high = np.maximum(2 * estimate - high, 0), np.maximum(2 * estimate - low, 0)
            found[f"{scheme} percentile"] += int(((low <= gap) & (high >= gap)).sum())
            found[f"{scheme} basic"] += int(((basic_low <= gap) & (basic_high >= gap)).sum())
            if scheme == "by_subject":
                noise = resample(resamples, [without_gaps(repeat) for repeat in by_repeat])
                found["above noise"] += int((estimate > np.quantile(noise, 0.95, axis=0)).sum())
    return {name: total / n_simulations for name, total in found.items()}


def mean_rows(n_simulations: int, n_replicates: int, entries: list[Entry]) -> Iterator[str]:
    yield "| test sets | case effects | fit sd | two_level | by_subject |"
    yield "|---|---|---|---|---|"
    for design in DESIGNS:
        for skewed in (False, True):
            for fit_sd in (0.0, 0.1, 0.3):
                found = simulate_means(design, fit_sd, skewed, n_simulations, n_replicates)
                shape = "skewed" if skewed else "normal"
                shares = " | ".join(f"{100 * found[scheme]:.1f}" for scheme in SCHEMES)
                name = f"interval_coverage/mean, {design.name}, {shape}, fit sd {fit_sd:.1f}"
                entries += [entry(f"{name}/{scheme}", found[scheme], "share") for scheme in SCHEMES]
                yield f"| {design.name} | {shape} | {fit_sd:.1f} | {shares} |"


def ace_rows(n_simulations: int, n_replicates: int, entries: list[Entry]) -> Iterator[str]:
    yield (
        "| test sets | true ACE | mean bias | two_level percentile | two_level basic "
        "| by_subject percentile | by_subject basic | [min, max] over repeats | above noise_limit |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for design in DESIGNS:
        for gap in (0.0, 0.01, 0.05):
            found = simulate_ace(design, gap, n_simulations, n_replicates)
            names = [f"{scheme} {kind}" for scheme in SCHEMES for kind in ("percentile", "basic")]
            shares = " | ".join(f"{100 * found[name]:.1f}" for name in (*names, "range", "above noise"))
            name = f"interval_coverage/ACE, {design.name}, true {gap:.2f}"
            entries += [entry(f"{name}/{what}", found[what], "share") for what in names]
            yield f"| {design.name} | {gap:.2f} | {found['bias']:+.4f} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1000, help="a multiple of 100")
    parser.add_argument("--replicates", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="100 simulations of 100 replicates")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.simulations, chosen.replicates = 100, 100
    entries: list[Entry] = []
    n = BLOCK * max(chosen.simulations // BLOCK, 1)
    error = 100 * math.sqrt(0.95 * 0.05 / n)
    print(f"Coverage in %, nominal 95; {n} simulations a row, Monte-Carlo standard error {error:.1f} at 95 %\n")
    for rows in (mean_rows(n, chosen.replicates, entries), ace_rows(n, chosen.replicates, entries)):
        for row in rows:
            print(row, flush=True)
        print()
    record(entries, quick=chosen.quick)


if __name__ == "__main__":
    main()
