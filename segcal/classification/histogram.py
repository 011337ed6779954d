"""Histogram binning (Zadrozny & Elkan 2001), one-vs-rest, the row normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.one_vs_rest import check_labelled, log_probabilities, normalised, rule_of_succession
from segcal.classification.samples import Samples
from segcal.errors import ParameterError


@dataclass(frozen=True, slots=True, eq=False)
class HistogramBinning(RowMethod):
    """q_k ∝ share of the class among the rows of the same bin of p_k.

    Bins hold equally many rows by default, so none is empty; equal scores are never parted, so there may be fewer
    bins than asked for. With `binning="width"` bins are [j/B, (j+1)/B), the last closed, and an empty one stands for
    its centre. Shares are kept in [floor, 1 - floor], by default 1/(n + 2): see `IsotonicCalibration`.
    """

    name: ClassVar[str] = "histogram"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    edges: Tensor  # (C, B - 1) float64, increasing; bins that are not used lie beyond 1
    shares: Tensor  # (C, B) float64

    def __post_init__(self) -> None:
        if bool((self.edges.diff(dim=1) < 0).any()):
            raise ParameterError(f"{self.name}: edges must not decrease within a class")
        if bool((self.shares < 0).any()) or bool((self.shares > 1).any()):
            raise ParameterError(f"{self.name}: shares must be probabilities")

    @property
    def n_classes(self) -> int:
        return self.shares.shape[0]

    @classmethod
    def fit(  # type: ignore[override]
        cls,
        samples: Samples,
        *,
        seed: int = 0,
        bins: int = 15,
        binning: Literal["mass", "width"] = "mass",
        floor: float | None = None,
    ) -> Self:
        """Count, class by class. Draws nothing.

        Args:
            samples: labelled.
            seed: not used.
            bins: how many, at least 1.
            binning: bins of equal "mass" or of equal "width".
            floor: smallest share (and 1 minus the largest), None for 1/(n + 2).
        """
        if bins < 1:
            raise ParameterError(f"{cls.name}: bins must be at least 1, got {bins}")
        if binning not in ("mass", "width"):
            raise ParameterError(f"{cls.name}: binning must be `mass` or `width`, got {binning!r}")
        labels = check_labelled(samples, cls.name)
        lowest = rule_of_succession(floor, samples.n_rows, cls.name)
        probs = log_probabilities(samples).exp().numpy()
        edges = np.full((samples.n_classes, bins - 1), 2.0)
        shares = np.empty((samples.n_classes, bins))
        for k in range(samples.n_classes):
            column = probs[:, k]
            inner = _equal_mass(column, bins) if binning == "mass" else np.arange(1, bins) / bins
            edges[k, : len(inner)] = inner
            index = np.searchsorted(inner, column, side="right")
            total = np.bincount(index, minlength=bins)
            inside = np.bincount(index, (labels == k).numpy(), minlength=bins)
            centres = (np.arange(bins) + 0.5) / bins
            shares[k] = np.where(total > 0, inside / np.maximum(total, 1), centres)
        return cls(
            torch.as_tensor(edges, device="cpu"), torch.as_tensor(np.clip(shares, lowest, 1 - lowest), device="cpu")
        )

    def probabilities(self, samples: Samples) -> Tensor:
        probs = log_probabilities(samples).exp()
        columns = [
            self.shares[k][torch.searchsorted(self.edges[k].contiguous(), probs[:, k].contiguous(), right=True)]
            for k in range(self.n_classes)
        ]
        return normalised(torch.stack(columns, 1), probs)

    def tensors(self) -> dict[str, Tensor]:
        return {"edges": self.edges, "shares": self.shares}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        shares = expect_tensor(tensors, "shares", (None, None), cls.name)
        return cls(expect_tensor(tensors, "edges", (shares.shape[0], shares.shape[1] - 1), cls.name), shares)


def _equal_mass(values: NDArray[np.float64], bins: int) -> NDArray[np.float64]:
    """Edges half way between neighbours in rank at n/B, 2n/B, …; a cut through equal values moves to their begin."""
    ranked = np.sort(values)
    cuts = np.round(np.arange(1, bins) * len(ranked) / bins).astype(np.int64)
    cuts = cuts[(cuts > 0) & (cuts < len(ranked))]
    begin, end = (np.searchsorted(ranked, ranked[cuts], side=side) for side in ("left", "right"))
    # Equal values that begin at the very bottom have nothing below them: the cut goes to where they end.
    cuts = np.unique(np.where(begin > 0, begin, end))
    cuts = cuts[cuts < len(ranked)]
    below, above = ranked[cuts - 1], ranked[cuts]
    # For neighbours in floating point the middle rounds to one of the two; the upper one always parts them.
    middle = below + (above - below) / 2
    return np.unique(np.where(middle > below, middle, above))
