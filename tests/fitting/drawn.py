"""Random labelled rows whose best calibration is not identity, for the tests of fitting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators import CALIBRATORS
from segcal.calibrators.affine import AffineCalibrator
from segcal.fitting.rows import Rows, all_rows

AFFINE: dict[str, type[AffineCalibrator]] = {
    name: cls for name, cls in CALIBRATORS.items() if issubclass(cls, AffineCalibrator)
}


def draw_logits(n_rows: int, n_classes: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    """(n, C) float64 logits exact in float32, with a common offset that differs from row to row."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, scale, (n_rows, n_classes)) + rng.normal(0, 2, (n_rows, 1))
    return torch.tensor(values.astype(np.float32), dtype=torch.float64)


def draw_labels(log_probs: Tensor, seed: int = 1) -> Tensor:
    """(n,) labels drawn from (n, C) log-probabilities."""
    gumbel = np.random.default_rng(seed).gumbel(size=tuple(log_probs.shape))
    return (log_probs + torch.tensor(gumbel)).argmax(1)


def draw_rows(n_rows: int, n_classes: int, seed: int = 0) -> Rows:
    """Over-confident logits: labels follow a tempered, class-dependent, shift-sensitive truth."""
    rng = np.random.default_rng(100 + seed)
    logits = draw_logits(n_rows, n_classes, seed)
    weight = torch.tensor(np.eye(n_classes) / 2 + rng.normal(0, 0.1, (n_classes, n_classes)))
    truth = torch.log_softmax(logits @ weight.T + torch.tensor(rng.normal(0, 0.5, n_classes)), 1)
    return all_rows(logits, draw_labels(truth, seed + 1))


def imbalanced_rows(n_rows: int, n_classes: int, seed: int = 0) -> Rows:
    """As of a segmentation: nearly all rows are certain background, a few are doubtful."""
    rng = np.random.default_rng(seed)
    doubtful = rng.random(n_rows) < 0.1
    logits = rng.normal(0, 2, (n_rows, n_classes))
    logits[:, 0] += np.where(doubtful, 1.0, 9.0 + rng.normal(0, 2, n_rows))
    z = torch.tensor(logits.astype(np.float32))
    weight = torch.tensor(np.eye(n_classes) / 1.6 + rng.normal(0, 0.05, (n_classes, n_classes)))
    truth = torch.log_softmax(z.double() @ weight.T, 1)
    return all_rows(z, draw_labels(truth, seed + 1))
