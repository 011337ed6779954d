"""The contract every classification method keeps: fitted once on samples, then a pure map to probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from segcal.calibrators.base import Preserves
from segcal.classification.samples import Samples

MOST_FEATURE_ROWS = 20_000
"""Default of `max_rows`, the setting all methods with features have: their time or memory grows too fast for all rows
of a large set, and a drawn part with the classes in their proportions is fitted on instead."""


class RowMethod(ABC):
    """A fitted method. Subclasses are frozen dataclasses of float64 tensors and plain numbers.

    Attributes:
        name: the registry key, the paper's short name in lower case.
        needs_features: looks at `Samples.features`, in the fit, which then sees at most `max_rows` rows, and when
            applied.
        translation_invariant: adding one constant to all logits of a row changes nothing.
        preserves: "order" keeps the ranking of the classes, "argmax" the winner, None neither.
        order_matters: the fit depends on the order of the rows (a drawn split, mini-batches), not only on the seed.
        by_class: something is fitted for every class, so that of a class with few rows it is badly known.
        training: dataclass whose fields are further settings of `fit`, for methods that train a network.
    """

    name: ClassVar[str]
    needs_features: ClassVar[bool] = False
    translation_invariant: ClassVar[bool]
    preserves: ClassVar[Preserves]
    order_matters: ClassVar[bool] = False
    by_class: ClassVar[bool] = True
    training: ClassVar[type[Any] | None] = None

    @property
    @abstractmethod
    def n_classes(self) -> int | None:
        """Number of classes the parameters belong to; None if any number will do."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The settings it was fitted with, tuned ones included, as the calibrator file tells them."""
        return {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user has to know of this fit."""
        return ()

    @property
    def validation_nll(self) -> float | None:
        """Mean NLL of the chosen settings on the validation rows; None where nothing was tuned."""
        return None

    @classmethod
    @abstractmethod
    def fit(cls, samples: Samples, *, seed: int = 0, **settings: Any) -> Self:
        """Fit on labelled samples.

        Args:
            samples: with labels, and with features where `needs_features`.
            seed: of everything that is drawn; the same seed gives the same bytes.
            **settings: the method's own, keyword-only in the subclass, all with defaults.
        """

    @abstractmethod
    def probabilities(self, samples: Samples) -> Tensor:
        """Calibrated (n, C) float64 probabilities; rows sum to 1, a row never depends on the other rows."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything that was fitted, by name, as the calibrator file stores it."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `tensors`; raises ParameterError on missing names, shapes or values out of range."""
