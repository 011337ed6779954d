"""No calibration, as a calibrator: the baseline every table starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from segcal.calibrators.base import Calibrator, Preserves
from segcal.softmax import log_softmax, softmax


@dataclass(frozen=True, slots=True)
class Identity(Calibrator):
    """softmax(z): what the ensemble itself says."""

    name: ClassVar[str] = "identity"
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = "order"

    @property
    def n_classes(self) -> int | None:
        return None

    @classmethod
    def identity(cls, n_classes: int) -> Self:
        return cls()

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        return 0, 0

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls()

    def voxel_log_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        return log_softmax(logits)

    def voxel_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        return softmax(logits)
