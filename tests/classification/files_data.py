"""Small data files of an over-confident classifier with known properties."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def drawn(seed: int, n: int, n_classes: int = 4, *, temperature: float = 2.0) -> Arrays:
    """Logits that are too sharp by `temperature`; labels drawn from the softened ones."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(n, n_classes)) * temperature
    true = np.exp(logits / temperature)
    true /= true.sum(1, keepdims=True)
    labels = (true.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=n_classes - 1)
    return {"logits": logits, "labels": labels}


def with_foreign(arrays: Arrays, n_foreign: int, seed: int = 9) -> Arrays:
    """The same with rows at the end that belong to no class and have flatter scores."""
    rng = np.random.default_rng(seed)
    flat = 0.5 * rng.normal(size=(n_foreign, arrays["logits"].shape[1]))
    n = len(arrays["labels"])
    return {
        "logits": np.concatenate([arrays["logits"], flat]),
        "labels": np.concatenate([arrays["labels"], np.full(n_foreign, -1)]),
        "ood": np.arange(n + n_foreign) >= n,
    }


def saved(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)
    return path
