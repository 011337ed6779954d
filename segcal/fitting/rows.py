"""Labelled voxels as rows, with what a fit needs to know of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 1 << 16
"""Rows that are summed at once. Fixed: the blocks, not the batches a caller uses, decide the rounding of sums."""

CONTROL_TEMPERATURES = (1.0, 2.0)
"""The pass over the data sums these NLLs exactly; they make the sample's estimate of any other NLL sharper."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Weighted voxels on the device they are fitted on.

    Attributes:
        logits: (n, C) float32, pooled.
        labels: (n,) int64 in [0, C).
        decision: (n,) int64, the reference decision.
        weights: (n,) float64, how many voxels a row stands for.
        counts: (C,) float64, voxels in the data by predicted class: what the mean is taken over.
        control_nll: exact mean NLL of softmax(z / T) over all those voxels for each T of `CONTROL_TEMPERATURES`,
            when a pass over the data has computed it.
    """

    logits: Tensor
    labels: Tensor
    decision: Tensor
    weights: Tensor
    counts: Tensor
    control_nll: tuple[float, ...] | None = None

    @property
    def n_rows(self) -> int:
        return self.labels.shape[0]

    @property
    def n_classes(self) -> int:
        return self.logits.shape[1]

    @property
    def n_voxels(self) -> float:
        return float(self.counts.sum())

    def of_expert(self, expert: int) -> Rows:
        """The rows whose predicted class is `expert`."""
        chosen = (self.decision == expert).nonzero().squeeze(1)
        counts = torch.zeros_like(self.counts)
        counts[expert] = self.counts[expert]
        return Rows(self.logits[chosen], self.labels[chosen], self.decision[chosen], self.weights[chosen], counts)

    def blocks(self) -> Iterator[slice]:
        """Fixed pieces in fixed order."""
        for begin in range(0, self.n_rows, BLOCK_ROWS):
            yield slice(begin, min(begin + BLOCK_ROWS, self.n_rows))


def all_rows(logits: Tensor, labels: Tensor, decision: Tensor | None = None) -> Rows:
    """Every row once, unweighted: (n, C) logits and (n,) labels held in memory."""
    chosen = logits.argmax(1) if decision is None else decision
    counts = torch.bincount(chosen, minlength=logits.shape[1]).to(torch.float64)
    weights = torch.ones(labels.shape[0], dtype=torch.float64, device=logits.device)
    return Rows(logits, labels, chosen, weights, counts)


def concatenate(parts: Iterable[Rows]) -> Rows:
    """Rows of several cases, one after the other."""
    pieces = list(parts)
    return Rows(
        torch.cat([p.logits for p in pieces]),
        torch.cat([p.labels for p in pieces]),
        torch.cat([p.decision for p in pieces]),
        torch.cat([p.weights for p in pieces]),
        torch.stack([p.counts for p in pieces]).sum(0),
    )
