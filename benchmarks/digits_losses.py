"""Every training loss end to end on scikit-learn's digits: accuracy and calibration against cross-entropy.

A small network (64-64-64-10) is trained from scratch on 600 of the 1,797 images for each loss and seed, and measured on
the other images. With `--noise 0.1` one label in ten, of training and test images alike, is replaced by a random one:
a task with doubt in it, where a network that memorises becomes overconfident. Losses that only judge calibration stand
beside cross-entropy (`ce + name`, β = 1). Local errors are measured in one space for all losses, that of the images:
50 principal components of the standardised pixels, γ = 3 (at 10 the kernel reaches across all of them).

    python benchmarks/digits_losses.py [--seeds 8] [--noise 0.0] [--only NAME …]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from segcal.classification.losses import LOSSES, Composite, held_out_split, interleaved_epoch, make_loss
from segcal.classification.metrics.local import local_errors, released_local_errors
from segcal.classification.principal import Standardiser, principal_axes

N_TRAIN, N_EPOCHS, BATCH = 600, 60, 128
BANDWIDTH = 3.0
METRICS = ("accuracy", "nll", "ece", "cwece", "lce", "mlce", "released_lce", "released_mlce")


@dataclass(frozen=True)
class Scores:
    """On the test images; ECE with 15 equal-width bins of the winning class, class-wise ECE the mean over classes.

    Local errors as written (VQ eq. 67-68) and as released.
    """

    accuracy: float
    nll: float
    ece: float
    cwece: float
    lce: float
    mlce: float
    released_lce: float
    released_mlce: float


def digits(seed: int, noise: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; another draw for each seed."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.target))
    images, labels = torch.from_numpy(data.data[order] / 16).float(), torch.from_numpy(data.target[order]).long()
    replaced = torch.from_numpy(rng.uniform(size=len(labels)) < noise)
    labels = torch.where(replaced, torch.from_numpy(rng.integers(0, 10, len(labels))), labels)
    return images[:N_TRAIN], labels[:N_TRAIN], images[N_TRAIN:], labels[N_TRAIN:]


def train_digits(
    loss: nn.Module,
    seed: int,
    *,
    noise: float = 0.0,
    held_out_loss: nn.Module | None = None,
    beta: float = 1.0,
) -> Scores:
    """Train with `loss` and measure on the test images; the same images, weights and batches for every loss of a seed.

    Args:
        loss: of (logits, labels).
        seed: of split, weights and batches.
        noise: share of labels replaced by random ones.
        held_out_loss: interleaved training: this loss on a tenth of the training images, `loss` on the rest.
        beta: factor of `held_out_loss`.
    """
    x, y, x_test, y_test = digits(seed, noise)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    majority, held_out = held_out_split(N_TRAIN, 0.1, seed=seed) if held_out_loss else (np.arange(N_TRAIN), [])
    rng = np.random.default_rng(seed)
    for _ in range(N_EPOCHS):
        order = rng.permutation(majority)
        batches = [(x[part], y[part]) for part in np.array_split(order, math.ceil(len(order) / BATCH))]
        interleaved_epoch(
            model,
            optimizer,
            majority=batches,
            held_out=[(x[held_out], y[held_out])] if held_out_loss else [],
            primary=loss,
            secondary=held_out_loss or loss,
            beta=beta,
        )
    with torch.no_grad():
        log_p = torch.log_softmax(model(x_test).double(), dim=1).numpy()
    pixels = Standardiser.fit(x)
    near = pixels(x_test, "pixels") @ principal_axes(pixels(x, "pixels"))
    return measure(log_p, y_test.numpy(), near)


def measure(log_p: NDArray[np.float64], labels: NDArray[np.int64], near: Tensor) -> Scores:
    p = np.exp(log_p)
    hits = p.argmax(axis=1) == labels
    classwise = [ece(p[:, c], labels == c) for c in range(p.shape[1])]
    nll = -log_p[np.arange(len(labels)), labels].mean()
    probs, truth = torch.from_numpy(p), torch.from_numpy(labels)
    written, released = (of(probs, truth, near, bandwidth=BANDWIDTH) for of in (local_errors, released_local_errors))
    return Scores(
        float(hits.mean()),
        float(nll),
        ece(p.max(axis=1), hits),
        float(np.mean(classwise)),
        written.lce,
        written.mlce,
        released.lce,
        released.mlce,
    )


def ece(score: NDArray[np.float64], hits: NDArray[np.bool_], n_bins: int = 15) -> float:
    index = np.minimum((score * n_bins).astype(np.intp), n_bins - 1)
    gaps = np.bincount(index, score, n_bins) - np.bincount(index, hits, n_bins)
    return float(np.abs(gaps).sum() / len(score))


def contenders() -> dict[str, tuple[nn.Module, nn.Module | None]]:
    """Row of the table -> loss, and the loss on held-out images if training is interleaved."""
    found: dict[str, tuple[nn.Module, nn.Module | None]] = {}
    for name, kind in LOSSES.items():
        if kind.role == "primary":
            found[name] = (make_loss(name), None)
        else:
            found[f"ce + {name}"] = (Composite(make_loss("ce"), make_loss(name)), None)
    found["aurc (margin)"] = (make_loss("aurc", score="margin"), None)
    found["au_p (margin)"] = (make_loss("au_p", score="margin"), None)
    found["au_p (negative entropy)"] = (make_loss("au_p", score="negative_entropy"), None)
    found["au_p (gradient through weights)"] = (make_loss("au_p", weight_gradient=True), None)
    found["kde_xe (h by likelihood)"] = (make_loss("kde_xe", bandwidth="likelihood"), None)
    found["kde_xe (h = 0.001)"] = (make_loss("kde_xe", bandwidth=0.001), None)
    found["focal + s_avuc"] = (Composite(make_loss("focal"), make_loss("s_avuc")), None)
    found["focal + sb_ece_lb"] = (Composite(make_loss("focal"), make_loss("sb_ece_lb")), None)
    found["ce, sb_ece_lb interleaved"] = (make_loss("ce"), make_loss("sb_ece_lb"))
    found["ce, s_avuc interleaved"] = (make_loss("ce"), make_loss("s_avuc"))
    return found


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean, Student's t."""
    from scipy import stats

    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--only", nargs="*", default=None)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, NDArray[np.float64]] = {}
    start = time.perf_counter()
    for row, (loss, held_out_loss) in contenders().items():
        if chosen.only is None or row in {"ce", *chosen.only}:
            options = {"noise": chosen.noise, "held_out_loss": held_out_loss}
            runs = [train_digits(loss, seed, **options) for seed in range(chosen.seeds)]
            table[row] = np.array([[getattr(run, name) for name in METRICS] for run in runs])
    print(
        f"{chosen.seeds} seeds, {time.perf_counter() - start:.0f} s; difference to ce on the same seed, 95 % interval"
    )
    print("| loss | accuracy % | NLL | ECE x 100 | ECE minus ce | class-wise ECE x 100 | class-wise minus ce |")
    print("|---|---|---|---|---|---|---|")
    for row, values in table.items():
        accuracy, nll, error, classwise = values.mean(axis=0)[:4]
        differences = [interval(100 * (values[:, k] - table["ce"][:, k])) for k in (2, 3)]
        texts = ["" if row == "ce" else f"{low:+.2f} to {high:+.2f}" for low, high in differences]
        print(
            f"| {row} | {100 * accuracy:.1f} | {nll:.3f} | {100 * error:.2f} | {texts[0]} | {100 * classwise:.2f} "
            f"| {texts[1]} |"
        )
    show_local(table)


def show_local(table: dict[str, NDArray[np.float64]]) -> None:
    """The local errors, each with its difference to cross-entropy on the same seed."""
    print("\n| loss | LCE | minus `ce` | MLCE | minus `ce` | LCE rel. | minus `ce` | MLCE rel. | minus `ce` |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row, values in table.items():
        cells = []
        for k in range(4, 8):
            low, high = interval(values[:, k] - table["ce"][:, k])
            cells += [f"{values[:, k].mean():.4f}", "" if row == "ce" else f"{low:+.4f} to {high:+.4f}"]
        print(f"| {row} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
