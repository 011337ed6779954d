"""Standardised features and their principal components, fitted once and stored with the method that uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from segcal.calibrators.base import expect_tensor
from segcal.errors import MismatchError, ParameterError

N_COMPONENTS = 50


@dataclass(frozen=True, slots=True, eq=False)
class Standardiser:
    """(x - mean) / scale, feature by feature; a constant feature has scale 1 and becomes 0.

    Attributes:
        mean: (d,) float64.
        scale: (d,) float64, the standard deviation, > 0.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, features: Tensor) -> Self:
        exact = features.to(torch.float64)
        mean = exact.mean(0)
        spread = (exact - mean).square().mean(0).sqrt()
        # A constant column's deviation is rounding; dividing by it would turn rounding into a feature.
        constant = spread <= 1e-7 * exact.abs().amax(0)
        return cls(mean.cpu(), torch.where(constant, torch.ones_like(spread), spread).cpu())

    def __call__(self, features: Tensor, method: str) -> Tensor:
        """(n, d) float64."""
        if features.shape[1] != len(self.mean):
            raise MismatchError(
                f"{method}: fitted on features of size {len(self.mean)}, these rows have {features.shape[1]}; "
                "use the layer the method was fitted on."
            )
        return (features.to(torch.float64) - self.mean.to(features.device)) / self.scale.to(features.device)

    def tensors(self) -> dict[str, Tensor]:
        return {"feature_mean": self.mean, "feature_scale": self.scale}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], method: str) -> Self:
        mean = expect_tensor(tensors, "feature_mean", (None,), method)
        scale = expect_tensor(tensors, "feature_scale", (len(mean),), method)
        if not bool((scale > 0).all()):
            raise ParameterError(f"{method}: `feature_scale` must be positive, smallest is {float(scale.min())}")
        return cls(mean, scale)


def principal_axes(standardised: Tensor, n_components: int = N_COMPONENTS) -> Tensor:
    """(d, k) orthonormal axes of largest variance, k = min(n_components, d, n - 1) but at least 1.

    The sign of every axis is fixed by its entry of largest size, so that the same rows give the same axes.
    """
    n_rows, n_features = standardised.shape
    k = max(min(n_components, n_features, n_rows - 1), 1)
    centred = standardised - standardised.mean(0)
    found: Tensor = torch.linalg.eigh(centred.T @ centred / n_rows).eigenvectors
    axes = found.flip(1)[:, :k]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return axes * largest.sign()
