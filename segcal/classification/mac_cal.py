"""MaC-Cal, second stage (paper MAC): the classifier is retrained under random masks on frozen features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.principal import Standardiser
from segcal.classification.samples import Samples
from segcal.classification.training import split_rows
from segcal.errors import DataError, ParameterError

START_RETENTION = 0.5
FIRST_LIMIT, LAST_LIMIT = 0.1, 0.001
GAMMAS = (0.8, 0.9, 0.95, 0.99)
WIDTHS = (32, 128)
FULL_BATCH = 128
Redraw: TypeAlias = Literal["batch", "epoch"]
Net: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""(d, h) and (h,) of the first layer, (h, C) and (C,) of the second."""


@dataclass(frozen=True, slots=True)
class MaskedTraining:
    """SGD of the second stage; the paper's numbers.

    Attributes:
        epochs: T.
        learning_rate, momentum, weight_decay: of SGD; the rate is that of batches of 128 rows and shrinks with the
            batch in proportion (ours).
        batch_rows: of a mini-batch; None takes 128, or less where that would be fewer than 32 batches an epoch (ours).
            q moves once an epoch: with a handful of steps in between it falls to 0, where nothing learns any more,
            before the network has become confident.
        redraw: a new mask for every mini-batch (MAC Algorithm 1) or for every epoch (MAC 4.2).
    """

    epochs: int = 40
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_rows: int | None = None
    redraw: Redraw = "batch"

    def rows_of_a_batch(self, n_rows: int) -> int:
        """Rows a step looks at."""
        return self.batch_rows or max(min(FULL_BATCH, n_rows // 32), 8)

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_rows or 1) < 1 or not 0 < self.learning_rate < math.inf or self.weight_decay < 0:
            raise ParameterError(f"mac_cal: epochs, rows and rate must be > 0 and the decay ≥ 0, got {self}")
        if not 0 <= self.momentum < 1 or self.redraw not in ("batch", "epoch"):
            raise ParameterError(f"mac_cal: momentum must lie in [0, 1), redraw be `batch` or `epoch`, got {self}")


@dataclass(frozen=True, slots=True, eq=False)
class MaskedClassifier(RowMethod):
    """softmax(relu(φ W₁ + b₁) W₂ + b₂), φ the standardised features; all weights in use, nothing random.

    A new classifier: decisions and accuracy may change, and the logits of the samples are not looked at.

    Attributes:
        retention: (T + 1,), q from its start to its end.
    """

    name: ClassVar[str] = "mac_cal"
    needs_features: ClassVar[bool] = True
    order_matters: ClassVar[bool] = True
    training: ClassVar[type[Any] | None] = MaskedTraining
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    standardiser: Standardiser
    net: Net
    gamma: float
    retention: Tensor

    @property
    def n_classes(self) -> int:
        return self.net[3].shape[0]

    @property
    def values(self) -> Mapping[str, Any]:
        return {"gamma": self.gamma, "width": len(self.net[1])}

    @classmethod
    def fit(
        cls,
        samples: Samples,
        *,
        seed: int = 0,
        gamma: float | Sequence[float] = GAMMAS,
        width: int | Sequence[int] = WIDTHS,
        validation: Samples | None = None,
        validation_share: float = 0.2,
        **settings: Any,
    ) -> Self:
        """Retrain the classifier. Where γ or the width are several, the pair with the best NLL is taken.

        The paper trains on the rows the network was trained on and gives neither γ nor the width. Each pair is tried
        on the samples without a share of the rows, or, given `validation`, on all of them; NLL is measured on the
        share or on `validation`; the winner is fitted on all samples.

        Args:
            samples: with labels and features.
            seed: of the split, the weights, the masks and the order of the rows.
            gamma: in (0, 1], how far training accuracy is trusted; one or several.
            width: of the bottleneck, one or several.
            validation: rows with labels and features the network has not seen; best where there are some.
            validation_share: of the samples, set apart for the choice when `validation` is absent.
            **settings: those of `MaskedTraining`.
        """
        try:
            training = MaskedTraining(**settings)
        except TypeError as error:
            raise ParameterError(f"mac_cal: {error}") from None
        pairs = [(g, w) for g in _several(gamma) for w in _several(width)]
        for g, w in pairs:
            if not 0 < g <= 1 or w < 1 or w != int(w):
                raise ParameterError(f"mac_cal: γ must lie in (0, 1] and the width be ≥ 1, got {g} and {w}")
        if not samples.n_rows:
            raise DataError("mac_cal: no rows to train on.")
        best = pairs[0]
        if len(pairs) > 1:
            trial, judge = samples, validation
            if judge is None:
                rows, kept = split_rows(samples.n_rows, validation_share, torch.Generator().manual_seed(seed))
                trial, judge = samples.rows(rows), samples.rows(kept)
            scores = [_nll(cls._trained(trial, seed, g, int(w), training), judge) for g, w in pairs]
            best = pairs[min(range(len(pairs)), key=scores.__getitem__)]
        return cls._trained(samples, seed, best[0], int(best[1]), training)

    @classmethod
    def _trained(cls, samples: Samples, seed: int, gamma: float, width: int, training: MaskedTraining) -> Self:
        standardiser = Standardiser.fit(samples.known_features)
        features = standardiser(samples.known_features, cls.name)
        generator = torch.Generator().manual_seed(seed)
        net = _start(features.shape[1], width, samples.n_classes, generator, features.device)
        retention = retrain(net, features, samples.known_labels, gamma, training, generator)
        first, first_bias, second, second_bias = (value.cpu() for value in net)
        path = torch.tensor(retention, dtype=torch.float64, device="cpu")
        return cls(standardiser, (first, first_bias, second, second_bias), gamma, path)

    def probabilities(self, samples: Samples) -> Tensor:
        features = self.standardiser(samples.known_features, self.name)
        first, first_bias, second, second_bias = (value.to(features.device) for value in self.net)
        return torch.softmax(scores_of((first, first_bias, second, second_bias), features), 1)

    def tensors(self) -> dict[str, Tensor]:
        gamma = torch.tensor([self.gamma], dtype=torch.float64, device="cpu")
        named = dict(zip(("W1", "b1", "W2", "b2"), self.net, strict=True))
        return self.standardiser.tensors() | named | {"gamma": gamma, "retention": self.retention}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        standardiser = Standardiser.from_tensors(tensors, cls.name)
        first_bias = expect_tensor(tensors, "b1", (None,), cls.name)
        second_bias = expect_tensor(tensors, "b2", (None,), cls.name)
        first = expect_tensor(tensors, "W1", (len(standardiser.mean), len(first_bias)), cls.name)
        second = expect_tensor(tensors, "W2", (len(first_bias), len(second_bias)), cls.name)
        retention = expect_tensor(tensors, "retention", (None,), cls.name)
        gamma = float(expect_tensor(tensors, "gamma", (1,), cls.name))
        if not bool(((retention >= 0) & (retention <= 1)).all()) or not 0 < gamma <= 1:
            raise ParameterError(f"mac_cal: retention must lie in [0, 1] and γ in (0, 1], got {retention} and {gamma}")
        return cls(standardiser, (first, first_bias, second, second_bias), gamma, retention)


def retrain(
    net: Net, features: Tensor, labels: Tensor, gamma: float, training: MaskedTraining, generator: torch.Generator
) -> list[float]:
    """MAC Algorithm 1 on a network in place; returns q before the first and after every epoch.

    Accuracy and confidence are those of the network as it will be used, without a mask, over all rows: a small q
    makes weights that are too large when all of them are in use, so q rises while confidence is too high and the
    feedback is stable. The paper does not say whether the mask is on when they are measured.
    """
    velocity = [torch.zeros_like(value) for value in net]
    path = [START_RETENTION]
    for epoch in range(1, training.epochs + 1):
        order = torch.randperm(len(labels), generator=generator, device="cpu")
        masks = draw_masks(net, path[-1], generator)
        for number, batch in enumerate(order.split(training.rows_of_a_batch(len(labels)))):
            if number and training.redraw == "batch":
                masks = draw_masks(net, path[-1], generator)
            masked_step(net, velocity, masks, features[batch], labels[batch], training)
        confidence, accuracy = _judged(net, features, labels)
        path.append(next_retention(path[-1], confidence, accuracy, gamma, step_limit(epoch, training.epochs)))
    return path


def draw_masks(net: Net, retention: float, generator: torch.Generator) -> list[Tensor]:
    """Bernoulli(q) for every weight (MAC eq. 8); biases are always in use."""
    masks = []
    for value in net:
        drawn = torch.rand(value.shape, generator=generator, dtype=value.dtype, device="cpu") < retention
        masks.append(drawn.to(value.device) if value.ndim == 2 else torch.ones_like(value, dtype=torch.bool))
    return masks


def masked_step(
    net: Net,
    velocity: Sequence[Tensor],
    masks: Sequence[Tensor],
    features: Tensor,
    labels: Tensor,
    training: MaskedTraining,
) -> None:
    """One step of SGD with momentum, in place, that leaves masked weights alone (MAC eq. 9 and 11).

    Momentum and decay would move a weight whose gradient is 0. Here a masked weight keeps its value and its
    velocity until it takes part again.
    """
    leaves = [value.detach().requires_grad_(True) for value in net]
    first, first_bias, second, second_bias = (leaf * mask for leaf, mask in zip(leaves, masks, strict=True))
    loss = cross_entropy(scores_of((first, first_bias, second, second_bias), features), labels)
    gradients = torch.autograd.grad(loss, leaves)
    rate = training.learning_rate * min(len(labels) / FULL_BATCH, 1.0)
    for value, speed, gradient, mask in zip(net, velocity, gradients, masks, strict=True):
        moved = training.momentum * speed + gradient + training.weight_decay * value
        speed.copy_(torch.where(mask, moved, speed))
        value.copy_(torch.where(mask, value - rate * speed, value))


def step_limit(epoch: int, epochs: int) -> float:
    """η_t (MAC eq. 13): from 0.1 towards 0.001, reached in the last epoch."""
    return FIRST_LIMIT * math.exp(math.log(LAST_LIMIT / FIRST_LIMIT) * epoch / epochs)


def next_retention(retention: float, confidence: float, accuracy: float, gamma: float, limit: float) -> float:
    """q_t = q_{t-1} + clip(Conf_t - γ Acc_t, -η_t, η_t), kept within [0, 1] (MAC eq. 12, Algorithm 1)."""
    change = min(max(confidence - gamma * accuracy, -limit), limit)
    return min(max(retention + change, 0.0), 1.0)


def scores_of(net: Net, features: Tensor) -> Tensor:
    """(n, d) features to (n, C) logits."""
    first, first_bias, second, second_bias = net
    return torch.relu(features @ first + first_bias) @ second + second_bias


@torch.no_grad()
def _judged(net: Net, features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean confidence and accuracy of the network without masks."""
    confidence, decision = torch.softmax(scores_of(net, features), 1).max(1)
    return float(confidence.mean()), float((decision == labels).to(torch.float64).mean())


def _start(n_features: int, width: int, n_classes: int, generator: torch.Generator, device: torch.device) -> Net:
    def uniform(inputs: int, *shape: int) -> Tensor:
        values = torch.rand(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return ((2 * values - 1) / math.sqrt(inputs)).to(device)

    return (
        uniform(n_features, n_features, width),
        uniform(n_features, width),
        uniform(width, width, n_classes),
        uniform(width, n_classes),
    )


def _several(value: float | Sequence[float]) -> Sequence[float]:
    return [value] if isinstance(value, (int, float)) else value


def _nll(method: MaskedClassifier, samples: Samples) -> float:
    probabilities = method.probabilities(samples).clamp(min=torch.finfo(torch.float64).tiny)
    return float(nll_loss(probabilities.log(), samples.known_labels))
