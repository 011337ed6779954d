"""How much a fit on the condensed sample loses against a fit on every voxel, as fitted by default and polished.

Reads the calibration cases of a manifest once into memory (this script may; the library never does), fits every
method on all voxels, then on condensed samples of several seeds. Printed is the largest relative difference over the
seeds: of the NLL over all voxels, by default and polished, and of the NLL the sample estimates for its own fit.

    python benchmarks/condensing.py [MANIFEST] [--quick] [--seeds 10] [--rows 120000] [--method ts dc ...]

Without a manifest: BraTS-shaped cases of half the resolution, and the hippocampus data when they are there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from _brats import brats_manifest
from _results import Entry, entry, record

from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.affine import AffineCalibrator
from segcal.fitting.condense import RowReservoir
from segcal.fitting.exact import ExactSolver, Solution
from segcal.fitting.gather import stream_rows
from segcal.fitting.likelihood import mean_nll
from segcal.fitting.mixture import solve_mixture
from segcal.fitting.polish import Gradient, Key, polish, sum_gradients
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import Rows, concatenate
from segcal.manifest import Manifest
from segcal.threads import one_thread

METHODS = ("ts", "ets", "vs", "ms", "ms_c", "dc", "cdc", "cms_ap", "cms_op")
QUICK_METHODS = ("ts", "ets", "dc", "cms_ap")
HIPPOCAMPUS = Path("../shared/data/hippocampus/manifest.yaml")
PENALTY = Penalty(1e-3, 1e-3)
DEFAULT_TARGET, POLISHED_TARGET = 1e-3, 1e-5
CPU = torch.device("cpu")


def main() -> None:
    """Print a table for every data set and write the entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="small cases, two seeds, four methods")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rows", type=int, default=120_000)
    parser.add_argument("--method", nargs="+", choices=METHODS)
    parser.add_argument("--data", type=Path, help="folder of the BraTS-shaped cases")
    options = parser.parse_args()
    methods = options.method or (QUICK_METHODS if options.quick else METHODS)
    seeds = options.seeds or (2 if options.quick else 10)
    for name, path in _data_sets(options):
        found = _measure(name, Manifest.load(path), methods, options.rows, seeds)
        record(found, quick=options.quick)


def _data_sets(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    if options.manifest is not None:
        yield options.manifest.stem, options.manifest
        return
    shape = (31, 48, 48) if options.quick else (78, 120, 120)
    yield "brats", brats_manifest(6, shape=shape, folder=options.data)
    if options.quick:
        return
    if HIPPOCAMPUS.is_file():
        yield "hippocampus", HIPPOCAMPUS
    else:
        print(f"{HIPPOCAMPUS}: the real data are not here; nothing is measured")


def _measure(data: str, manifest: Manifest, methods: Sequence[str], size: int, n_seeds: int) -> list[Entry]:
    ids = sorted(manifest.split_ids(0).calibration)
    cases = [
        concatenate(rows for _, rows in stream_rows(manifest, [case_id], pooling="logits", device=CPU))
        for case_id in ids
    ]
    full = concatenate(cases)
    print(
        f"\n{data}: {len(ids)} cases, {full.n_rows:,} voxels, {full.n_classes} classes, {size:,} rows, {n_seeds} seeds"
    )
    print("| method | NLL, default | NLL, polished | estimate of the NLL |\n|---|---|---|---|")
    with one_thread():
        best = {name: mean_nll(_solve(name, full).calibrator, full) for name in methods}
        worst = dict.fromkeys(methods, (0.0, 0.0, 0.0))
        begin = time.process_time()
        for seed in range(n_seeds):
            sample = _condense(ids, cases, size, seed)
            for name, losses in _losses(methods, sample, full, best):
                worst[name] = tuple(max(pair) for pair in zip(worst[name], losses, strict=True))  # type: ignore[assignment]
    for name, losses in worst.items():
        print(f"| {name} | " + " | ".join(f"{loss:.1e}" for loss in losses) + " |")
    print(f"{(time.process_time() - begin) / n_seeds:.1f} CPU s a seed", flush=True)
    return [
        one
        for name, (default, polished, _) in worst.items()
        for one in (
            entry(f"condensing/{data}/{name}/default", default, "relative NLL", DEFAULT_TARGET),
            entry(f"condensing/{data}/{name}/polished", polished, "relative NLL", POLISHED_TARGET),
        )
    ]


def _losses(
    methods: Sequence[str], sample: Rows, full: Rows, best: Mapping[str, float]
) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Relative differences of one seed's fits from the fit on all voxels."""
    solutions: dict[Key, Solution] = {(0, name): _solve(name, sample) for name in methods}

    def read(calibrators: Mapping[Key, Calibrator]) -> list[dict[Key, Gradient]]:
        return [sum_gradients(calibrators, full.n_classes, _blocks(full))]

    better = polish(solutions, dict.fromkeys(solutions, PENALTY), [sample], read, max_passes=1)
    for key, solution in solutions.items():
        name = key[1]
        reached = mean_nll(solution.calibrator, full)
        yield (
            name,
            (
                abs(reached / best[name] - 1),
                abs(better[key].nll / best[name] - 1),
                abs(mean_nll(solution.calibrator, sample) / reached - 1),
            ),
        )


def _blocks(rows: Rows) -> Iterable[tuple[int, Rows]]:
    """The rows as one more read would give them."""
    for part in rows.blocks():
        decision = rows.decision[part]
        counts = torch.bincount(decision, minlength=rows.n_classes).to(torch.float64)
        yield 0, Rows(rows.logits[part], rows.labels[part], decision, rows.weights[part], counts)


def _condense(ids: Sequence[str], cases: Sequence[Rows], size: int, seed: int) -> Rows:
    reservoir = RowReservoir(cases[0].n_classes, seed, size)
    for case_id, rows in zip(ids, cases, strict=True):
        voxels = torch.arange(rows.n_rows, device=CPU)
        reservoir.add(case_id, rows.logits.T.contiguous(), rows.labels, rows.decision, voxels)
    return reservoir.sample()


def _solve(name: str, rows: Rows) -> Solution:
    method = CALIBRATORS[name]
    if not issubclass(method, AffineCalibrator):
        return solve_mixture(rows)
    return ExactSolver(method, rows).solve(PENALTY if method.penalised else Penalty())


if __name__ == "__main__":
    main()
