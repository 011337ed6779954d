"""The map in front of KCal's kernel: the paper's skip-ELU network, or features brought to one scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import expect_tensor
from segcal.classification.principal import Standardiser

QUERIES = 64
BACKGROUND_PER_CLASS = 20
LEARNING_RATE = 1e-3
"""Adam; the paper's SGD needs half a million steps."""
TINY = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """u = W1 ((x - mean) / scale) + b1; Pi(x) = W2 ELU(u) + u. Without weights: (x - mean) / scale.

    Attributes:
        mean, scale: (d,) float64.
        weight, bias: (e, d) and (e,), None where there is no network.
        skip: (e, e), likewise.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    skip: Tensor | None = None

    @property
    def n_features(self) -> int:
        return self.mean.shape[0]

    @property
    def n_outputs(self) -> int:
        return self.n_features if self.bias is None else self.bias.shape[0]

    def apply(self, features: Tensor) -> Tensor:
        """(n, d) features to (n, e) float64."""
        standard = (features.to(torch.float64) - self.mean) / self.scale
        if self.weight is None or self.bias is None or self.skip is None:
            return standard
        inner = standard @ self.weight.T + self.bias
        return torch.nn.functional.elu(inner) @ self.skip.T + inner

    def tensors(self) -> dict[str, Tensor]:
        network = {"weight": self.weight, "bias": self.bias, "skip": self.skip}
        return {"mean": self.mean, "scale": self.scale, **{k: v for k, v in network.items() if v is not None}}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], method: str) -> Self:
        mean = expect_tensor(tensors, "mean", (None,), method)
        scale = expect_tensor(tensors, "scale", (len(mean),), method)
        if "weight" not in tensors:
            return cls(mean, scale)
        bias = expect_tensor(tensors, "bias", (None,), method)
        weight = expect_tensor(tensors, "weight", (len(bias), len(mean)), method)
        return cls(mean, scale, weight, bias, expect_tensor(tensors, "skip", (len(bias), len(bias)), method))


def standardiser(features: Tensor) -> Projection:
    """Every feature to mean 0 and variance 1; constant ones to 0."""
    found = Standardiser.fit(features)
    return Projection(found.mean, found.scale)


def trained_projection(
    features: Tensor, labels: Tensor, n_classes: int, *, seed: int, dimensions: int, steps: int
) -> Projection:
    """Train on the log-loss of the kernel probability at h = 1 (the paper's objective).

    Each step draws 64 query rows and, apart from them, at most 20 background rows per class, each standing for
    N_k / m_k rows of its class. The batch normalisation of the paper is a fixed standardisation here.
    """
    frame = standardiser(features)
    standard = frame.apply(features).to(torch.float32)
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    d = standard.shape[1]
    weight = torch.randn((dimensions, d), generator=generator, device="cpu") / d**0.5
    bias = torch.zeros(dimensions, device="cpu")
    skip = torch.randn((dimensions, dimensions), generator=generator, device="cpu") * 0.1 / dimensions**0.5
    parameters = [value.requires_grad_() for value in (weight, bias, skip)]
    optimiser = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    by_class = [np.flatnonzero(labels.numpy() == k) for k in range(n_classes)]
    n_queries = min(QUERIES, len(labels) // 2)
    for _ in range(steps):
        queries = rng.choice(len(labels), n_queries, replace=False)
        background, counts = _draw_background(rng, by_class, queries)
        chosen = torch.as_tensor(np.concatenate([queries, background]), device="cpu")
        inner = standard[chosen] @ weight.T + bias
        points = torch.nn.functional.elu(inner) @ skip.T + inner
        squares = torch.cdist(points[:n_queries], points[n_queries:]).square() / dimensions
        logits = torch.as_tensor(counts, dtype=torch.float32, device="cpu").log() - squares
        same = labels[queries].unsqueeze(1) == labels[background]
        inside = torch.softmax(logits, 1) * same
        loss = -inside.sum(1).clamp(min=TINY).log().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = [value.detach().to(torch.float64) for value in parameters]
    return Projection(frame.mean, frame.scale, *found)


def _draw_background(
    rng: np.random.Generator, by_class: list[np.ndarray], queries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are no queries, at most 20 per class, and how many rows of its class each stands for."""
    taken = set(queries.tolist())
    rows, counts = [], []
    for members in by_class:
        if len(members) == 0:
            continue
        drawn = rng.choice(members, min(len(members), BACKGROUND_PER_CLASS + len(taken)), replace=False)
        free = np.array([row for row in drawn.tolist() if row not in taken][:BACKGROUND_PER_CLASS], dtype=np.int64)
        rows.append(free)
        counts.append(np.full(len(free), len(members) / max(len(free), 1)))
    return np.concatenate(rows), np.concatenate(counts)
