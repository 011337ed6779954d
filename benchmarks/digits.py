"""Methods that look at features, end to end on scikit-learn's digits: a small network, trained here until it overfits.

Every seed draws its own noise, split and network: 400 images train it, 600 calibrate, 797 test. Prints accuracy, NLL,
ECE, class-wise ECE and the local errors before and after, each the mean over the seeds with the 95 % t interval, and
the paired differences (same seed, same images) to the uncalibrated network, to `ts` and of `vq` to its ablations.

    python benchmarks/digits.py [--seeds 5]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from segcal.calibrators.matrix import DirichletCalibration
from segcal.calibrators.temperature import TemperatureScaling
from segcal.classification.local_nets import LocalNets
from segcal.classification.mac_cal import MaskedClassifier
from segcal.classification.metrics.local import local_errors, released_local_errors
from segcal.classification.principal import Standardiser, principal_axes
from segcal.classification.samples import Samples
from segcal.classification.training import Training, split_rows
from segcal.classification.vq import LocalDirichletCalibration, QuantisedDirichlet, QuantisedHead, SecondStage
from segcal.fitting.exact import ExactSolver
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import all_rows

N_TRAIN, N_CALIBRATION = 400, 600
PIXEL_NOISE = 4.0
"""Standard deviation of the noise on pixels that run from 0 to 16: without it the digits are too easy to err on."""
WIDTH = 128
EPOCHS = 200
BANDWIDTHS = (10.0, 3.0)
"""The papers' γ, which here reaches across the whole feature space, and one that does not."""


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """What one seed's network says of its training, calibration and test images."""

    train: Samples
    calibration: Samples
    test: Samples
    near: Tensor
    """(n_test, 50) principal components of the standardised test features, basis of the calibration rows."""


def trained_digits(seed: int, *, epochs: int = EPOCHS) -> Digits:
    """Train the network (64 - 128 - 128 - 10, relu, Adam, no decay) and take its logits and last hidden layer."""
    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits))
    noisy = images + rng.normal(0, PIXEL_NOISE, images.shape)
    pixels = torch.tensor(noisy[order] / 16, dtype=torch.float32)
    labels = torch.tensor(digits[order], dtype=torch.int64)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = torch.nn.Sequential(
            torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()
        )
        head = torch.nn.Linear(WIDTH, 10)
        optimiser = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
        for _ in range(epochs):
            for batch in torch.randperm(N_TRAIN).split(64):
                optimiser.zero_grad()
                cross_entropy(head(body(pixels[batch])), labels[batch]).backward()
                optimiser.step()
    with torch.no_grad():
        features = body(pixels)
        logits = head(features)
    parts = [slice(0, N_TRAIN), slice(N_TRAIN, N_TRAIN + N_CALIBRATION), slice(N_TRAIN + N_CALIBRATION, None)]
    train, calibration, test = (Samples.of(logits[part], labels[part], features[part]) for part in parts)
    standardiser = Standardiser.fit(calibration.known_features)
    axes = principal_axes(standardiser(calibration.known_features, "digits"))
    return Digits(train, calibration, test, standardiser(test.known_features, "digits") @ axes)


def measure(probs: Tensor, data: Digits) -> dict[str, float]:
    """All figures of one set of test probabilities."""
    labels = data.test.known_labels
    confidence, decision = probs.max(1)
    truth = one_hot(labels, probs.shape[1])
    by_class = [binned_gap(probs[:, c], truth[:, c]) for c in range(probs.shape[1])]
    found = {
        "accuracy": float((decision == labels).double().mean()),
        "NLL": float(-probs.gather(1, labels[:, None]).clamp(min=1e-300).log().mean()),
        "ECE": binned_gap(confidence, decision == labels),
        "cwECE": float(np.mean(by_class)),
    }
    for bandwidth in BANDWIDTHS:
        written = local_errors(probs, labels, data.near, bandwidth=bandwidth)
        released = released_local_errors(probs, labels, data.near, bandwidth=bandwidth)
        found |= {f"LCE γ={bandwidth:g}": written.lce, f"MLCE γ={bandwidth:g}": written.mlce}
        found |= {f"LCE rel. γ={bandwidth:g}": released.lce, f"MLCE rel. γ={bandwidth:g}": released.mlce}
    return found


def binned_gap(score: Tensor, hit: Tensor, n_bins: int = 15) -> float:
    index = (score * n_bins).long().clamp(max=n_bins - 1)
    gaps = torch.zeros(n_bins, dtype=torch.float64).index_add_(0, index, score - hit.to(score.dtype))
    return float(gaps.abs().sum() / len(score))


