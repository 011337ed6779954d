"""The classifier on quantised features: the first stage of VQ local Dirichlet calibration (VQ 5, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from segcal.calibrators.base import expect_tensor
from segcal.classification.samples import Samples
from segcal.classification.training import Training, train
from segcal.classification.vq_codebook import (
    EMA_DECAY,
    N_CODES,
    assign,
    choose_slots,
    cut,
    draw_codebook,
    update_codebook,
)
from segcal.errors import MismatchError, ParameterError


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedClassifier:
    """softmax(q W + b), where q is the feature vector with every slot replaced by its nearest codeword.

    Attributes:
        scale: root mean square of the features of the fit, by which features are divided first (ours): one number
            for all of them changes no nearest codeword, and a learning rate means the same for any network.
        codebook: (K, s) codewords of the scaled slots.
        weight: (d, C).
        bias: (C,).
    """

    scale: float
    codebook: Tensor
    weight: Tensor
    bias: Tensor

    @property
    def n_classes(self) -> int:
        return self.bias.shape[0]

    @property
    def n_features(self) -> int:
        return self.weight.shape[0]

    @property
    def n_slots(self) -> int:
        return self.n_features // self.codebook.shape[1]

    def codes(self, features: Tensor) -> Tensor:
        """(n, d) features to (n, w) int64: the cell of each row."""
        if features.shape[1] != self.n_features:
            raise MismatchError(
                f"vq: fitted on features of size {self.n_features}, these rows have {features.shape[1]}; "
                "use the layer the method was fitted on."
            )
        return assign(_slots(features, self.scale, self.codebook.shape[1]), self.codebook.to(features.device))

    def log_probs(self, codes: Tensor) -> Tensor:
        """(n, w) codes to (n, C) log-probabilities before any calibration."""
        device = codes.device
        quantised = self.codebook.to(device)[codes].flatten(1)
        return torch.log_softmax(quantised @ self.weight.to(device) + self.bias.to(device), 1)

    @classmethod
    def fit(
        cls,
        samples: Samples,
        rows: Tensor,
        validation: Tensor,
        generator: torch.Generator,
        *,
        n_slots: int | None = None,
        n_codes: int = N_CODES,
        decay: float = EMA_DECAY,
        training: Training,
    ) -> Self:
        """Train codebook and head together; the head starts at 0, so at equal probabilities."""
        features, labels = samples.known_features, samples.known_labels
        n_slots = choose_slots(features.shape[1], n_slots)
        scale = float(features.to(torch.float64).square().mean().sqrt()) or 1.0
        slots = _slots(features, scale, features.shape[1] // n_slots)
        codebook = draw_codebook(slots[rows], n_codes, generator)
        counts = torch.ones(n_codes, dtype=torch.float64, device=features.device)
        shape = (features.shape[1], samples.n_classes)
        weight = torch.zeros(shape, dtype=torch.float64, device=features.device, requires_grad=True)
        bias = torch.zeros(shape[1], dtype=torch.float64, device=features.device, requires_grad=True)

        codes = assign(slots, codebook)

        def loss(chosen: Tensor) -> Tensor:
            codes[chosen] = assign(slots[chosen], codebook)
            return cross_entropy(codebook[codes[chosen]].flatten(1) @ weight + bias, labels[chosen])

        def move_codewords(chosen: Tensor) -> None:
            update_codebook(codebook, counts, slots[chosen], codes[chosen], decay=decay)

        state = [weight, bias, codebook, counts]
        train(state, loss, rows, validation, training, generator, after_step=move_codewords)
        return cls(scale, codebook.cpu(), weight.detach().cpu(), bias.detach().cpu())

    def tensors(self) -> dict[str, Tensor]:
        scale = torch.tensor([self.scale], dtype=torch.float64, device="cpu")
        return {"scale": scale, "codebook": self.codebook, "head_weight": self.weight, "head_bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], method: str) -> Self:
        codebook = expect_tensor(tensors, "codebook", (None, None), method)
        bias = expect_tensor(tensors, "head_bias", (None,), method)
        weight = expect_tensor(tensors, "head_weight", (None, len(bias)), method)
        scale = float(expect_tensor(tensors, "scale", (1,), method))
        if not scale > 0 or not codebook.numel() or weight.shape[0] % codebook.shape[1]:
            raise ParameterError(
                f"{method}: features of size {weight.shape[0]}, codewords of shape {tuple(codebook.shape)} and scale "
                f"{scale} do not go together"
            )
        return cls(scale, codebook, weight, bias)


def _slots(features: Tensor, scale: float, slot_size: int) -> Tensor:
    return cut(features.to(torch.float64) / scale, slot_size)
