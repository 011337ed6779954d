"""Calibrators with random valid parameters, and volumes of logits that are hard on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators import CALIBRATORS, Calibrator

SPACE = (2, 6, 7)
"""(z, y, x) of the volumes."""


def draw_calibrator(name: str, n_classes: int, seed: int = 0) -> Calibrator:
    """A calibrator far from identity, anywhere its method allows."""
    rng = np.random.default_rng(seed)
    tensors = {key: torch.tensor(value) for key, value in _PARAMETERS[name](rng, n_classes).items()}
    return CALIBRATORS[name].from_tensors(tensors)


def draw_volume(kind: str, n_classes: int, seed: int = 0) -> Tensor:
    """(C, z, y, x) float64 logits, every value exact in float16 unless the kind is about finer differences."""
    rng = np.random.default_rng(seed)
    shape = (n_classes, *SPACE)
    if kind == "random":
        values = rng.normal(0, 4, shape).astype(np.float16)
    elif kind == "huge":
        values = rng.choice([-1e4, 1e4, 0.0, 9992.0], shape)
    elif kind == "constant":
        values = np.full(shape, 3.25)
    elif kind == "near_ties":
        values = rng.choice([0.0, -7.0, 11.0, 88.0], (1, *SPACE)) + rng.choice([0.0, 1e-7, 1e-4, 1e-3], shape)
    else:
        raise ValueError(kind)
    return torch.tensor(values, dtype=torch.float64)


VOLUMES = ("random", "huge", "constant", "near_ties")

Draw = Callable[[np.random.Generator, int], dict[str, NDArray[np.float64]]]


def _matrix(rng: np.random.Generator, c: int) -> dict[str, NDArray[np.float64]]:
    return {"W": np.eye(c) + rng.normal(0, 0.7, (c, c)), "b": rng.normal(0, 1, c)}


def _constrained(rng: np.random.Generator, c: int) -> dict[str, NDArray[np.float64]]:
    weight = np.eye(c) + rng.normal(0, 0.7, (c, c))
    return {"W": weight + (1.3 - weight.sum(1, keepdims=True)) / c, "b": rng.normal(0, 1, c)}


def _conditional(rng: np.random.Generator, c: int) -> dict[str, NDArray[np.float64]]:
    return {"W": np.eye(c) + rng.normal(0, 0.7, (c, c, c)), "b": rng.normal(0, 1, (c, c))}


def _cone(rng: np.random.Generator, c: int) -> dict[str, NDArray[np.float64]]:
    # Half of the slopes are exactly 0, and the first expert has collapsed: the corners of the cone are allowed too.
    slope = rng.exponential(0.5, (c, c - 1, c - 1)) * rng.integers(0, 2, (c, c - 1, c - 1))
    slope[0] = 0.0
    return {"A": slope, "beta": np.maximum(rng.normal(0, 0.5, (c, c - 1)), 1e-6)}


def _local(rng: np.random.Generator, c: int) -> dict[str, NDArray[np.float64]]:
    return {"weight": rng.normal(0, 0.1, (7, c, 5, 5)), "bias": rng.normal(0, 1, 7)}


_PARAMETERS: dict[str, Draw] = {
    "identity": lambda rng, c: {},
    "ts": lambda rng, c: {"temperature": np.exp(rng.normal(0, 1, 1))},
    "ets": lambda rng, c: {"temperature": np.exp(rng.normal(0, 1, 1)), "mixture": rng.dirichlet([1, 1, 1])},
    "vs": lambda rng, c: {"a": rng.normal(1, 0.7, c), "b": rng.normal(0, 1, c)},
    "ms": _matrix,
    "ms_c": _constrained,
    "dc": _matrix,
    "cdc": _conditional,
    "cms_ap": _cone,
    "cms_op": _cone,
    "lts": _local,
    "lts_ti": _local,
}
