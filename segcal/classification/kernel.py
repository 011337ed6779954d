"""KCal (Lin, Trivedi & Sun 2023): class frequencies among calibration rows that look alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.drawing import some_rows, stratified
from segcal.classification.kernel_projection import Projection, standardiser, trained_projection
from segcal.classification.one_vs_rest import check_labelled, rule_of_succession
from segcal.classification.samples import Samples
from segcal.errors import DataError, ParameterError

QUERY_ROWS = 2_000
"""The bandwidth is judged by leaving out one of at most so many rows at a time, against all others."""
BANDWIDTHS = (1e-3, 1e2)
"""Range of the search, log-spaced grid and then a bounded search between the neighbours of the best."""
GRID_POINTS = 26
PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class KernelCalibration(RowMethod):
    """p_k(x) = sum of k(Pi x, Pi x_i) over memory rows of class k / over all, k(u, v) = exp(-mean (u - v)^2 / h).

    Looks at features only; the classifier's scores are not used. Accuracy can go either way. Computed in logarithms,
    so a row far from all others takes the class of its nearest neighbours instead of 0/0. Mixed with the uniform
    distribution at weight 1/(n + 2), because a class without memory rows would otherwise have probability 0.
    """

    name: ClassVar[str] = "kcal"
    needs_features: ClassVar[bool] = True
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None
    order_matters: ClassVar[bool] = True

    projection: Projection
    memory: Tensor  # (m, e) float64, projected
    labels: Tensor  # (m,) float64, whole numbers
    bandwidth: float
    classes: int
    values: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf"):
            raise ParameterError(f"{self.name}: bandwidth must be finite and > 0, got {self.bandwidth!r}")
        low, high = float(self.labels.min()), float(self.labels.max())
        if low < 0 or high >= self.classes or bool((self.labels != self.labels.round()).any()):
            raise ParameterError(f"{self.name}: memory labels must be whole numbers below {self.classes}")

    @property
    def n_classes(self) -> int:
        return self.classes

    @classmethod
    def fit(  # type: ignore[override]
        cls,
        samples: Samples,
        *,
        seed: int = 0,
        projection: Literal["trained", "standardised"] = "trained",
        train: Samples | None = None,
        dimensions: int = 32,
        steps: int = 1_000,
    ) -> Self:
        """Train the projection, then choose the bandwidth by leave-one-out log-loss on the memory.

        Args:
            samples: labelled, with features: the memory.
            seed: of the drawn half, the training and the rows of the bandwidth search.
            projection: "trained" (the paper's skip-ELU network) or "standardised" (features to mean 0, variance 1).
            train: rows to train the projection on, as in the paper the classifier's own training rows. Without them a
                drawn half of `samples` trains it and the other half is the memory: the bandwidth must be judged by rows
                the projection has not seen.
            dimensions: of the trained projection.
            steps: of its training.
        """
        if projection not in ("trained", "standardised"):
            raise ParameterError(f"{cls.name}: projection must be `trained` or `standardised`, got {projection!r}")
        labels = check_labelled(samples, cls.name)
        samples.known_features  # noqa: B018 (its message names the way out)
        memory = samples
        if projection == "standardised":
            found = standardiser(samples.known_features if train is None else train.known_features)
        else:
            if train is None:
                kept, aside = stratified(labels, 0.5, seed)
                memory, train = samples.rows(kept), samples.rows(aside)
            if train.n_rows < 4:
                raise DataError(f"{cls.name}: {train.n_rows} rows are too few to train a projection on.")
            found = trained_projection(
                train.known_features,
                train.known_labels,
                samples.n_classes,
                seed=seed,
                dimensions=dimensions,
                steps=steps,
            )
        if memory.n_rows < 2:
            raise DataError(f"{cls.name}: a memory of {memory.n_rows} rows is too small; at least 2 are needed.")
        points = found.apply(memory.known_features)
        bandwidth = _bandwidth(points, memory.known_labels, samples.n_classes, seed)
        values = {"projection": projection, "memory_rows": memory.n_rows, "bandwidth": bandwidth}
        return cls(found, points, memory.known_labels.to(torch.float64), bandwidth, samples.n_classes, values)

    def probabilities(self, samples: Samples) -> Tensor:
        features = samples.known_features
        if features.shape[1] != self.projection.n_features:
            raise DataError(
                f"kcal: fitted on {self.projection.n_features} features, the rows have {features.shape[1]}."
            )
        points = self.projection.apply(features)
        share = rule_of_succession(None, len(self.memory), self.name)
        found = _log_votes(points, self.memory, self.labels.to(torch.int64), self.classes, self.bandwidth).exp()
        return found * (1 - share) + share / self.classes

    def tensors(self) -> dict[str, Tensor]:
        numbers = {"bandwidth": self.bandwidth, "classes": float(self.classes)}
        single = {name: torch.full((1,), value, dtype=torch.float64, device="cpu") for name, value in numbers.items()}
        return {**self.projection.tensors(), "memory": self.memory, "labels": self.labels, **single}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        projection = Projection.from_tensors(tensors, cls.name)
        memory = expect_tensor(tensors, "memory", (None, projection.n_outputs), cls.name)
        labels = expect_tensor(tensors, "labels", (len(memory),), cls.name)
        bandwidth, classes = (
            float(expect_tensor(tensors, name, (1,), cls.name)[0]) for name in ("bandwidth", "classes")
        )
        return cls(projection, memory, labels, bandwidth, int(classes))


def mean_squares(points: Tensor, memory: Tensor) -> Tensor:
    """(n, m) mean over dimensions of the squared difference, each pair on its own: no row changes another's sum."""
    distances = torch.cdist(points, memory, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square_().div_(points.shape[1])


def _log_votes(points: Tensor, memory: Tensor, labels: Tensor, n_classes: int, bandwidth: float) -> Tensor:
    """(n, C) log of the kernel probabilities."""
    # One array for all: small results kept between large temporaries would leave holes that no later one fits into.
    found = points.new_empty((len(points), n_classes))
    for part in torch.arange(len(points), device=points.device).split(max(PAIRS_AT_ONCE // max(len(memory), 1), 1)):
        found[part] = _votes(mean_squares(points[part], memory), labels, n_classes, bandwidth)
    return found


def _votes(squares: Tensor, labels: Tensor, n_classes: int, bandwidth: float) -> Tensor:
    """Log kernel probabilities from (n, m) squared distances, infinite ones left out."""
    nearest = squares.amin(1, keepdim=True)
    weights = torch.exp((nearest - squares) / bandwidth)
    votes = squares.new_zeros((len(squares), n_classes)).index_add_(1, labels, weights)
    return (votes / votes.sum(1, keepdim=True)).log()


def _bandwidth(points: Tensor, labels: Tensor, n_classes: int, seed: int) -> float:
    """Leave-one-out: every row is predicted from the others; a class with a single row cannot be, and is floored."""
    chosen = some_rows(labels, QUERY_ROWS, seed)
    squares = mean_squares(points[chosen], points)
    squares[torch.arange(len(chosen), device=points.device), chosen] = torch.inf
    scale = float(squares[torch.isfinite(squares)].median())
    if not scale > 0:
        return 1.0  # all rows look the same: every bandwidth gives the class frequencies
    floor = 1.0 / (len(points) + 2.0)
    picked = labels[chosen].unsqueeze(1)

    def loss(log_h: float) -> float:
        found = _votes(squares, labels, n_classes, scale * float(np.exp(log_h))).exp()
        mixed = found * (1 - floor) + floor / n_classes
        return -float(mixed.gather(1, picked).log().mean())

    grid = np.linspace(np.log(BANDWIDTHS[0]), np.log(BANDWIDTHS[1]), GRID_POINTS)
    best = int(np.argmin([loss(float(x)) for x in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-3})
    return scale * float(np.exp(found.x))
