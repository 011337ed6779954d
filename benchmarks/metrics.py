"""CPU seconds of all metrics of one pipeline on one case of BraTS size, against the same numbers by plain numpy.

The plain version computes NLL, Brier, Dice, ECE (B = 50), the ACE table (B = 15), class-wise ECE and the band gaps of
BA-ECE in float64 on whole arrays, without equal-mass ECE, flips or any check. Both run on one thread in this process.

    python benchmarks/metrics.py [--shape 155 240 240] [--classes 5] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from _results import entry, record
from numpy.typing import NDArray

from segcal.metrics import METRICS, CaseFrame, MetricSettings, make_metrics
from segcal.metrics.distance import distance_bands
from segcal.metrics.suite import MetricSet


def draw_case(shape: tuple[int, ...], n_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nested balls with confident insides and doubtful surfaces: (C, z, y, x) float32 probabilities and labels."""
    axes = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in shape), indexing="ij")
    radius = torch.stack(axes).square().sum(dim=0).sqrt()
    noise = torch.randn((n_classes, *shape), generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(shape, dtype=torch.int64)
    logits = noise.clone()
    logits[0] += (40 * (radius - 0.5)).clamp(-8, 8)
    for c in range(1, n_classes):
        outer, inner = 0.5 * (n_classes - c) / (n_classes - 1), 0.5 * (n_classes - c - 1) / (n_classes - 1)
        labels[(radius < outer) & (radius >= inner)] = c
        logits[c] += (40 * torch.minimum(outer - radius, radius - inner)).clamp(-8, 8)
    return torch.softmax(logits, dim=0), labels


def plain_numpy(probs: NDArray[np.float32], labels: NDArray[np.int64], band: NDArray[np.uint8]) -> dict[str, float]:
    n_classes = len(probs)
    rows = probs.reshape(n_classes, -1).astype(np.float64)
    truth, band = labels.reshape(-1), band.reshape(-1)
    confidence, predicted = rows.max(axis=0), rows.argmax(axis=0)
    hit = predicted == truth
    at_label = np.take_along_axis(rows, truth[None], axis=0)[0]
    found = {
        "nll": -np.log(np.maximum(at_label, 1.2e-38)).mean(),
        "brier": (np.square(rows).sum(axis=0) - 2 * at_label + 1).mean(),
    }
    confusion = np.bincount(truth * n_classes + predicted, minlength=n_classes**2).reshape(n_classes, n_classes)
    each = 2 * np.diag(confusion) / (confusion.sum(axis=0) + confusion.sum(axis=1))
    found["dsc"] = each[1:].mean()

    def ece(score: NDArray[np.float64], right: NDArray[np.bool_], index: NDArray[np.int64]) -> float:
        return float(np.abs(np.bincount(index, score) - np.bincount(index, right)).sum() / score.size)

    def bins(score: NDArray[np.float64], n_bins: int) -> NDArray[np.int64]:
        return np.minimum((score * n_bins).astype(np.int64), n_bins - 1)

    found["ece"] = ece(confidence, hit, bins(confidence, 50))
    found["ece 15"] = ece(confidence, hit, bins(confidence, 15))
    found["classwise_ece"] = np.mean([ece(rows[c], truth == c, bins(rows[c], 50)) for c in range(n_classes)])
    found["bands"] = ece(confidence, hit, band.astype(np.int64))
    return {name: float(value) for name, value in found.items()}


def cpu_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[155, 240, 240])
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a case of 62 x 96 x 96")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.shape = [62, 96, 96]
    torch.set_num_threads(1)
    probs, labels = draw_case(tuple(chosen.shape), chosen.classes)
    settings = MetricSettings(class_names=tuple(f"class_{c}" for c in range(chosen.classes)))
    decision = probs.argmax(dim=0)

    def build() -> CaseFrame:
        return CaseFrame.build("case", labels, settings, decision=decision)

    def run(metrics: MetricSet) -> dict[str, float]:
        metrics.update(frame, probs)
        return dict(metrics.take("case").values)

    frame = build()
    ours = run(make_metrics(settings))
    band = distance_bands(labels.numpy(), settings.band_edges, ignored=-1).band
    theirs = plain_numpy(probs.numpy(), labels.numpy(), band)
    for name in ("nll", "brier", "dsc", "ece", "classwise_ece"):
        assert abs(ours[name] - theirs[name]) < 1e-9, (name, ours[name], theirs[name])

    doubtful = float((probs.amax(dim=0) < 0.98).float().mean())
    print(f"{'x'.join(map(str, chosen.shape))}, C = {chosen.classes}, {100 * doubtful:.1f} % of voxels below 0.98")
    framed = cpu_seconds(build)
    print(f"  once a case: frame with distance bands {framed:8.2f} CPU s")
    all_metrics = cpu_seconds(lambda: run(make_metrics(settings)))
    for name, kind in METRICS.items():
        alone = cpu_seconds(lambda name=name, kind=kind: run(MetricSet({name: kind(settings)})))  # type: ignore[misc]
        print(f"  {name + ' alone':<38} {alone:8.2f} CPU s")
    plain = cpu_seconds(lambda: plain_numpy(probs.numpy(), labels.numpy(), band), repeats=2)
    print(f"  all metrics of one pipeline            {all_metrics:8.2f} CPU s")
    print(f"  plain numpy, fewer metrics             {plain:8.2f} CPU s")
    print(f"  ratio                                  {plain / all_metrics:8.1f} x")
    found = [
        entry("metrics/frame with distance bands cpu", framed, "s"),
        entry("metrics/all metrics of one pipeline cpu", all_metrics, "s"),
        entry("metrics/plain numpy over ours", plain / all_metrics, "x"),
    ]
    record(found, quick=chosen.quick)


if __name__ == "__main__":
    main()
