"""Vector quantisation of features: slots, one codebook shared by all slots, moving-average updates (VQ 3, 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.errors import ParameterError

N_SLOTS = 64
N_CODES = 64
EMA_DECAY = 0.99
SMALLEST_COUNT = 1e-6
"""A codeword whose moving count fell below this has not been met for long and stays where it is."""
DISTANCES_AT_ONCE = 1 << 22


def choose_slots(n_features: int, n_slots: int | None = None) -> int:
    """The number of slots w that features of this size are cut into.

    Args:
        n_features: d.
        n_slots: a wish, which must divide d; None takes the largest divisor of d that is not above 64, the
            paper's number.

    Raises:
        ParameterError: w does not divide d; the message names the numbers that do.
    """
    divisors = [w for w in range(1, n_features + 1) if n_features % w == 0]
    if n_slots is None:
        return max(w for w in divisors if w <= N_SLOTS)
    if n_slots not in divisors:
        raise ParameterError(
            f"vq: {n_slots} slots do not divide features of size {n_features}; choose one of "
            f"{', '.join(map(str, divisors))}, or append columns of zeros, which change no distance."
        )
    return n_slots


def cut(features: Tensor, slot_size: int) -> Tensor:
    """(n, d) to (n, w, d / w): contiguous slots."""
    return features.reshape(features.shape[0], features.shape[1] // slot_size, slot_size)


@torch.no_grad()
def assign(slots: Tensor, codebook: Tensor) -> Tensor:
    """(n, w, s) slots to (n, w) int64: the nearest codeword of each slot, the first of equals.

    By VQ Prop. 1 the chosen sequence is the nearest among all K^w combinations. Distances are summed coordinate by
    coordinate, not by a matrix product, so that a row's codes do not depend on the rows it is handed in with.
    """
    flat = slots.reshape(-1, slots.shape[-1])
    step = max(DISTANCES_AT_ONCE // codebook.shape[0], 1)
    exact = "donot_use_mm_for_euclid_dist"
    nearest = [torch.cdist(part, codebook, compute_mode=exact).argmin(1) for part in flat.split(step)]
    return torch.cat(nearest).reshape(slots.shape[:-1])


def draw_codebook(slots: Tensor, n_codes: int, generator: torch.Generator) -> Tensor:
    """(K, s): slots of random rows; with repetition only where there are fewer slots than codewords."""
    if n_codes < 1:
        raise ParameterError(f"vq: the codebook needs at least one codeword, got {n_codes}")
    flat = slots.reshape(-1, slots.shape[-1])
    order = torch.randperm(flat.shape[0], generator=generator, device="cpu")
    repeats = -(-n_codes // len(order))
    return flat[order.repeat(repeats)[:n_codes].to(flat.device)].clone()


@torch.no_grad()
def update_codebook(
    codebook: Tensor, counts: Tensor, slots: Tensor, codes: Tensor, *, decay: float = EMA_DECAY
) -> None:
    """One moving-average step, in place (van den Oord et al. 2017, App. A).

    With n_k the slots of the batch that chose codeword k: N_k ← γ N_k + (1 - γ) n_k, and the moving sum m_k likewise;
    c_k = m_k / N_k. The sum is not stored, it is c_k N_k.

    Args:
        codebook: (K, s) float64.
        counts: (K,) float64 N, 1 at the start.
        slots: (n, w, s) of one batch.
        codes: (n, w), as `assign` gave them.
        decay: γ.
    """
    chosen = codes.reshape(-1)
    met = torch.bincount(chosen, minlength=len(counts)).to(codebook.dtype)
    total = torch.zeros_like(codebook).index_add_(0, chosen, slots.reshape(-1, slots.shape[-1]))
    sums = decay * codebook * counts.unsqueeze(1) + (1 - decay) * total
    counts.mul_(decay).add_(met, alpha=1 - decay)
    moved = sums / counts.clamp(min=SMALLEST_COUNT).unsqueeze(1)
    codebook.copy_(torch.where((met > 0).unsqueeze(1), moved, codebook))
