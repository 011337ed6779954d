"""Choosing hyper-parameters on the validation cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias


class Report(Protocol):
    """Tells the tuner how a trial is doing; raises when going on is hopeless."""

    def __call__(self, step: int, value: float) -> None: ...


Objective: TypeAlias = Callable[[Mapping[str, float], Report], float]
"""Validation NLL of a setting."""
