"""What methods cost at a million rows, at a thousand classes and with features: CPU seconds, peak memory.

    python benchmarks/classifier_scale.py [--shape rows classes features] [--only KEY …] [--limit 900]

Every method runs in a process of its own on one thread, on drawn rows of an over-confident classifier, so the peak is
that of the data, the fit and applying it to all rows, and nothing else. Prints the tables of docs/classification.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from _children import ChildError, run

from segcal.classification import METHODS, Samples, fit
from segcal.errors import SegcalError

SHAPES = ((1_000_000, 10, 0), (20_000, 1000, 0), (1_000_000, 10, 64))
"""Rows, classes, features."""


def drawn(n_rows: int, n_classes: int, n_features: int) -> Samples:
    """Labels from softmax(z / 2): a temperature of 2 is the truth. Features lie around one centre a class."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(n_rows, n_classes, generator=generator)
    logits += torch.randn(n_classes, generator=generator)
    labels = torch.multinomial(torch.softmax(logits / 2, 1), 1, generator=generator)[:, 0]
    if not n_features:
        return Samples.of(logits, labels)
    centres = torch.randn(n_classes, n_features, generator=generator)
    return Samples.of(logits, labels, centres[labels] + torch.randn(n_rows, n_features, generator=generator))


def child(method: str, shape: tuple[int, int, int], limit_s: int) -> None:
    """Fit once and say what it took; the system ends the process at the limit."""
    torch.set_num_threads(1)
    samples = drawn(*shape)
    begin = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(begin) + limit_s, resource.RLIM_INFINITY))
    try:
        fitted = fit(method, samples)
    except SegcalError as error:
        print(json.dumps({"refused": str(error)}))
        return
    taken = time.process_time() - begin
    begin = time.process_time()
    probs = fitted.probabilities(samples)
    applied = (time.process_time() - begin) * 1e6 / samples.n_rows
    assert np.isfinite(probs.numpy()).all()
    print(json.dumps({"fit_s": taken, "applied_us": applied, "bytes": len(fitted.content)}))


def measured(method: str, shape: tuple[int, int, int], limit_s: int) -> str:
    """One line of the table."""
    arguments = ["--child", method, "--shape", *map(str, shape), "--limit", str(limit_s)]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        cost = run([sys.executable, str(Path(__file__).resolve()), *arguments], environment=one_thread)
    except ChildError as error:
        return f"| `{method}` | not within {limit_s} | {str(error).strip().splitlines()[-1][:80]} | | |"
    said = json.loads(cost.printed.strip().splitlines()[-1])
    if "refused" in said:
        return f"| `{method}` | refused: {said['refused']} | | | |"
    size = f"{said['bytes'] / 1e6:.2f}" if said["bytes"] >= 1e4 else "< 0.01"
    return f"| `{method}` | {said['fit_s']:.1f} | {cost.peak_mb / 1e3:.2f} | {said['applied_us']:.1f} | {size} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, metavar=("ROWS", "CLASSES", "FEATURES"))
    parser.add_argument("--only", nargs="*", help="methods; by default all that the shape allows")
    parser.add_argument("--limit", type=int, default=900, help="CPU seconds of a fit")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.child, tuple(chosen.shape), chosen.limit)
        return
    for shape in SHAPES if chosen.shape is None else [tuple(chosen.shape)]:
        n_rows, n_classes, n_features = shape
        print(f"\n{n_rows:,} × {n_classes:,}{f', {n_features} features' if n_features else ''}:\n")
        print("| method | fit, CPU s | peak, GB | apply, µs a row | file, MB |\n|---|---|---|---|---|")
        for method in METHODS:
            if (n_features > 0) == METHODS[method].needs_features and method in (chosen.only or METHODS):
                print(measured(method, shape, chosen.limit), flush=True)


if __name__ == "__main__":
    main()
