"""Local Nets (Barbera et al. 2025): a small network that draws probabilities towards those of similar rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.principal import N_COMPONENTS, Standardiser, principal_axes
from segcal.classification.samples import Samples
from segcal.classification.training import Training, split_rows, train
from segcal.errors import ParameterError

HIDDEN = 64
DROPOUT = 0.3
BANDWIDTH = 10.0
PROBABILITY_MARGIN = 1e-4
"""Probabilities are kept this far from 0 and 1 in the divergence, and the divergence this far from 0."""
MANY_CLASSES = 10
"""Up to so many classes the residual connections have one factor and one offset, above that one for each number."""
_NAMES = ("hidden_weight", "hidden_bias", "class_weight", "class_alpha", "class_beta")


@dataclass(frozen=True, slots=True, eq=False)
class LocalNets(RowMethod):
    """softmax(W_c r + α_c z + β_c) with r = relu(W φ + b), φ the standardised features, z the log-probabilities.

    Trained together with a second head, s = W_s r + α_s q with q the principal components of φ, which says which rows
    are similar and is not needed afterwards (its offset β_s cancels in every distance and is left out). The fit starts
    at the identity map (W_c = 0, α_c = 1, β_c = 0: ours; the released code starts W_c at random). z is canonical
    (log-softmax), so that a constant added to the logits of a row changes nothing (ours). Decisions may change.
    """

    name: ClassVar[str] = "local_nets"
    needs_features: ClassVar[bool] = True
    order_matters: ClassVar[bool] = True
    training: ClassVar[type[Any] | None] = Training
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    standardiser: Standardiser
    hidden_weight: Tensor  # (d, h)
    hidden_bias: Tensor  # (h,)
    class_weight: Tensor  # (h, C)
    class_alpha: Tensor  # (1,) or (C,)
    class_beta: Tensor  # (1,) or (C,)

    @property
    def n_classes(self) -> int:
        return self.class_weight.shape[1]

    @classmethod
    def fit(
        cls,
        samples: Samples,
        *,
        seed: int = 0,
        hidden: int = HIDDEN,
        dropout: float = DROPOUT,
        bandwidth: float = BANDWIDTH,
        divergence: float = 1.0,
        cross_entropy: float = 1.0,
        n_components: int = N_COMPONENTS,
        **settings: Any,
    ) -> Self:
        """Minimise divergence · JS + cross_entropy · CE, JS between the output and the labels of similar rows.

        Args:
            samples: with labels and features.
            seed: of the split, the weights, dropout and the order of the rows.
            hidden: units of the hidden layer (64, 128 and 256 in the paper).
            dropout: of the hidden layer while training.
            bandwidth: of the kernel, in units of the similarity features.
            divergence: weight of the Jensen-Shannon term.
            cross_entropy: weight of the cross-entropy of the output (the released code takes that of the neighbours'
                frequencies by default).
            n_components: principal components, fewer where rows or features are fewer.
            **settings: those of `Training`; batches of 1024 rows and no decay unless given.
        """
        if hidden < 1 or n_components < 1 or not 0 <= dropout < 1 or not 0 < bandwidth < math.inf:
            raise ParameterError(
                f"local_nets: hidden and n_components must be ≥ 1, dropout in [0, 1), bandwidth > 0; "
                f"got {hidden}, {n_components}, {dropout}, {bandwidth}"
            )
        training = Training.of(settings, cls.name, batch_rows=1024, weight_decay=0.0)
        generator = torch.Generator().manual_seed(seed)
        rows, validation = split_rows(samples.n_rows, training.validation_share, generator)
        standardiser = Standardiser.fit(samples.known_features[rows])
        features = standardiser(samples.known_features, cls.name)
        near = features @ principal_axes(features[rows], n_components)
        net = _start(features.shape[1], hidden, near.shape[1], samples.n_classes, generator)
        net = {name: value.to(features.device).requires_grad_(True) for name, value in net.items()}
        log_p, labels = torch.log_softmax(samples.logits, 1), samples.known_labels

        def heads(chosen: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
            return net_heads(net, features[chosen], near[chosen], log_p[chosen], keep)

        def loss(chosen: Tensor) -> Tensor:
            keep = torch.rand(len(chosen), hidden, generator=generator, dtype=torch.float64, device="cpu") >= dropout
            log_q, similar = heads(chosen, (keep / (1 - dropout)).to(features.device))
            wrong = cross_entropy * nll_loss(log_q, labels[chosen])
            if len(chosen) < 2:
                return wrong
            seen = neighbour_frequencies(similar, one_hot(labels[chosen], samples.n_classes), bandwidth)
            return wrong + divergence * bernoulli_js_distance(log_q.exp(), seen)

        def held_out(chosen: Tensor) -> Tensor:
            return nll_loss(heads(chosen, None)[0], labels[chosen])

        train(list(net.values()), loss, rows, validation, training, generator, held_out=held_out)
        return cls(standardiser, *(net[name].detach().cpu() for name in _NAMES))

    def probabilities(self, samples: Samples) -> Tensor:
        features = self.standardiser(samples.known_features, self.name)
        net = {name: getattr(self, name).to(features.device) for name in _NAMES}
        return torch.softmax(_class_scores(net, _hidden(net, features), torch.log_softmax(samples.logits, 1)), 1)

    def tensors(self) -> dict[str, Tensor]:
        return self.standardiser.tensors() | {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        standardiser = Standardiser.from_tensors(tensors, cls.name)
        hidden_bias = expect_tensor(tensors, "hidden_bias", (None,), cls.name)
        shape = (len(standardiser.mean), len(hidden_bias))
        hidden_weight = expect_tensor(tensors, "hidden_weight", shape, cls.name)
        class_weight = expect_tensor(tensors, "class_weight", (len(hidden_bias), None), cls.name)
        size = _residual_size(class_weight.shape[1], class_weight.shape[1])
        alpha = expect_tensor(tensors, "class_alpha", (size,), cls.name)
        beta = expect_tensor(tensors, "class_beta", (size,), cls.name)
        return cls(standardiser, hidden_weight, hidden_bias, class_weight, alpha, beta)


def neighbour_frequencies(similar: Tensor, truth: Tensor, bandwidth: float) -> Tensor:
    """(n, C) label frequencies of each row's neighbours, itself left out.

    θ_i = Σ_{j≠i} w_ij y_j / Σ_{j≠i} w_ij with w_ij = exp(-‖s_i - s_j‖² / (2 bandwidth²)). Normalised in logarithms: a
    row far from all others takes the label of the nearest, where the released code divides 0 by 0 and clamps.

    Args:
        similar: (n, k) similarity features, n ≥ 2.
        truth: (n, C) one-hot labels.
        bandwidth: of the kernel.
    """
    lengths = similar.square().sum(1)
    # A product keeps the gradient finite for equal rows, where that of a distance is not.
    apart = (lengths.unsqueeze(1) + lengths - 2 * similar @ similar.T).clamp(min=0)
    itself = torch.eye(len(similar), dtype=torch.bool, device=similar.device)
    weights = torch.softmax((apart / (-2 * bandwidth**2)).masked_fill(itself, -math.inf), 1)
    return weights @ truth.to(similar.dtype)


def bernoulli_js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Mean over rows and classes of the square root of the Jensen-Shannon divergence of two Bernoullis, in nats."""
    p, q = (v.clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN) for v in (p, q))
    middle = (p + q) / 2
    divergence = _entropy(middle) - (_entropy(p) + _entropy(q)) / 2
    return divergence.clamp(min=PROBABILITY_MARGIN).sqrt().mean()


