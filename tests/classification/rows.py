"""Rows of an over-confident classifier with known truth, and rows that are hard on a method."""

from __future__ import annotations

import numpy as np
import torch

from segcal.classification.samples import Samples


def draw_rows(
    n_rows: int, n_classes: int, *, seed: int = 0, temperature: float = 2.0, n_features: int | None = None
) -> Samples:
    """Labels drawn from softmax(z / temperature), so that is the calibrated answer; features know the label too."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (n_rows, n_classes)) + rng.normal(0, 1, n_classes)
    soft = torch.softmax(torch.as_tensor(logits) / temperature, 1).numpy()
    labels = (soft.cumsum(1) > rng.random((n_rows, 1))).argmax(1)
    features = None
    if n_features is not None:
        centres = rng.normal(0, 1.5, (n_classes, n_features))
        features = torch.as_tensor(centres[labels] + rng.normal(0, 1, (n_rows, n_features)), dtype=torch.float32)
    return Samples.of(torch.as_tensor(logits), torch.as_tensor(labels), features)


def nll(probs: torch.Tensor, labels: torch.Tensor) -> float:
    return -float(probs.gather(1, labels.unsqueeze(1)).log().mean())
