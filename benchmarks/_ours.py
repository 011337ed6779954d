"""The same job as `_peer.py` by segcal, on the same arrays: fit one method in memory, or take the exact ECE.

python benchmarks/_ours.py METHOD FOLDER
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segcal.calibrators import CALIBRATORS
from segcal.calibrators.affine import AffineCalibrator
from segcal.fitting.exact import ExactSolver
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import all_rows
from segcal.metrics import CaseFrame, MetricSettings
from segcal.metrics.ece import TopLabelError
from segcal.metrics.suite import MetricSet
from segcal.threads import one_thread

Array = np.ndarray[Any, Any]


def fit(method: str, z: torch.Tensor, y: torch.Tensor) -> tuple[float, str, Array]:
    """Seconds of the fit, from arrays to the optimum, and the calibrated logits in double precision."""
    kind = CALIBRATORS[method]
    assert issubclass(kind, AffineCalibrator)
    begin = time.process_time()
    rows = all_rows(z, y)
    solution = ExactSolver(kind, rows).solve(Penalty())
    seconds = time.process_time() - begin
    parts = [solution.calibrator.log_probs(rows.logits[p].double(), rows.decision[p]) for p in rows.blocks()]
    return seconds, "logits", torch.cat(parts).numpy()


def ece(z: torch.Tensor, y: torch.Tensor) -> tuple[float, str, Array]:
    """Seconds of the exact ECE with 15 bins, from probabilities (n, C) and labels to the number.

    Loading the compiled loop (or compiling it, in a new installation) is no part of it, as imports are not.
    """
    probs = torch.softmax(z, 1)
    _ece(probs[:10], y[:10])
    begin = time.process_time()
    value = _ece(probs, y)
    return time.process_time() - begin, "value", np.array([value])


def _ece(probs: torch.Tensor, y: torch.Tensor) -> float:
    settings = MetricSettings(tuple(map(str, range(probs.shape[1]))), ece_bins=15, ace_bins=15)
    frame = CaseFrame.build("rows", y, settings, spatial=False)
    metrics = MetricSet({"top_label": TopLabelError(settings)})
    metrics.update(frame, probs.T)
    return metrics.take("rows").values["ece"]


def main() -> None:
    """Run one job and print the seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    z = torch.from_numpy(np.load(options.folder / "logits.npy"))
    y = torch.from_numpy(np.load(options.folder / "labels.npy"))
    with one_thread():
        seconds, kind, values = ece(z, y) if options.method == "ece" else fit(options.method, z, y)
    np.save(options.folder / f"segcal_{options.method}.npy", values)
    print(json.dumps({"cpu_s": seconds, "kind": kind}))


if __name__ == "__main__":
    main()
