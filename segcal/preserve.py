"""Keeping the decision in the numbers that are stored.

A preserving calibrator keeps the argmax in exact arithmetic. Rounding, in memory or to a narrower type on
disk, can create a tie that another class wins. The winner is then moved by one unit in the last place: the
smallest change that keeps the promise. A handed-in decision that trails by more (half precision decided
otherwise) trades places with the largest, so that probabilities still sum to 1. Ties are resolved as
nnU-Net does, the first index wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.chunks import chunk_slices, chunk_voxels
from segcal.device import takes_loop
from segcal.errors import ParameterError

NEAR_TIE = 1e-6
"""A difference of two mean probabilities that their rounding in float32 can make or unmake."""


def keep_decision(stored: Tensor, decision: Tensor) -> Tensor:
    """Make the argmax of `stored` over axis 0 equal to `decision` everywhere.

    Args:
        stored: (C, ...) probabilities in the dtype they are kept in: floating point, or int32 that stand for
            multiples of a scale (NIfTI uint16 with scl_slope; torch lacks most operations for uint16 itself).
            Changed in place where needed; a whole number may rise by one, so its type needs that room.
        decision: (...) whole class indices.

    Returns:
        `stored`.
    """
    n_classes = stored.shape[0]
    flat = stored.reshape(n_classes, -1)
    wanted = decision.reshape(-1)
    wrong = _differing_by_loop(flat, wanted) if takes_loop(flat) else _differing(flat, wanted.long())
    if wrong.numel() == 0:
        return stored
    rows = flat[:, wrong]
    winner = wanted[wrong].long().unsqueeze(0)
    largest, rival = rows.max(0, keepdim=True)
    rows = rows.scatter(0, rival, rows.gather(0, winner)).scatter(0, winner, largest)
    tied = (rows.max(0, keepdim=True).indices != winner).squeeze(0)
    flat[:, wrong] = rows
    wrong, rows, winner, largest = wrong[tied], rows[:, tied], winner[:, tied], largest[:, tied]
    # Where a rival already sits at the ceiling the winner cannot climb past it: rivals step down instead.
    full = largest >= _ceiling(flat.dtype)
    lowered = torch.where(full & (rows >= largest), _step(rows, up=False), rows)
    raised = torch.where(full, largest, _step(largest, up=True))
    lowered.scatter_(0, winner, raised)
    flat[:, wrong] = lowered
    if flat.data_ptr() != stored.data_ptr():
        stored.copy_(flat.reshape(stored.shape))
    return stored


def keep_region_decision(stored: Tensor, decision: Tensor, *, half: float = 0.5) -> Tensor:
    """Make `stored > half` equal to the boolean `decision` everywhere, channel by channel.

    Args:
        stored: (region, ...) probabilities in the dtype they are kept in; changed in place where needed.
        decision: (region, ...) bool, the pooled decision p > 0.5.
        half: one half in stored units; for scaled integers the largest integer that still reads as <= 0.5.
    """
    boundary = torch.full((), half, dtype=stored.dtype, device=stored.device)
    above = stored > half
    stored[decision & ~above] = _step(boundary, up=True)
    stored[~decision & above] = boundary
    return stored


def keep_near_ties(probs: Tensor, decision: Tensor, *, regions: bool) -> Tensor:
    """Let a decision made elsewhere break the near-ties of `probs`, and leave everything else as it is.

    Args:
        probs: (C, ...) float32; changed in place, by at most NEAR_TIE, where the decided class is that close to the
            largest (regions: where a probability is that close to one half).
        decision: (...) int64, or for regions (C, ...) bool.
        regions: whether every channel is a decision of its own.

    Returns:
        The decision `probs` then says, in the form of `decision`; it differs from the given one beyond near-ties.
    """
    if regions:
        said = torch.where((probs - 0.5).abs() <= NEAR_TIE, decision, probs > 0.5)
        keep_region_decision(probs, said)
        return said
    largest, winner = probs.max(0)
    near = largest - probs.gather(0, decision.unsqueeze(0)).squeeze(0) <= NEAR_TIE
    said = torch.where(near, decision, winner)
    keep_decision(probs, said)
    return said


def _differing_by_loop(flat: Tensor, wanted: Tensor) -> Tensor:
    """The same as `_differing` by one compiled loop."""
    from segcal.compiled.flat_rows import flat_rows  # brings numba, which only those who need it wait for
    from segcal.compiled.winners import find_differing

    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < flat.shape[0]:
        raise ParameterError(
            f"decisions reach from {int(wanted.min())} to {int(wanted.max())}, expected 0 to {flat.shape[0] - 1}"
        )
    # One type for everybody: the loop is compiled, and kept for later runs, once.
    wanted = wanted.to(torch.uint8 if flat.shape[0] <= 256 else torch.int64)
    found = torch.empty(wanted.shape[0], dtype=torch.int64, device="cpu")
    n_found = find_differing(*flat_rows(flat), flat.shape[0], wanted.contiguous().numpy(), found.numpy())
    return found[:n_found].clone()


def _differing(flat: Tensor, wanted: Tensor) -> Tensor:
    """Where the argmax of (C, n) is not the wanted class; in pieces, as indices of a whole volume are large."""
    found = []
    for part in chunk_slices(wanted.shape[0], chunk_voxels(flat.shape[0])):
        values, chosen = flat[:, part], wanted[part]
        open_to_doubt = _open_to_doubt(values, chosen)
        # torch documents the first index on ties; max is several times faster than argmax along a strided axis.
        wrong = values.index_select(1, open_to_doubt).max(0).indices != chosen[open_to_doubt]
        found.append(open_to_doubt[wrong] + part.start)
    return torch.cat(found) if found else wanted.new_empty(0)


def _open_to_doubt(values: Tensor, chosen: Tensor) -> Tensor:
    """Where the largest of (C, n) may be another class than the chosen one: where it is larger, or could be tied."""
    if not values.is_floating_point() or not chosen.numel():
        return torch.arange(chosen.shape[0], device=chosen.device)
    top, (first, last) = values.amax(0), chosen.aminmax()
    own = values[int(first)] if first == last else values.gather(0, chosen.unsqueeze(0)).squeeze(0)
    # Two classes tied at the top make up all but the rounding of what a voxel sums to, at least.
    return ((own < top) | (values.sum(0) >= top * 1.99)).nonzero().squeeze(1)


def _ceiling(dtype: torch.dtype) -> float:
    """The largest probability the type can say."""
    return 1.0 if dtype.is_floating_point else torch.iinfo(dtype).max


def _step(values: Tensor, *, up: bool) -> Tensor:
    """The next representable value in the given direction, never below zero."""
    if not values.dtype.is_floating_point:
        return values + 1 if up else (values - 1).clamp(min=0)
    towards = torch.full_like(values, 2.0 if up else 0.0)
    if values.dtype in (torch.float16, torch.bfloat16):
        # torch.nextafter knows no half precision; non-negative floats order like their bit patterns.
        bits = values.view(torch.int16)
        return torch.where(values == towards, bits, bits + (1 if up else -1)).view(values.dtype)
    return torch.nextafter(values, towards)
