"""Training losses against torch's cross-entropy on one batch of nnU-Net's size: forward and backward, time and memory.

Memory is the peak of the process above what logits and labels take, read from the kernel (Linux only). One thread.

    python benchmarks/losses.py [--shape 2 5 128 128 128] [--only NAME …]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from segcal.classification.losses import LOSSES, make_loss


def draw(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits of a good network: most voxels certain, some in doubt, one in twenty wrong."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    logits = torch.randn(shape, generator=generator)
    strength = torch.rand(labels.shape, generator=generator).mul_(12).sub_(0.5)
    return logits.scatter_add_(1, labels[:, None], strength[:, None]), labels


def peak_bytes(call: Callable[[], object]) -> tuple[float, int]:
    """CPU seconds of the call and the growth of the process at its highest."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
    before = _status("VmRSS")
    start = time.process_time()
    call()
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
    logits.requires_grad_()
    plain = torch.nn.CrossEntropyLoss()
    losses = {name: make_loss(name) for name in LOSSES if chosen.only is None or name in chosen.only}

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(logits, labels), logits)

    step(plain)()
    seconds, memory = min(peak_bytes(step(plain)) for _ in range(3))
    size = logits.numel() * logits.element_size()
    print(
        f"logits {'x'.join(map(str, chosen.shape))}: {size / 1e6:.0f} MB; torch {seconds:.2f} CPU s, {memory / 1e6:.0f} MB"
    )
    print("| loss | CPU s | x torch | peak MB | x logits |")
    print("|---|---|---|---|---|")
    for name, loss in losses.items():
        found, peak = peak_bytes(step(loss))
        print(f"| {name} | {found:.2f} | {found / seconds:.1f} | {peak / 1e6:.0f} | {peak / size:.1f} |", flush=True)


if __name__ == "__main__":
    main()
