"""Interleaved training: the secondary loss sees only data that the primary loss does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from segcal.errors import ParameterError

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class EpochLosses:
    """Mean losses over the batches of the two parts of an epoch; NaN for a part without batches."""

    primary: float
    secondary: float


def interleaved_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    majority: Batches,
    held_out: Batches,
    primary: nn.Module,
    secondary: nn.Module,
    beta: float = 1.0,
) -> EpochLosses:
    """One epoch of interleaved training (SOFT paper, App. B).

    First the primary loss on the majority of the training set, then β · secondary on its held-out part. A network that
    memorises its training data is calibrated *there*, and a calibration loss on the same data has nothing to say; on
    data it does not fit, it has. The model is left in training mode throughout.

    Args:
        model: gives logits (n, C, *spatial).
        optimizer: of its parameters.
        majority: batches (inputs, labels), on the model's device.
        held_out: batches of the part of the training set set apart by `held_out_split`.
        primary: loss of (logits, labels).
        secondary: the same.
        beta: factor of the secondary loss.

    Returns:
        Mean losses; the secondary one without β.
    """
    model.train()
    return EpochLosses(
        primary=_part(model, optimizer, majority, primary, 1.0),
        secondary=_part(model, optimizer, held_out, secondary, beta),
    )


def held_out_split(n: int, fraction: float = 0.1, *, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the majority and of the held-out training samples, both ascending.

    For segmentation split cases (patients), not patches.

    Args:
        n: number of training samples.
        fraction: held out, in (0, 1); at least one sample goes to each part. The paper does not give its share.
        seed: of the draw.
    """
    if not 0 < fraction < 1 or n < 2:
        raise ParameterError(f"held out: {fraction!r} of {n} samples; expected a fraction in (0, 1) of at least 2")
    n_out = min(max(round(fraction * n), 1), n - 1)
    order = np.random.default_rng(seed).permutation(n).astype(np.int64)
    return np.sort(order[n_out:]), np.sort(order[:n_out])


def _part(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, loss: nn.Module, factor: float
) -> float:
    values: list[float] = []
    for inputs, labels in batches:
        optimizer.zero_grad(set_to_none=True)
        value: Tensor = loss(model(inputs), labels)
        (factor * value).backward()
        optimizer.step()
        values.append(float(value.detach()))
    return sum(values) / len(values) if values else float("nan")
