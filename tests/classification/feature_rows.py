"""Rows with features for the methods that look at them."""

from __future__ import annotations

import torch

from segcal.classification.samples import Samples


def draw_rows(seed: int = 0, *, n: int = 200, n_classes: int = 3, n_features: int = 8, scale: float = 1.0) -> Samples:
    """Features around one centre a class, logits that know the class but are three times too large."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(n_classes, (n,), generator=generator)
    centres = torch.randn(n_classes, n_features, generator=torch.Generator().manual_seed(99))
    features = centres[labels] + torch.randn(n, n_features, generator=generator)
    logits = 3 * (features @ centres.T + torch.randn(n, n_classes, generator=generator))
    return Samples.of(logits, labels, scale * features)


def awkward_rows(kind: str) -> Samples:
    """Data that break careless methods."""
    rows = draw_rows(n=50)
    features, labels, logits = rows.known_features, rows.known_labels, rows.logits
    if kind == "few rows":
        return rows
    if kind == "a missing class":
        return Samples.of(logits, labels.clamp(max=1), features)
    if kind == "constant features":
        return Samples.of(logits, labels, torch.full_like(features, 3.7))
    if kind == "features of zero":
        return Samples.of(logits, labels, torch.zeros_like(features))
    if kind == "duplicated rows":
        twice = torch.arange(10).repeat(5)
        return rows.rows(twice)
    if kind == "two classes":
        return draw_rows(n=50, n_classes=2)
    if kind == "a thousand classes":
        return draw_rows(n=6, n_classes=1000)
    if kind == "huge features":
        return Samples.of(logits, labels, 1e6 * features)
    if kind == "tiny features":
        return Samples.of(logits, labels, 1e-6 * features)
    if kind == "constant scores":
        return Samples.of(torch.zeros_like(logits), labels, features)
    raise ValueError(kind)


AWKWARD = (
    "few rows",
    "a missing class",
    "constant features",
    "features of zero",
    "duplicated rows",
    "two classes",
    "a thousand classes",
    "huge features",
    "tiny features",
    "constant scores",
)