def net_heads(
    net: Mapping[str, Tensor], features: Tensor, near: Tensor, log_p: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (n, C) and similarity features (n, k); `keep` (n, h) multiplies the hidden layer."""
    hidden = _hidden(net, features)
    if keep is not None:
        hidden = hidden * keep
    similar = hidden @ net["near_weight"] + net["near_alpha"] * near
    return torch.log_softmax(_class_scores(net, hidden, log_p), 1), similar


def _hidden(net: Mapping[str, Tensor], features: Tensor) -> Tensor:
    return torch.relu(features @ net["hidden_weight"] + net["hidden_bias"])


def _class_scores(net: Mapping[str, Tensor], hidden: Tensor, log_p: Tensor) -> Tensor:
    return hidden @ net["class_weight"] + net["class_alpha"] * log_p + net["class_beta"]


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.log() + (1 - p) * (1 - p).log())


def _residual_size(n_classes: int, length: int) -> int:
    return 1 if n_classes <= MANY_CLASSES else length


def _start(n_features: int, hidden: int, n_near: int, n_classes: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random hidden layer and similarity head, class head at the identity."""

    def uniform(inputs: int, *shape: int) -> Tensor:
        values = torch.rand(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return (2 * values - 1) / math.sqrt(inputs)

    def constant(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float64, device="cpu")

    near_size, class_size = _residual_size(n_classes, n_near), _residual_size(n_classes, n_classes)
    return {
        "hidden_weight": uniform(n_features, n_features, hidden),
        "hidden_bias": uniform(n_features, hidden),
        "near_weight": uniform(hidden, hidden, n_near),
        "near_alpha": constant(1.0, near_size),
        "class_weight": constant(0.0, hidden, n_classes),
        "class_alpha": constant(1.0, class_size),
        "class_beta": constant(0.0, class_size),
    }
