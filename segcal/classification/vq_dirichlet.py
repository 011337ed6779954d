"""The local Dirichlet map: a row's cell chooses the concentrations, Bayes' rule gives the posterior (VQ 4, F.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import softplus

UNIT_LINK = math.log(math.e - 1)
"""softplus of this is 1 (VQ eq. 69)."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalDirichlet:
    """log p_j = log π_j - log Beta(α_j) + Σ_i (α_ij - 1) log p̂_i + const,  α = softplus(Aᵀ diag(σ²) B) + I.

    A and B hold, slot by slot, the receiver and sender vectors of the codewords of a row's cell; α_ij is the
    concentration of predicted class i where the true class is j. VQ eq. 70 gives α - 1 = softplus(·) - 1 + I; here
    the same α stands in the Beta function, so that the map is exactly the posterior of VQ Prop. 2.

    Attributes:
        receiver: (K, C), the vectors a.
        sender: (K, C), the vectors b.
        sigma: (w,); its square enters, so that σ² cannot turn negative.
        log_prior: (C,), up to a constant.
    """

    receiver: Tensor
    sender: Tensor
    sigma: Tensor
    log_prior: Tensor

    @property
    def n_parameters(self) -> int:
        """2 K C + w + C."""
        return sum(part.numel() for part in (self.receiver, self.sender, self.sigma, self.log_prior))

    @classmethod
    def start(cls, n_codes: int, n_classes: int, n_slots: int, generator: torch.Generator) -> Self:
        """The identity map: every α is 1 + I and the prior is equal.

        σ is drawn from a standard normal, as in the paper, and then scaled to a mean square of 1 (ours), which makes
        eq. 69 hold exactly instead of on average.
        """
        level = math.sqrt(UNIT_LINK / n_slots)
        even = torch.full((n_codes, n_classes), level, dtype=torch.float64, device="cpu")
        sigma = torch.randn(n_slots, generator=generator, dtype=torch.float64, device="cpu")
        sigma = sigma / sigma.square().mean().sqrt()
        return cls(even, even.clone(), sigma, torch.zeros(n_classes, dtype=torch.float64, device="cpu"))

    def shifted(self, by: tuple[Tensor, Tensor, Tensor, Tensor]) -> LocalDirichlet:
        """The map whose parameters are these plus some steps."""
        return LocalDirichlet(self.receiver + by[0], self.sender + by[1], self.sigma + by[2], self.log_prior + by[3])

    def to(self, device: torch.device) -> LocalDirichlet:
        return LocalDirichlet(
            self.receiver.to(device), self.sender.to(device), self.sigma.to(device), self.log_prior.to(device)
        )

    def concentrations(self, codes: Tensor) -> Tensor:
        """(n, w) codes to (n, C, C): α[·, i, j] of predicted class i where the true class is j."""
        received = self.receiver[codes] * self.sigma.square().unsqueeze(-1)
        mixed = torch.einsum("nwi,nwj->nij", received, self.sender[codes])
        return softplus(mixed) + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)

    def log_probs(self, codes: Tensor, log_p: Tensor) -> Tensor:
        """(n, w) codes and (n, C) log-probabilities to calibrated (n, C) log-probabilities."""
        alpha = self.concentrations(codes)
        log_beta = torch.lgamma(alpha).sum(1) - torch.lgamma(alpha.sum(1))
        weighted = torch.einsum("nij,ni->nj", alpha - 1, log_p)
        return torch.log_softmax(self.log_prior - log_beta + weighted, 1)
