"""How much the settings of `local_nets` matter: each changed alone, judged on calibration rows the fit has not seen.

    python benchmarks/local_nets_settings.py [--seeds 5 6 7] [--only NAME …]

The networks and images of benchmarks/digits.py, with seeds that are not in its tables, and of each only the calibration
rows: 420 to fit, 180 to judge. No test image is looked at. Prints NLL and ECE minus those of the defaults on the same
rows: mean over the seeds ± half the 95 % t interval. Local Nets are slow: six CPU seconds a fit.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from digits import binned_gap, interval, trained_digits

from segcal.classification.local_nets import LocalNets
from segcal.classification.samples import Samples

N_FIT = 420
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "hidden 256": {"hidden": 256},
    "dropout 0": {"dropout": 0.0},
    "bandwidth 1": {"bandwidth": 1.0},
    "bandwidth 30": {"bandwidth": 30.0},
    "divergence 0 (cross-entropy alone)": {"divergence": 0.0},
    "divergence 10": {"divergence": 10.0},
    "cross_entropy 0 (divergence alone)": {"cross_entropy": 0.0},
    "learning_rate 1e-2": {"learning_rate": 1e-2},
}


def judged(fit: Samples, judge: Samples, seed: int, settings: dict[str, Any]) -> dict[str, float]:
    probs = LocalNets.fit(fit, seed=seed, **settings).probabilities(judge)
    labels = judge.known_labels
    confidence, decision = probs.max(1)
    nll = -float(probs.gather(1, labels[:, None]).log().mean())
    return {"NLL": nll, "ECE": binned_gap(confidence, decision == labels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS), help="beside the defaults")
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS if name in ("defaults", *chosen.only)}
    for seed in chosen.seeds:
        rows = trained_digits(seed).calibration
        fit, judge = rows.rows(torch.arange(N_FIT)), rows.rows(torch.arange(N_FIT, rows.n_rows))
        for name, figures in found.items():
            figures.append(judged(fit, judge, seed, SETTINGS[name]))
            print(f"seed {seed}: {name}", file=sys.stderr, flush=True)
    print("| settings | NLL | ECE |\n|---|---|---|")
    for name, figures in found.items():
        base = [{"NLL": 0.0, "ECE": 0.0}] * len(figures) if name == "defaults" else found["defaults"]
        cells = [interval([a[key] - b[key] for a, b in zip(figures, base, strict=True)]) for key in ("NLL", "ECE")]
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
