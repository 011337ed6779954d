"""Every post-hoc method on real classifiers: fitted on one half of the CIFAR test sets, measured on the other.

    python benchmarks/classifiers.py [--seeds 5] [--netcal PYTHON] [--only lenet5_cifar10] [--trials N] [--skip KEY …]

The data are those of the tests (`SEGCAL_SHARED_DATA`, or `shared/data` beside the checkout). `--netcal` names an
interpreter that has netcal installed; without it that column is left out. Prints the tables of docs/classification.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator

from segcal.classification.files import settings_of
from segcal.classification.methods import METHODS
from segcal.classification.samples import Samples
from segcal.errors import SegcalError

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("SEGCAL_SHARED_DATA", ROOT.parent / "shared" / "data")) / "classifiers"
FILES = ("lenet5_cifar10", "wideresnet_cifar10", "wideresnet_cifar100")
N_BINS = 15
Row = dict[str, float]
Results = dict[tuple[str, str], dict[int, Row]]
"""(method, by whom) -> seed -> metrics; a slow peer may lack some of the seeds."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {key: (key, {}) for key in METHODS if not METHODS[key].needs_features}
CASES["histogram, equal width"] = ("histogram", {"binning": "width"})


def measure(probs: NDArray[np.float64], labels: NDArray[np.int64]) -> Row:
    """NLL (p floored at the smallest normal float32), Brier, ECE, class-wise ECE and accuracy."""
    n, n_classes = probs.shape
    picked = probs[np.arange(n), labels]
    truth = np.eye(n_classes)[labels]
    confidence, hits = probs.max(1), probs.argmax(1) == labels
    per_class = [ece(probs[:, k], truth[:, k]) for k in range(n_classes)]
    return {
        "nll": float(-np.log(np.maximum(picked, np.finfo(np.float32).tiny)).mean()),
        "brier": float(((probs - truth) ** 2).sum(1).mean()),
        "ece": ece(confidence, hits.astype(float)),
        "cw_ece": float(np.mean(per_class)),
        "accuracy": float(hits.mean()),
    }


def ece(scores: NDArray[np.float64], hits: NDArray[np.float64]) -> float:
    index = np.minimum((scores * N_BINS).astype(int), N_BINS - 1)
    return float(np.abs(np.bincount(index, hits - scores, N_BINS)).sum() / len(scores))


