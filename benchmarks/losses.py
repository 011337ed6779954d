"""Training losses against torch's cross-entropy on one batch of nnU-Net's size: forward and backward, time and memory.

Memory is the peak of a process of its own above what logits and labels take, read from the kernel (Linux only). One
thread.

    python benchmarks/losses.py [--shape 2 5 128 128 128] [--only NAME …]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

import torch
from _results import entry, record
from torch import Tensor

from segcal.classification.losses import LOSSES, make_loss

BATCH: list[Tensor] = []
"""Logits and labels, filled in before the processes are forked."""


def draw(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits of a good network: most voxels certain, some in doubt, one in twenty wrong."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    logits = torch.randn(shape, generator=generator)
    strength = torch.rand(labels.shape, generator=generator).mul_(12).sub_(0.5)
    return logits.scatter_add_(1, labels[:, None], strength[:, None]), labels


def measure(name: str) -> tuple[float, int]:
    """CPU seconds of the second of two steps, and by how much the process grew at its highest."""
    loss = torch.nn.CrossEntropyLoss() if name == "torch" else make_loss(name)
    logits, labels = BATCH
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
    before = _status("VmRSS")
    for _ in range(2):
        start = time.process_time()
        torch.autograd.grad(loss(logits, labels), logits)
    return time.process_time() - start, _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs="+", default=[2, 5, 128, 128, 128])
    parser.add_argument("--only", nargs="*", default=None)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logits, labels = draw(tuple(chosen.shape))
    BATCH.extend([logits.requires_grad_(), labels])
    names = ["torch", *(name for name in LOSSES if chosen.only is None or name in chosen.only)]
    # A forked process sees the batch without a copy, and memory one loss leaves behind cannot hide what the next takes.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = dict(zip(names, pool.map(measure, names, chunksize=1), strict=True))
    size = logits.numel() * logits.element_size()
    print(f"logits {'x'.join(map(str, chosen.shape))}: {size / 1e6:.0f} MB")
    print("| loss | CPU s | x torch | peak MB | x torch | x logits |")
    print("|---|---|---|---|---|---|")
    for name, (seconds, peak) in found.items():
        ratios = seconds / found["torch"][0], peak / found["torch"][1]
        print(f"| {name} | {seconds:.2f} | {ratios[0]:.1f} | {peak / 1e6:.0f} | {ratios[1]:.1f} | {peak / size:.1f} |")
    whole = (name for name in found if name != "torch" and chosen.shape == parser.get_default("shape"))
    record(entry(f"losses/{name}/cpu over torch", found[name][0] / found["torch"][0], "x") for name in whole)


if __name__ == "__main__":
    main()
