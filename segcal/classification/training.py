"""Mini-batch Adam with early stopping on rows kept apart: how every small network of this package is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from segcal.errors import DataError, ParameterError


@dataclass(frozen=True, slots=True)
class Training:
    """How long and how fast.

    Attributes:
        learning_rate: of Adam.
        weight_decay: of Adam, added to the gradient.
        batch_rows: rows a step looks at.
        max_steps: batches looked at, at most (a pass over the rows is always finished).
        patience: steps without a better loss on the rows kept apart after which the fit stops. Steps, not passes:
            a few hundred rows need many passes to get anywhere.
        validation_share: of the rows, kept apart to decide when to stop.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    batch_rows: int = 128
    max_steps: int = 20_000
    patience: int = 400
    validation_share: float = 0.2

    def __post_init__(self) -> None:
        whole = (self.batch_rows, self.max_steps, self.patience)
        if not (0 < self.learning_rate < math.inf and 0 <= self.weight_decay < math.inf and min(whole) >= 1):
            raise ParameterError(f"learning rate, batch, steps and patience must be > 0 and decay ≥ 0, got {self}")
        if not 0 < self.validation_share < 1:
            raise ParameterError(f"the validation share must lie between 0 and 1, got {self.validation_share}")

    @classmethod
    def of(cls, settings: Mapping[str, Any], method: str, **defaults: Any) -> Self:
        """From keyword settings; a name that does not exist is an error, not a setting without effect."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(settings) - known):
            raise ParameterError(
                f"{method}: unknown setting {', '.join(unknown)}; training knows {', '.join(sorted(known))}"
            )
        return cls(**(defaults | dict(settings)))


def split_rows(n_rows: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(training, validation) row numbers, drawn without looking at the rows; at least one row on either side."""
    if n_rows < 2:
        found = "There is no row to fit on" if n_rows == 0 else "One row cannot be split"
        raise DataError(f"{found}: some rows are fitted on and some tell when to stop; at least 2 are needed.")
    n_kept = min(max(round(share * n_rows), 1), n_rows - 1)
    order = torch.randperm(n_rows, generator=generator, device="cpu")
    return order[n_kept:].sort().values, order[:n_kept].sort().values


def train(
    state: Sequence[Tensor],
    loss: Callable[[Tensor], Tensor],
    rows: Tensor,
    validation: Tensor,
    training: Training,
    generator: torch.Generator,
    *,
    held_out: Callable[[Tensor], Tensor] | None = None,
    after_step: Callable[[Tensor], None] | None = None,
    rows_at_once: int | None = None,
) -> int:
    """Minimise a mean loss over rows; `state` ends as it was after the pass with the best loss on `validation`.

    The start counts too: a fit that helps nowhere returns where it began.

    Args:
        state: leaf tensors; those with `requires_grad` are optimised, the others may be changed by `after_step`.
        loss: mean loss of the given row numbers, a scalar.
        rows: row numbers to fit on.
        validation: row numbers to stop by.
        training: how long and how fast.
        generator: of the order of the rows, on the CPU: the same order on every device.
        held_out: loss used on `validation`; `loss` when absent.
        after_step: called with the row numbers of every batch after its step.
        rows_at_once: rows whose gradient is held in memory; a batch above that is summed up in pieces. Only for
            losses that are a mean over rows.

    Returns:
        The number of steps after which the returned state was reached.
    """
    free = [tensor for tensor in state if tensor.requires_grad]
    optimiser = torch.optim.Adam(free, lr=training.learning_rate, weight_decay=training.weight_decay)
    measure = held_out or loss
    best, best_step, kept = _mean(measure, validation, rows_at_once), 0, [tensor.detach().clone() for tensor in state]
    steps = 0
    while steps < training.max_steps:
        order = rows[torch.randperm(len(rows), generator=generator, device="cpu")]
        for batch in order.split(training.batch_rows):
            optimiser.zero_grad()
            for piece in batch.split(rows_at_once or len(batch)):
                (loss(piece) * (len(piece) / len(batch))).backward()
            optimiser.step()
            if after_step is not None:
                after_step(batch)
            steps += 1
        now = _mean(measure, validation, rows_at_once)
        if now < best:
            best, best_step, kept = now, steps, [tensor.detach().clone() for tensor in state]
        elif steps - best_step >= training.patience:
            break
    with torch.no_grad():
        for tensor, value in zip(state, kept, strict=True):
            tensor.copy_(value)
    return best_step


@torch.no_grad()
def _mean(loss: Callable[[Tensor], Tensor], rows: Tensor, rows_at_once: int | None) -> float:
    pieces = rows.split(rows_at_once or len(rows))
    return sum(float(loss(piece)) * len(piece) for piece in pieces) / len(rows)
