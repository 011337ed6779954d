"""The contract of every metric: a small additive state a case, `update`, `merge`, `compute`.

A metric never keeps voxels. What it keeps of a case can be added to what another worker kept of the same case or of
other cases, and all reported numbers come from those sums, so a bootstrap over cases never needs the voxels again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from segcal.errors import ParameterError

if TYPE_CHECKING:
    from segcal.metrics.voxels import VoxelBatch

SUM_TOLERANCE = 2e-3
"""How far the probabilities of a voxel may be from summing to 1; float16 files need about 5e-4."""

Direction: TypeAlias = Literal["lower", "higher"]
"""Which way a column gets better."""


@dataclass(frozen=True, slots=True)
class MetricSettings:
    """Everything that changes a reported number, in one place that can be written into every result.

    Attributes:
        class_names: names of the C classes, background first, or of the regions, of which one is enough.
        include_background: whether the mean Dice counts class 0 (natural images: yes).
        ece_bins: bins of ECE, MCE, class-wise and equal-mass ECE.
        ace_bins: bins of ACE.
        extra_bins: further bin counts to keep top-label tables for (sensitivity to B).
        band_edges: lower edges of the distance bands in voxels, the first 0; the last band is open.
        band_weights: "inverse_distance" weighs a band by 1 / (1 + its mean distance); "uniform" weighs all alike.
    """

    class_names: tuple[str, ...]
    include_background: bool = False
    ece_bins: int = 50
    ace_bins: int = 15
    extra_bins: tuple[int, ...] = ()
    band_edges: tuple[float, ...] = (0.0, 3.0, 7.0, 15.0)
    band_weights: Literal["inverse_distance", "uniform"] = "inverse_distance"

    def __post_init__(self) -> None:
        if not self.class_names:
            raise ParameterError("metrics need the names of the classes or regions, got none")
        if min(self.n_bins) < 1:
            raise ParameterError(f"bin counts must be at least 1, got {self.n_bins}")
        rising = all(low < high for low, high in zip(self.band_edges, self.band_edges[1:], strict=False))
        if not self.band_edges or self.band_edges[0] != 0 or not rising:
            raise ParameterError(f"band edges must rise from 0, got {self.band_edges}")

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def n_bins(self) -> tuple[int, ...]:
        """All bin counts that top-label tables are kept for, each once."""
        return tuple(dict.fromkeys((self.ece_bins, self.ace_bins, *self.extra_bins)))

    @property
    def certain_above(self) -> float:
        """A confidence above this is in the last of `ece_bins` bins, every other class of the voxel in the first."""
        return 1.0 + 2.0 * SUM_TOLERANCE - 1.0 / self.ece_bins


@dataclass(frozen=True, slots=True)
class Undefined:
    """A number that does not exist for a case, and why. It is never reported as 0."""

    reason: str


NO_VOXELS = Undefined("every voxel of the case is ignored")

Score: TypeAlias = float | Undefined


class Additive(Protocol):
    """What a metric keeps of a case: two of them can be added."""

    def __add__(self, other: Any, /) -> Any: ...


State = TypeVar("State", bound=Additive)


class Metric(ABC, Generic[State]):
    """One idea measured case by case.

    A subclass says what one batch of voxels adds to a case (`measure`) and which named numbers follow from the sum
    (`score`). Column names are `name` or `name:class`; `directions` says which way the columns `name` get better.
    """

    directions: ClassVar[Mapping[str, Direction]] = {}

    def __init__(self, settings: MetricSettings) -> None:
        self.settings = settings
        self.states: dict[str, State] = {}

    @abstractmethod
    def measure(self, batch: VoxelBatch) -> State:
        """What the voxels of `batch` add to their case."""

    @abstractmethod
    def score(self, state: State) -> dict[str, Score]:
        """Named numbers of one case."""

    def tables(self, state: State) -> dict[str, NDArray[np.float64]]:
        """Small arrays worth keeping of one case, by name; none by default."""
        del state
        return {}

    def update(self, case_id: str, batch: VoxelBatch) -> None:
        """Add voxels of a case. A case may come in any number of batches, in any order."""
        self.add(case_id, self.measure(batch))

    def add(self, case_id: str, state: State) -> None:
        """Add a state that was measured elsewhere."""
        known = self.states.get(case_id)
        self.states[case_id] = state if known is None else known + state

    def merge(self, other: Self) -> None:
        """Take over what another worker measured; the result does not depend on how the voxels were shared out."""
        if other.settings != self.settings:
            raise ParameterError(f"{type(self).__name__}: cannot merge states measured with other settings")
        for case_id, state in other.states.items():
            self.add(case_id, state)

    def compute(self) -> dict[str, dict[str, float]]:
        """Numbers of every case, `math.nan` where undefined; averaging over cases is the bootstrap's business."""
        return {
            case_id: {name: math.nan if isinstance(value, Undefined) else value for name, value in scores.items()}
            for case_id, scores in ((case_id, self.score(state)) for case_id, state in self.states.items())
        }
