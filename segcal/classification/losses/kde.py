"""Kernel-density calibration error as a secondary loss, and KDE-XE."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.composite import Composite
from segcal.classification.losses.cross_entropy import CrossEntropy
from segcal.classification.losses.dirichlet_kernel import kernel_calibration_error, most_likely_bandwidth
from segcal.classification.losses.subsample import stratified_indices
from segcal.classification.losses.voxels import Voxels
from segcal.errors import ParameterError

Kind = Literal["canonical", "marginal", "top_label"]
FLOOR = 1e-12


class KernelCalibrationError(CalibrationLoss):
    """CE_p^p = (1/n) Σ_j Σ_c |π_jc - f_jc|^p, π the leave-one-out Dirichlet-kernel estimate (no p-th root).

    `canonical` compares whole probability vectors. `marginal` takes each class against the rest with a Beta kernel and
    adds the classes up; `top_label` does so with the winning class and whether it is right.

    Pairs cost n² time and memory, so at most `max_samples` voxels are compared: one drawn from each of as many equal
    stretches of the batch, anew at each call in training mode, always the same ones after `.eval()`. Smaller batches
    are used whole. Gradients flow through both ends of the kernel; the bandwidth is a constant to them.

    One released copy (han678/CalibWeightedRisk) turns the value into a Python number before adding it to the
    cross-entropy: no gradient, so its KDE-XE trains exactly like cross-entropy.

    Args:
        kind: canonical, marginal or top_label.
        p: power, >= 1; 1 in the reweighted-risk paper.
        bandwidth: h, or `likelihood` to choose it in each batch by leave-one-out likelihood. The default is ours: early
            in training all predictions are alike, the likelihood chooses the smallest h, and the gradient of the term,
            which grows as 1/h, drowns the cross-entropy (docs/training_losses.md).
        max_samples: how many voxels are compared with one another; the default is ours.
        seed: of the draws.
        ignore_index: voxels with this label do not count.
    """

    role = "secondary"

    def __init__(
        self,
        kind: Kind = "canonical",
        *,
        p: float = 1.0,
        bandwidth: float | Literal["likelihood"] = 0.01,
        max_samples: int = 512,
        seed: int = 0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        if kind not in {"canonical", "marginal", "top_label"}:
            raise ParameterError(f"kde: kind {kind!r}; expected canonical, marginal or top_label")
        if not 1 <= p < math.inf:
            raise ParameterError(f"kde: p must be finite and >= 1, got {p!r}")
        if bandwidth != "likelihood" and not (isinstance(bandwidth, float | int) and 0 < bandwidth < math.inf):
            raise ParameterError(f"kde: bandwidth must be a finite number > 0 or 'likelihood', got {bandwidth!r}")
        if max_samples < 2:
            raise ParameterError(f"kde: max_samples must be >= 2, got {max_samples!r}")
        self.kind, self.p, self.bandwidth = kind, p, bandwidth
        self.max_samples, self.seed, self.draws = max_samples, seed, 0

    def compute(self, voxels: Voxels) -> Tensor:
        n = voxels.count
        if n < 2:
            return voxels.zero()
        index = stratified_indices(n, self.max_samples, self.seed, self.draws, voxels.log_p.device)
        if self.training:
            self.draws += 1
        rows, labels = voxels.take(index)
        log_f = rows.double()
        target = torch.nn.functional.one_hot(labels, voxels.n_classes).double()
        if self.kind == "canonical":
            error = self._error(log_f, target).sum(dim=1).mean()
        elif self.kind == "marginal":
            error = torch.stack([self._binary(log_f[:, c], target[:, c]) for c in range(voxels.n_classes)]).sum()
        else:
            hits = (log_f.detach().argmax(dim=1) == labels).double()
            error = self._binary(log_f.amax(dim=1), hits)
        return error.to(voxels.log_p.dtype)

    def _binary(self, log_score: Tensor, target: Tensor) -> Tensor:
        log_rest = (-torch.expm1(log_score)).clamp_min(FLOOR).log()
        pairs = torch.stack([log_score, log_rest], dim=1)
        return self._error(pairs, torch.stack([target, 1 - target], dim=1))[:, 0].mean()

    def _error(self, log_f: Tensor, target: Tensor) -> Tensor:
        h = most_likely_bandwidth(log_f) if isinstance(self.bandwidth, str) else float(self.bandwidth)
        return kernel_calibration_error(log_f, target, h, self.p)


class KDECrossEntropy(Composite):
    """KDE-XE: CE + λ CE_p^p (see `KernelCalibrationError`).

    Args:
        weight: λ; 0.3 is the reweighted-risk paper's for CIFAR-10, 0.5 for CIFAR-100.
        kind: canonical, marginal or top_label.
        p: power, >= 1.
        bandwidth: h, or `likelihood`.
        max_samples: how many voxels are compared with one another.
        seed: of the draws.
        ignore_index: voxels with this label do not count.
    """

    def __init__(
        self,
        weight: float = 0.3,
        *,
        kind: Kind = "canonical",
        p: float = 1.0,
        bandwidth: float | Literal["likelihood"] = 0.01,
        max_samples: int = 512,
        seed: int = 0,
        ignore_index: int = -100,
    ) -> None:
        kde = KernelCalibrationError(
            kind, p=p, bandwidth=bandwidth, max_samples=max_samples, seed=seed, ignore_index=ignore_index
        )
        super().__init__(CrossEntropy(ignore_index=ignore_index), kde, beta=weight)
