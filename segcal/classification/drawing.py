"""Rows set aside by a seed: the same share of every class."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.errors import ParameterError


def stratified(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the rows that stay and of those set aside, both increasing.

    Within a shuffled list sorted by class every 1/share-th row is set aside, so each class gives its share to
    within one row, and all together give exactly floor(n share). Drawn by position: another order of the rows is
    another split.

    Args:
        labels: (n,) int64.
        share: in (0, 1), of the rows to be set aside.
        seed: of the draw.
    """
    if not 0 < share < 1:
        raise ParameterError(f"the share of rows to set aside must lie between 0 and 1, got {share!r}")
    drawn = np.random.default_rng(seed).permutation(len(labels))
    sorted_rows = drawn[np.argsort(labels.numpy()[drawn], kind="stable")]
    steps = np.floor(np.arange(len(labels) + 1) * share + 1e-9)
    aside = np.diff(steps) > 0
    kept, taken = np.sort(sorted_rows[~aside]), np.sort(sorted_rows[aside])
    return torch.as_tensor(kept, device="cpu"), torch.as_tensor(taken, device="cpu")


def some_rows(labels: Tensor, at_most: int, seed: int) -> Tensor:
    """Indices of all rows, or of `at_most` of them with the classes in their proportions."""
    if len(labels) <= at_most:
        return torch.arange(len(labels), device=labels.device)
    return stratified(labels, at_most / len(labels), seed)[1]
