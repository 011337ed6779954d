"""How much a fit on the condensed sample loses against a fit on every voxel, by size of the sample.

Reads the calibration cases of a manifest once into memory (this script may; the library never does), fits every
method on all voxels, then on samples of several sizes and seeds, and prints the largest relative excess of the
penalised objective and of the NLL over all voxels.

    python benchmarks/condensing.py [MANIFEST] [--split 0] [--seeds 3] [--rows 20000 50000 120000 300000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from segcal.calibrators import CALIBRATORS
from segcal.calibrators.affine import AffineCalibrator
from segcal.cases import load_case
from segcal.demo.phantom import make_phantom
from segcal.fitting.condense import RowReservoir
from segcal.fitting.exact import ExactSolver, experts_of
from segcal.fitting.gather import labelled_voxels, stream_rows
from segcal.fitting.likelihood import mean_nll
from segcal.fitting.problem import Penalty, softmax_problem
from segcal.fitting.rows import Rows, concatenate
from segcal.manifest import Manifest
from segcal.threads import one_thread

METHODS = ("ts", "vs", "ms", "ms_c", "dc", "cdc", "cms_ap", "cms_op")
PENALTY = Penalty(1e-3, 1e-3)
CPU = torch.device("cpu")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, nargs="?", help="by default the demo's phantom")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 50_000, 120_000, 300_000])
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        _run(Manifest.load(options.manifest or make_phantom(Path(folder))), options)


def _run(manifest: Manifest, options: argparse.Namespace) -> None:
    ids = sorted(manifest.split_ids(options.split).calibration)
    full = concatenate(rows for _, rows in stream_rows(manifest, ids, pooling="logits", device=CPU))
    print(f"{len(ids)} cases, {full.n_rows:,} voxels, {full.n_classes} classes, lambda = mu = 1e-3")
    with one_thread():
        optima = {name: _solve(name, full) for name in METHODS}
        print("| rows | " + " | ".join(METHODS) + " | seconds |\n|" + "---|" * (len(METHODS) + 2))
        for size in options.rows:
            _print_size(manifest, ids, full, optima, size, options.seeds)


def _print_size(
    manifest: Manifest, ids: Sequence[str], full: Rows, optima: dict[str, AffineCalibrator], size: int, n_seeds: int
) -> None:
    worst = dict.fromkeys(METHODS, (0.0, 0.0, 0.0))
    begin = time.process_time()
    for seed in range(n_seeds):
        rows = _condense(manifest, ids, size, seed)
        for name in METHODS:
            fitted = _solve(name, rows)
            true_nll, best_nll = mean_nll(fitted, full), mean_nll(optima[name], full)
            losses = (
                _objective(name, fitted, full) / _objective(name, optima[name], full) - 1,
                abs(true_nll / best_nll - 1),
                abs(mean_nll(fitted, rows) / true_nll - 1),
            )
            worst[name] = tuple(max(pair) for pair in zip(worst[name], losses, strict=True))  # type: ignore[assignment]
    cells = " | ".join("{:.0e} / {:.0e} / {:.0e}".format(*worst[name]) for name in METHODS)
    print(f"| {size:,} | {cells} | {(time.process_time() - begin) / n_seeds:.1f} |", flush=True)


def _condense(manifest: Manifest, ids: Sequence[str], size: int, seed: int) -> Rows:
    reservoir = RowReservoir(manifest.n_classes, seed, size)
    for case_id in ids:
        case = load_case(manifest, manifest.case(case_id), pooling="logits", device=CPU, with_labels=True)
        for part in labelled_voxels(case):
            reservoir.add(case_id, part.logits, part.labels, part.decision, part.voxels)
    return reservoir.sample()


def _method(name: str) -> type[AffineCalibrator]:
    method = CALIBRATORS[name]
    assert issubclass(method, AffineCalibrator)
    return method


def _solve(name: str, rows: Rows) -> AffineCalibrator:
    calibrator = ExactSolver(_method(name), rows).solve(PENALTY).calibrator
    assert isinstance(calibrator, AffineCalibrator)
    return calibrator


def _objective(name: str, calibrator: AffineCalibrator, rows: Rows) -> float:
    """The penalised objective over all voxels, experts weighed by the voxels they see."""
    theta, total = calibrator.theta(), 0.0
    for expert, seen in experts_of(_method(name), rows):
        if seen.n_rows:
            total += softmax_problem(_method(name), seen, PENALTY).value(theta[expert]) * seen.n_voxels / rows.n_voxels
    return total


if __name__ == "__main__":
    main()
