"""Local temperature scaling (Ding et al. 2021; SEG eq. 7 and 11): a temperature of its own for every voxel.

The temperature is read off the logits around the voxel, in its own slice, by seven small convolutions: four leaf
temperatures, joined by three gates into a binary tree of depth two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import expm1, log
from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import Tensor

from segcal.calibrators.base import Preserves, SpatialCalibrator, at_least_float32, expect_tensor
from segcal.chunks import chunk_slices
from segcal.compiled import agreed
from segcal.device import takes_loop
from segcal.errors import ParameterError
from segcal.softmax import log_softmax, softmax

N_LEAVES, N_MAPS = 4, agreed.N_MAPS
"""Leaves, and leaves with the gates that join them."""
KERNEL, DILATION = agreed.KERNEL, agreed.DILATION
HALO = DILATION * (KERNEL // 2)
"""Pixels the temperature of a pixel looks away from it, in every in-plane direction."""

TAU_MIN, TAU_MAX = agreed.TAU_MIN, agreed.TAU_MAX
"""Bounds of the temperature (those of `ts`): no logits, however far from the fitted ones, make it 0 or infinite."""

LEAF_BIAS_OF_ONE = log(expm1(1.0))
"""softplus of this is 1."""

VALUES_PER_CHUNK = 1 << 22
"""Numbers (pixels x channels) that are convolved at once: 16 MB, whatever the size of the volume."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalTemperatureScaling(SpatialCalibrator):
    """softmax(z / tau(v; Z)), tau from the raw logits of the voxel's slice; the ranking of the classes never changes.

    With t_k = softplus(leaf k) and g_k = sigmoid(gate k), each an in-plane convolution (kernel 5, dilation 2,
    reflect padding; replicate padding for slices under 5 pixels in either direction) of the logits,

        tau = g_0 (g_1 t_0 + (1 - g_1) t_1) + (1 - g_0) (g_2 t_2 + (1 - g_2) t_3),

    kept within [`TAU_MIN`, `TAU_MAX`]. Volumes are worked through slice by slice along array axis 0.

    Attributes:
        weight: (7, C, 5, 5) float64, four leaves, then three gates.
        bias: (7,) float64.
    """

    name: ClassVar[str] = "lts"
    translation_invariant: ClassVar[bool] = False
    preserves: ClassVar[Preserves] = "order"

    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        expect_tensor({"weight": self.weight}, "weight", (N_MAPS, None, KERNEL, KERNEL), self.name)
        expect_tensor({"bias": self.bias}, "bias", (N_MAPS,), self.name)

    @property
    def n_classes(self) -> int | None:
        return self.weight.shape[1]

    @classmethod
    def identity(cls, n_classes: int) -> Self:
        """All leaves are exactly 1, so tau is 1 whatever the gates say."""
        weight = torch.zeros(N_MAPS, n_classes, KERNEL, KERNEL, dtype=torch.float64, device="cpu")
        bias = torch.zeros(N_MAPS, dtype=torch.float64, device="cpu")
        bias[:N_LEAVES] = LEAF_BIAS_OF_ONE
        return cls(weight, bias)

    @classmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        count = N_MAPS * (KERNEL * KERNEL * n_classes + 1)
        return count, count

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        weight = expect_tensor(tensors, "weight", (N_MAPS, None, KERNEL, KERNEL), cls.name)
        return cls(weight, expect_tensor(tensors, "bias", (N_MAPS,), cls.name))

    def voxel_log_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        """Always an error: a voxel by itself has no neighbours to read a temperature from."""
        raise ParameterError(
            f"{self.name} reads a voxel's temperature off its neighbours; {logits.shape[1]} voxels by themselves have "
            "none. Use volume_probs on a (C, z, y, x) volume, or a voxel-wise method such as ts."
        )

    def volume_log_probs(self, logits: Tensor, decision: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities of a volume.

        Args:
            logits: (C, z, y, x); a 2-D image has z = 1. Not changed.
            decision: not needed, the ranking never changes.

        Returns:
            (C, z, y, x) in the dtype and on the device of `logits`; half precision is worked out in float32.
        """
        return self._by_slices(log_softmax, logits)

    def volume_probs(self, logits: Tensor, decision: Tensor | None = None) -> Tensor:
        return self._by_slices(softmax, logits)

    def _by_slices(self, normalised: Callable[[Tensor, Tensor], Tensor], logits: Tensor) -> Tensor:
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for part in self._slabs(logits):
            values = at_least_float32(logits[:, part])
            probs = normalised(values.flatten(1), self._tau(values).flatten())
            result[:, part] = probs.reshape(values.shape).to(logits.dtype)
        return result

    def temperatures(self, logits: Tensor) -> Tensor:
        """The temperature map: (C, z, y, x) logits to (z, y, x) tau, at least float32."""
        parts = [self._tau(at_least_float32(logits[:, part])) for part in self._slabs(logits)]
        return torch.cat(parts) if parts else at_least_float32(logits[0])

    def slices_at_once(self, n_classes: int, height: int, width: int) -> int:
        per_slice = (height + 2 * HALO) * (width + 2 * HALO) * (n_classes + N_MAPS)
        return max(1, VALUES_PER_CHUNK // per_slice)

    def _slabs(self, logits: Tensor) -> list[slice]:
        """Groups of slices along axis 1 (z), fixed by the shape alone."""
        n_classes, n_slices, height, width = logits.shape
        return list(chunk_slices(n_slices, self.slices_at_once(n_classes, height, width)))

    def _tau(self, values: Tensor) -> Tensor:
        if values.shape[0] != self.n_classes:
            raise ParameterError(
                f"{self.name}: fitted for {self.n_classes} classes, the volume has {values.shape[0]}; "
                "axis 0 must be the class"
            )
        features = log_softmax(values.flatten(1)).reshape(values.shape) if self.translation_invariant else values
        padded = pad_in_plane(features.transpose(0, 1))
        return tree_temperature(padded, self.weight.to(features), self.bias.to(features))


@dataclass(frozen=True, slots=True, eq=False)
class LocalTemperatureScalingTI(LocalTemperatureScaling):
    """softmax(z / tau(v; log S(Z))): tau reads canonical log-probabilities, so shifts of the logits change nothing."""

    name: ClassVar[str] = "lts_ti"
    translation_invariant: ClassVar[bool] = True


def pad_in_plane(slices: Tensor) -> Tensor:
    """Surround each slice with the halo its convolution needs: (n, C, y, x) to (n, C, y + 8, x + 8).

    Reflection about the border pixel needs at least 5 pixels in each direction; slices that are smaller in either
    repeat their border pixels instead.
    """
    mode = "reflect" if min(slices.shape[2:]) > HALO else "replicate"
    return F.pad(slices, (HALO, HALO, HALO, HALO), mode=mode)


def tree_temperature(padded: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The tree of the class docstring: (n, C, h + 8, w + 8) features with their halo to (n, h, w) temperatures."""
    if takes_loop(padded, weight, bias):
        return _by_loop(padded, weight, bias)
    maps = F.conv2d(padded, weight, bias, dilation=DILATION)
    leaves = F.softplus(maps[:, :N_LEAVES])
    gates = torch.sigmoid(maps[:, N_LEAVES:])
    # lerp(b, a, g) is g a + (1 - g) b, and exactly a where a equals b: identity does not depend on the gates.
    first = torch.lerp(leaves[:, 1], leaves[:, 0], gates[:, 1])
    second = torch.lerp(leaves[:, 3], leaves[:, 2], gates[:, 2])
    return torch.lerp(second, first, gates[:, 0]).clamp(TAU_MIN, TAU_MAX)


def _by_loop(padded: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same without gradients, compiled."""
    from segcal.compiled.temperatures import tree_temperatures  # brings numba, which only those who need it wait for

    n_slices, n_classes, height, width = padded.shape
    if n_classes != weight.shape[1]:
        raise ParameterError(f"slices of {n_classes} classes, and weights for {weight.shape[1]}")
    tau = torch.empty((n_slices, height - 2 * HALO, width - 2 * HALO), dtype=torch.float32, device="cpu")
    slices, weights, biases = (values.detach().contiguous().numpy() for values in (padded, weight, bias))
    tree_temperatures(slices, weights, biases, tau.numpy())
    return tau
