"""The contract every calibrator keeps: frozen parameters, a pure map from logits to log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.chunks import chunk_slices, chunk_voxels
from segcal.errors import ParameterError
from segcal.preserve import keep_decision
from segcal.volumes import empty_volume

Preserves: TypeAlias = Literal["order", "argmax"] | None
Array = TypeVar("Array", Tensor, NDArray[np.floating])

MOST_PARAMETER = 1e30
"""Largest parameter that may be read: its product with any logit that is read (`segcal.pooling.MOST_LOGIT`)
still fits into single precision."""


class Calibrator(ABC):
    """A fitted map from pooled logits to calibrated probabilities.

    Inside, classes come first, (C, n): every operation then runs along contiguous voxels, which is many times
    faster than along a handful of classes.

    Subclasses are frozen dataclasses whose fields are float64 tensors (or floats). They declare what they
    promise in three class variables, and the conformance suite checks the declarations.

    Attributes:
        name: the registry key, the paper's short name.
        translation_invariant: adding one constant to all logits of a voxel changes nothing.
        preserves: "order" keeps the ranking of the classes, "argmax" the winner, None neither.
        spatial: a voxel's neighbours in its slice (z) matter, so whole slices are needed.
    """

    name: ClassVar[str]
    translation_invariant: ClassVar[bool]
    preserves: ClassVar[Preserves]
    spatial: ClassVar[bool] = False

    @property
    @abstractmethod
    def n_classes(self) -> int | None:
        """Number of classes the parameters belong to; None if any number will do."""

    @classmethod
    @abstractmethod
    def identity(cls, n_classes: int) -> Self:
        """The calibrator that changes nothing: where every fit starts."""

    @classmethod
    @abstractmethod
    def parameter_counts(cls, n_classes: int) -> tuple[int, int]:
        """(optimised, identifiable) numbers of parameters, as SEG Table 2 counts them."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name, float64, as the calibrator file stores them."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `tensors`; raises ParameterError on missing names, shapes or values out of range."""

    @abstractmethod
    def voxel_log_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        """The map itself: calibrated log-probabilities of voxels.

        Args:
            logits: (C, n) float32 or float64, pooled logits or log-probabilities; not changed.
            decision: (n,) int64 reference decision.

        Returns:
            (C, n), like `logits`.
        """

    def voxel_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        """The same as probabilities; overridden where they cost less than their logarithms."""
        return self.voxel_log_probs(logits, decision).exp_()

    def log_probs(self, logits: Tensor, decision: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities of plain rows.

        Args:
            logits: (n, C), pooled logits or log-probabilities; not changed.
            decision: (n,) int64 reference decision; the argmax of `logits` when absent.

        Returns:
            (n, C) in the dtype and on the device of `logits`.
        """
        columns = at_least_float32(logits).T.contiguous()
        chosen = columns.max(0).indices if decision is None else decision
        return self.voxel_log_probs(columns, chosen).T.to(logits.dtype)

    def volume_log_probs(self, logits: Tensor, decision: Tensor | None = None) -> Tensor:
        """Log-probabilities of a volume: (C, z, y, x) logits, (z, y, x) decision, in the dtype of `logits`."""
        return _in_chunks(self.voxel_log_probs, logits, decision)

    def volume_probs(self, logits: Tensor, decision: Tensor | None = None) -> Tensor:
        """Probabilities of a volume: (C, z, y, x) logits, (z, y, x) decision, in the dtype of `logits`."""
        return _in_chunks(self.voxel_probs, logits, decision)

    def probabilities(self, logits: Array, *, class_axis: int, decision: Array | None = None) -> Array:
        """Calibrated probabilities of an array of any shape.

        The class axis is named because (C, z, y, x) and (n, C, y, x) cannot be told apart. Preserving
        calibrators keep the reference decision in the result too: rounding never flips a label.

        Args:
            logits: numpy array or torch tensor, floating point.
            class_axis: where the classes are.
            decision: reference decision, the shape of `logits` without the class axis; argmax when absent.
        """
        values = as_tensor(logits)
        check_floating(values, self)
        moved = torch.movedim(values, class_axis, 0)
        if self.n_classes not in (None, moved.shape[0]):
            raise ParameterError(
                f"{self.name}: fitted for {self.n_classes} classes, but axis {class_axis} of the array "
                f"{tuple(values.shape)} has {moved.shape[0]}; check class_axis"
            )
        chosen = moved.argmax(0) if decision is None else _checked(as_tensor(decision), moved, self.name)
        probs = self._moved_probabilities(moved, chosen)
        if self.preserves is not None:
            probs = keep_decision(probs, chosen)
        result = torch.movedim(probs, 0, class_axis)
        return result if isinstance(logits, Tensor) else cast(Array, result.numpy())

    def _moved_probabilities(self, moved: Tensor, decision: Tensor) -> Tensor:
        """(C, ...) logits to (C, ...) probabilities; spatial calibrators need exactly (C, z, y, x)."""
        if self.spatial and moved.ndim != 4:
            raise ParameterError(
                f"{self.name} looks at a voxel's neighbours: it needs a (C, z, y, x) volume, "
                f"got {moved.ndim} axes. Use a voxel-wise method for plain rows."
            )
        return self.volume_probs(moved, decision)


