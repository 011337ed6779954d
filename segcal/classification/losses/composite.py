"""Two losses as one: what is to be learnt, and how honest the probabilities are."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor, nn

from segcal.classification.losses.base import Role
from segcal.errors import ParameterError


class Composite(nn.Module):
    """primary + β · secondary on the same batch (SOFT paper, Section 5.1; its λ · L2 is the optimiser's weight decay).

    Args:
        primary: any module of (logits, labels) that gives a scalar.
        secondary: the same.
        beta: β, finite and >= 0; papers tune it. With 0 the secondary loss is not computed.
    """

    role: ClassVar[Role] = "primary"

    def __init__(self, primary: nn.Module, secondary: nn.Module, beta: float = 1.0) -> None:
        super().__init__()
        if not 0 <= beta < math.inf:
            raise ParameterError(f"composite: beta must be finite and >= 0, got {beta!r}")
        self.primary, self.secondary, self.beta = primary, secondary, float(beta)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.primary(logits, labels)
        return loss + self.beta * self.secondary(logits, labels) if self.beta else loss