def core(method: type[TemperatureScaling] | type[DirichletCalibration]) -> Callable[[Digits, int], Tensor]:
    def fitted(data: Digits, seed: int) -> Tensor:
        rows = all_rows(data.calibration.logits, data.calibration.known_labels)
        return ExactSolver(method, rows).solve(Penalty(1e-2, 1e-2)).calibrator.log_probs(data.test.logits).exp()

    return fitted


@cache
def fitted_vq(data: Digits, seed: int) -> LocalDirichletCalibration:
    """Fitted once for the three methods that share its head; its time is counted under `vq`."""
    return LocalDirichletCalibration.fit(data.calibration, seed=seed)


def dirichlet_on_the_same_head(data: Digits, seed: int) -> QuantisedDirichlet:
    training, generator = Training(), torch.Generator().manual_seed(seed)
    rows, validation = split_rows(data.calibration.n_rows, training.validation_share, generator)
    head = fitted_vq(data, seed).head
    return QuantisedDirichlet.calibrate(SecondStage(head, data.calibration, rows, validation, generator, training))


METHODS: dict[str, Callable[[Digits, int], Tensor]] = {
    "uncalibrated": lambda data, seed: data.test.logits.softmax(1),
    "ts": core(TemperatureScaling),
    "dc": core(DirichletCalibration),
    "vq": lambda data, seed: fitted_vq(data, seed).probabilities(data.test),
    "vq_nc": lambda data, seed: QuantisedHead(fitted_vq(data, seed).head).probabilities(data.test),
    "vq_dc": lambda data, seed: dirichlet_on_the_same_head(data, seed).probabilities(data.test),
    "local_nets": lambda data, seed: LocalNets.fit(data.calibration, seed=seed).probabilities(data.test),
    "mac_cal, training rows": lambda data, seed: MaskedClassifier.fit(
        data.train, seed=seed, validation=data.calibration
    ).probabilities(data.test),
    "mac_cal, calibration rows": lambda data, seed: MaskedClassifier.fit(data.calibration, seed=seed).probabilities(
        data.test
    ),
}


PAIRS = (
    *((name, "uncalibrated") for name in METHODS if name != "uncalibrated"),
    *((name, "ts") for name in ("vq", "local_nets", "mac_cal, calibration rows")),
    *(("vq", name) for name in ("vq_nc", "vq_dc")),
)
"""(method, against): the differences the documentation speaks of."""


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Mean and half the 95 % t interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(half)


def interval(values: list[float]) -> str:
    """Mean ± half the 95 % t interval."""
    mean, half = mean_and_half(values)
    return f"{mean:.3f} ± {half:.3f}"


def paired(first: list[dict[str, float]], second: list[dict[str, float]], column: str) -> tuple[float, float]:
    """`first` minus `second`, seed by seed: its mean and half its 95 % t interval."""
    return mean_and_half([a[column] - b[column] for a, b in zip(first, second, strict=True)])


def show_pairs(found: dict[str, list[dict[str, float]]], columns: list[str]) -> None:
    """The table of paired differences; those whose interval leaves out 0 are bold."""
    print("\n| difference |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for first, second in PAIRS:
        cells = []
        for column in columns:
            mean, half = paired(found[first], found[second], column)
            text = f"{mean:+.3f} ± {half:.3f}"
            cells.append(f"**{text}**" if abs(mean) > half else text)
        print(f"| {first} − {second} |", " | ".join(cells), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    n_seeds = parser.parse_args().seeds
    found: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    seconds = dict.fromkeys(METHODS, 0.0)
    for seed in range(n_seeds):
        data = trained_digits(seed)
        for name, method in METHODS.items():
            begin = time.process_time()
            probs = method(data, seed)
            seconds[name] += time.process_time() - begin
            found[name].append(measure(probs, data))
        print(f"seed {seed}", file=sys.stderr, flush=True)
    columns = list(found["uncalibrated"][0])
    for shown in (columns[:4], columns[4:8], columns[8:]):
        print("\n| method |", " | ".join(shown), "| CPU s |")
        print("|---|" + "---|" * (len(shown) + 1))
        for name, figures in found.items():
            cells = [interval([figure[column] for figure in figures]) for column in shown]
            print(f"| {name} |", " | ".join(cells), f"| {seconds[name] / n_seeds:.1f} |")
    for shown in (columns[:4], columns[4:8], columns[8:]):
        show_pairs(found, shown)


if __name__ == "__main__":
    main()
