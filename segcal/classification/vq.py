"""VQ local Dirichlet calibration and its two ablations (paper VQ: Dirichlet Calibration Goes Local)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from segcal.calibrators.base import Preserves, expect_tensor
from segcal.classification.base import RowMethod
from segcal.classification.samples import Samples
from segcal.classification.training import Training, split_rows, train
from segcal.classification.vq_codebook import EMA_DECAY, N_CODES
from segcal.classification.vq_dirichlet import LocalDirichlet
from segcal.classification.vq_head import QuantisedClassifier

NUMBERS_AT_ONCE = 1 << 22
"""Matrix entries held at once: a row needs C × C of them, so memory stays bounded and many classes cost time."""


@dataclass(frozen=True, slots=True, eq=False)
class SecondStage:
    """What a calibration of the frozen head is fitted with.

    Attributes:
        head: of stage 1.
        samples: all rows, with labels and features.
        rows, validation: which of them to fit on, and which say when to stop.
        generator: of everything that is drawn.
        training: the settings.
    """

    head: QuantisedClassifier
    samples: Samples
    rows: Tensor
    validation: Tensor
    generator: torch.Generator
    training: Training

    @property
    def codes(self) -> Tensor:
        """(n, w) of all rows."""
        return self.head.codes(self.samples.known_features)

    def train(
        self, steps: Sequence[Tensor], loss: Callable[[Tensor], Tensor], *, rows_at_once: int | None = None
    ) -> None:
        """Minimise the loss over steps away from the start, in place."""
        train(steps, loss, self.rows, self.validation, self.training, self.generator, rows_at_once=rows_at_once)


class QuantisedMethod(RowMethod):
    """A quantised classifier, retrained on the features, followed by some calibration of its output.

    The logits of the samples are not looked at. Decisions may change: the head is a new classifier.
    """

    needs_features: ClassVar[bool] = True
    order_matters: ClassVar[bool] = True
    training: ClassVar[type[Any] | None] = Training
    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = None

    head: QuantisedClassifier

    @property
    def n_classes(self) -> int:
        return self.head.n_classes

    @classmethod
    def fit(
        cls,
        samples: Samples,
        *,
        seed: int = 0,
        n_slots: int | None = None,
        n_codes: int = N_CODES,
        decay: float = EMA_DECAY,
        **settings: Any,
    ) -> Self:
        """Stage 1 trains codebook and head, stage 2 the calibration with both frozen; same rows in both.

        Args:
            samples: with labels and features.
            seed: of the split, the codebook, σ and the order of the rows.
            n_slots: w; None takes the largest divisor of the feature size up to 64.
            n_codes: K.
            decay: of the moving average of the codewords.
            **settings: those of `Training`, for both stages.
        """
        training = Training.of(settings, cls.name)
        generator = torch.Generator().manual_seed(seed)
        rows, validation = split_rows(samples.n_rows, training.validation_share, generator)
        head = QuantisedClassifier.fit(
            samples, rows, validation, generator, n_slots=n_slots, n_codes=n_codes, decay=decay, training=training
        )
        return cls.calibrate(SecondStage(head, samples, rows, validation, generator, training))

    @classmethod
    @abstractmethod
    def calibrate(cls, stage: SecondStage) -> Self:
        """Stage 2, with the head frozen."""

    @abstractmethod
    def log_probs(self, codes: Tensor) -> Tensor:
        """(n, w) codes to (n, C) calibrated log-probabilities."""

    def probabilities(self, samples: Samples) -> Tensor:
        codes = self.head.codes(samples.known_features)
        pieces = codes.split(max(NUMBERS_AT_ONCE // max(self.n_classes**2, self.head.n_features), 1))
        return torch.cat([self.log_probs(piece).exp() for piece in pieces])

    def tensors(self) -> dict[str, Tensor]:
        return self.head.tensors() | self.map_tensors()

    def map_tensors(self) -> dict[str, Tensor]:
        """What stage 2 fitted, by name."""
        return {}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls.on_head(QuantisedClassifier.from_tensors(tensors, cls.name), tensors)

    @classmethod
    @abstractmethod
    def on_head(cls, head: QuantisedClassifier, tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `map_tensors`, given the head."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedHead(QuantisedMethod):
    """VQ-NC: the quantised classifier as it is, without calibration."""

    name: ClassVar[str] = "vq_nc"

    head: QuantisedClassifier

    @classmethod
    def calibrate(cls, stage: SecondStage) -> Self:
        return cls(stage.head)

    def log_probs(self, codes: Tensor) -> Tensor:
        return self.head.log_probs(codes)

    @classmethod
    def on_head(cls, head: QuantisedClassifier, tensors: Mapping[str, Tensor]) -> Self:
        return cls(head)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedDirichlet(QuantisedMethod):
    """VQ-DC: softmax(W log p̂ + b) with one W for all cells (Kull et al. 2019), p̂ of the quantised classifier.

    Fitted exactly as the local map is, so that the two differ in their parameters only: Adam from the identity, the
    decay pulling towards it.
    """

    name: ClassVar[str] = "vq_dc"

    head: QuantisedClassifier
    weight: Tensor  # (C, C)
    bias: Tensor  # (C,)

    @classmethod
    def calibrate(cls, stage: SecondStage) -> Self:
        head, labels = stage.head, stage.samples.known_labels
        log_p = head.log_probs(stage.codes)
        one = torch.eye(head.n_classes, dtype=torch.float64, device=log_p.device)
        step, bias = torch.zeros_like(one, requires_grad=True), torch.zeros_like(one[0], requires_grad=True)

        def loss(chosen: Tensor) -> Tensor:
            scores = log_p[chosen] @ (one + step).T + bias
            return nll_loss(torch.log_softmax(scores, 1), labels[chosen])

        stage.train([step, bias], loss)
        return cls(head, (one + step).detach().cpu(), bias.detach().cpu())

    def log_probs(self, codes: Tensor) -> Tensor:
        device = codes.device
        return torch.log_softmax(self.head.log_probs(codes) @ self.weight.to(device).T + self.bias.to(device), 1)

    def map_tensors(self) -> dict[str, Tensor]:
        return {"W": self.weight, "b": self.bias}

    @classmethod
    def on_head(cls, head: QuantisedClassifier, tensors: Mapping[str, Tensor]) -> Self:
        size = head.n_classes
        return cls(
            head, expect_tensor(tensors, "W", (size, size), cls.name), expect_tensor(tensors, "b", (size,), cls.name)
        )


@dataclass(frozen=True, slots=True, eq=False)
class LocalDirichletCalibration(QuantisedMethod):
    """VQ: Dirichlet calibration whose concentrations depend on the cell a row's features fall into.

    Memory of fit and use is bounded; time grows with n C² (w for the concentrations), so hundreds of classes are slow.
    The decay of stage 2 pulls towards the identity map instead of towards 0 (ours): a codeword that was rarely met
    then leaves probabilities alone.
    """

    name: ClassVar[str] = "vq"

    head: QuantisedClassifier
    local: LocalDirichlet

    @property
    def n_parameters(self) -> int:
        """Of the calibration: 2 K C + w, and C priors."""
        return self.local.n_parameters

    @classmethod
    def calibrate(cls, stage: SecondStage) -> Self:
        head, labels, codes = stage.head, stage.samples.known_labels, stage.codes
        log_p = head.log_probs(codes)
        first = LocalDirichlet.start(len(head.codebook), head.n_classes, head.n_slots, stage.generator).to(codes.device)
        steps = (
            torch.zeros_like(first.receiver, requires_grad=True),
            torch.zeros_like(first.sender, requires_grad=True),
            torch.zeros_like(first.sigma, requires_grad=True),
            torch.zeros_like(first.log_prior, requires_grad=True),
        )

        def loss(chosen: Tensor) -> Tensor:
            return nll_loss(first.shifted(steps).log_probs(codes[chosen], log_p[chosen]), labels[chosen])

        at_once = max(NUMBERS_AT_ONCE // max(head.n_classes**2, head.n_slots * head.n_classes), 1)
        stage.train(steps, loss, rows_at_once=at_once)
        with torch.no_grad():
            return cls(head, first.shifted(steps).to(torch.device("cpu")))

    def log_probs(self, codes: Tensor) -> Tensor:
        return self.local.to(codes.device).log_probs(codes, self.head.log_probs(codes))

    def map_tensors(self) -> dict[str, Tensor]:
        return {
            "A": self.local.receiver,
            "B": self.local.sender,
            "sigma": self.local.sigma,
            "log_prior": self.local.log_prior,
        }

    @classmethod
    def on_head(cls, head: QuantisedClassifier, tensors: Mapping[str, Tensor]) -> Self:
        shape = (len(head.codebook), head.n_classes)
        local = LocalDirichlet(
            expect_tensor(tensors, "A", shape, cls.name),
            expect_tensor(tensors, "B", shape, cls.name),
            expect_tensor(tensors, "sigma", (head.n_slots,), cls.name),
            expect_tensor(tensors, "log_prior", (head.n_classes,), cls.name),
        )
        return cls(head, local)