class Scores(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose inputs are its own log-probabilities, as scikit-learn wants to see one."""

    def __init__(self, n_classes: int = 2) -> None:
        self.n_classes = n_classes

    def fit(self, x: NDArray[np.float64], y: NDArray[np.int64]) -> Scores:
        self.classes_ = np.arange(self.n_classes)
        return self

    def decision_function(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.int64]:
        return x.argmax(1)


def scikit_learn(fit: Samples, test: Samples) -> dict[str, NDArray[np.float64]]:
    x, y = fit.logits.numpy(), fit.known_labels.numpy()
    found = {}
    for ours, theirs in {"ts": "temperature", "platt": "sigmoid", "isotonic": "isotonic"}.items():
        base = FrozenEstimator(Scores(fit.n_classes).fit(x, y))
        model = CalibratedClassifierCV(base, method=theirs, cv=5, ensemble=False).fit(x, y)
        found[ours] = model.predict_proba(test.logits.numpy())
    return found


Halves = tuple[Samples, Samples]


def netcal(python: str, halves: list[Halves]) -> dict[str, NDArray[np.float64]]:
    """Probabilities by "seed/method"; one process for all seeds, because its imports take longer than its fits."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.npz", Path(folder) / "out.npz"
        fit, test = (np.stack([torch.softmax(pair[k].logits, 1).numpy() for pair in halves]) for k in (0, 1))
        labels = np.stack([pair[0].known_labels.numpy() for pair in halves])
        np.savez(source, fit_probs=fit, test_probs=test, fit_labels=labels)
        script = Path(__file__).with_name("_netcal_rows.py")
        subprocess.run([python, str(script), str(source), str(target)], check=True, capture_output=True)
        return dict(np.load(target))


def run(name: str, seeds: int, python: str | None, trials: int | None, skip: list[str]) -> None:
    data = np.load(DATA / f"{name}.npz")
    samples = Samples.of(torch.tensor(data["probabilities"]), torch.tensor(data["labels"]), kind="probabilities")
    results: Results = defaultdict(dict)
    seconds: dict[str, float] = defaultdict(float)
    refused: dict[str, str] = {}
    halves: list[Halves] = []
    for seed in range(seeds):
        drawn = torch.as_tensor(np.random.default_rng(seed).permutation(samples.n_rows))
        fit, test = samples.rows(drawn[: len(drawn) // 2]), samples.rows(drawn[len(drawn) // 2 :])
        halves.append((fit, test))
        labels = test.known_labels.numpy()
        for key, (method, settings) in CASES.items():
            if key in refused or key in skip:
                continue
            if trials is not None and "trials" in settings_of(METHODS[method]):
                settings = {**settings, "trials": trials}
            begin = time.process_time()
            try:
                fitted = METHODS[method].fit(fit, seed=seed, **settings)
            except SegcalError as error:
                refused[key] = str(error)
                continue
            seconds[key] += (time.process_time() - begin) / seeds
            results[key, "segcal"][seed] = measure(fitted.probabilities(test).numpy(), labels)
        for key, probs in scikit_learn(fit, test).items():
            results[key, "scikit-learn"][seed] = measure(probs, labels)
        print(f"{name}: seed {seed} done", file=sys.stderr, flush=True)
    for key, probs in (netcal(python, halves) if python is not None else {}).items():
        number, _, method = key.partition("/")
        results[method, "netcal"][int(number)] = measure(probs, halves[int(number)][1].known_labels.numpy())
    show(name, results, seconds, refused)


def show(name: str, results: Results, seconds: dict[str, float], refused: dict[str, str]) -> None:
    print(f"\n### {name}\n")
    print("| method | by | NLL | Brier | ECE % | class-wise ECE % | accuracy % | fit, CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    order = {key: index for index, key in enumerate(CASES)}
    for key, by in sorted(results, key=lambda pair: (order[pair[0]], pair[1] != "segcal", pair[1])):
        rows = list(results[key, by].values())
        cells = [f"`{key}`", by]
        for metric, factor, digits in (
            ("nll", 1, 4),
            ("brier", 1, 4),
            ("ece", 100, 2),
            ("cw_ece", 100, 3),
            ("accuracy", 100, 2),
        ):
            values = np.array([row[metric] for row in rows]) * factor
            spread = f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else " (one seed)"
            cells.append(f"{values.mean():.{digits}f}{spread}")
        cells.append(f"{seconds[key]:.2f}" if by == "segcal" else "")
        print("| " + " | ".join(cells) + " |")
    for key, why in refused.items():
        print(f"\n`{key}`: {why}")
    print("\nNLL of segcal minus the peer's, mean over seeds ± standard error (negative: segcal is better):\n")
    for key, by in sorted(results):
        if by != "segcal" and (key, "segcal") in results:
            ours, theirs = results[key, "segcal"], results[key, by]
            gap = np.array([ours[seed]["nll"] - theirs[seed]["nll"] for seed in theirs])
            error = f" ± {gap.std(ddof=1) / len(gap) ** 0.5:.5f}" if len(gap) > 1 else " (one seed)"
            print(f"- `{key}` against {by}: {gap.mean():+.5f}{error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--netcal", help="python of an environment with netcal")
    parser.add_argument("--only", choices=FILES)
    parser.add_argument("--trials", type=int, help="of λ and µ; by default what a fit does")
    # On probabilities ms is dc: the logarithms of probabilities are already canonical.
    parser.add_argument("--skip", nargs="*", default=["ms"], help="methods to leave out")
    chosen = parser.parse_args()
    if not DATA.is_dir():
        print(f"skipped: no such folder {DATA}; set SEGCAL_SHARED_DATA")
        return
    for name in FILES if chosen.only is None else [chosen.only]:
        run(name, chosen.seeds, chosen.netcal, chosen.trials, chosen.skip)


if __name__ == "__main__":
    main()