class SpatialCalibrator(Calibrator):
    """A calibrator that reads a voxel's neighbours in its slice."""

    spatial: ClassVar[bool] = True

    @abstractmethod
    def slices_at_once(self, n_classes: int, height: int, width: int) -> int:
        """How many slices `volume_probs` works on at a time."""


def _in_chunks(voxelwise: Callable[[Tensor, Tensor], Tensor], logits: Tensor, decision: Tensor | None) -> Tensor:
    """A map of (C, n) voxels over a volume, as many at a time as `segcal.chunks` allows."""
    flat = logits.reshape(logits.shape[0], -1)
    winners = None if decision is None else decision.reshape(-1)
    if winners is not None and len(winners) != flat.shape[1]:
        raise ParameterError(f"a decision of {len(winners)} voxels for logits of {flat.shape[1]}: expected one each")
    out = empty_volume(flat.shape, flat.dtype, flat.device)
    for part in chunk_slices(flat.shape[1], chunk_voxels(flat.shape[0])):
        exact = at_least_float32(flat[:, part])
        out[:, part] = voxelwise(exact, exact.max(0).indices if winners is None else winners[part])
    return out.reshape(logits.shape)


def as_tensor(values: Tensor | NDArray[np.generic]) -> Tensor:
    """A tensor of an array; flipped, read-only and foreign-endian arrays, which torch cannot share, are copied."""
    if isinstance(values, Tensor):
        return values
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    shareable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    return torch.as_tensor(native if shareable else native.copy())


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision is too narrow to divide logits and too coarse for near-ties; wider types stay as they are."""
    return values.to(torch.float32) if values.dtype in (torch.float16, torch.bfloat16) else values


def _checked(decision: Tensor, moved: Tensor, method: str) -> Tensor:
    """A decision that fits the (C, ...) logits, as int64 on their device."""
    n_classes, shape = moved.shape[0], tuple(moved.shape[1:])
    if tuple(decision.shape) != shape or decision.is_floating_point():
        raise ParameterError(
            f"{method}: the decision must be whole numbers of shape {shape}, the logits without their class axis; "
            f"got {decision.dtype} of shape {tuple(decision.shape)}"
        )
    chosen = decision.to(device=moved.device, dtype=torch.int64)
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < n_classes:
        raise ParameterError(
            f"{method}: the decision holds {int(chosen.min())} to {int(chosen.max())}, but class indices are "
            f"0 to {n_classes - 1}; label values must be turned into indices first"
        )
    return chosen


def check_floating(values: Tensor, calibrator: Calibrator) -> None:
    """Integers here are nearly always labels handed in by mistake."""
    if not values.is_floating_point():
        raise ParameterError(f"{calibrator.name}: logits must be floating point, got {values.dtype}")


def check_temperature(temperature: float, method: str) -> None:
    """Refuse one that is not positive, or so near to 0 that logits divided by it leave float32."""
    if not 1 / MOST_PARAMETER <= temperature <= MOST_PARAMETER:
        raise ParameterError(f"{method}: temperature must be positive, from 1e-30 to 1e30, got {temperature!r}")


def expect_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...], method: str) -> Tensor:
    """One finite float64 parameter of the given shape (None: any length but 0), or a ParameterError."""
    if name not in tensors:
        raise ParameterError(f"{method}: parameter `{name}` is missing; found {sorted(tensors) or 'none'}")
    if tensors[name].is_complex():
        raise ParameterError(f"{method}: parameter `{name}` holds complex numbers, expected real ones")
    value = tensors[name].to(torch.float64)
    wanted = [max(have, 1) if want is None else want for want, have in zip(shape, value.shape, strict=False)]
    if value.ndim != len(shape) or wanted != list(value.shape):
        raise ParameterError(f"{method}: parameter `{name}` has shape {tuple(value.shape)}, expected {shape}")
    if not bool(torch.isfinite(value).all()):
        raise ParameterError(f"{method}: parameter `{name}` holds values that are not finite")
    if value.numel() and float(value.abs().max()) > MOST_PARAMETER:
        raise ParameterError(
            f"{method}: parameter `{name}` holds values up to {float(value.abs().max()):g}, expected at most "
            f"{MOST_PARAMETER:g}; fit again"
        )
    return value
