"""Ensemble members to one set of logits, one member at a time: memory does not grow with their number.

| files hold | pooling `logits` | pooling `probabilities` |
|---|---|---|
| logits | mean of z | log of the mean softmax (regions: log-odds of the mean sigmoid) |
| probabilities | mean of log p (regions: mean log-odds) | log of the mean p (regions: log-odds of the mean p) |

METHODS: SEG 3.3. Only the inside of the crop box is computed; outside it the pooled logits are 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal.checks.value_counts import inside, n_equal
from segcal.chunks import chunk_slices, chunk_voxels
from segcal.device import takes_loop
from segcal.errors import DataError, GeometryError
from segcal.io.members import Member
from segcal.types import Box, Kind, Pooling, box_slices
from segcal.volumes import empty_volume

RANGE_TOLERANCE = 1e-3
"""How far above 1 a stored probability may lie: rounding of scaled integers and half precision."""

SUM_TOLERANCE = 1e-2
"""How far from 1 the stored probabilities of a voxel may sum: half precision with many classes."""

MOST_LOGIT = 1e7
"""Largest logit that is believed, a hundred times what half precision holds. Its product with any parameter a
calibrator may have stays within single precision, so that finite files never become maps of NaN."""

# Probabilities are summed as multiples of 2^-116: float32 then reaches down to e^-167 instead of e^-87, and sums
# of up to 2^11 members stay finite. A power of two costs no rounding.
_SCALE_BITS = 116
_SCALE = 2.0**_SCALE_BITS
_ROOT_SCALE = 2.0 ** (_SCALE_BITS // 2)


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """The ensemble's prediction for one case.

    Attributes:
        logits: (class, z, y, x) float32; log-odds per channel for region models; 0 outside the crop.
        crop: box the members predicted in, None for everything, also where a file says so with a box.
        n_floored: how many values had to be raised to keep their logarithm finite: stored probabilities below the
            smallest positive number of their type (regions: or as close to 1), mean probabilities below e^-167.
        n_fill: voxels of the first member that hold what nnU-Net pads probabilities with, in a file of logits:
            exactly (1, 0, ..., 0), or all zeros (METHODS 3).
    """

    logits: Tensor
    crop: Box | None
    n_floored: int
    n_fill: int = 0


class Pool:
    """Adds members one after the other and keeps nothing of them but the sum."""

    def __init__(self, pooling: Pooling, *, regions: bool, device: torch.device) -> None:
        self._pooling: Pooling = pooling
        self._regions = regions
        self._device = device
        self._sum: Tensor | None = None
        self._first: _Layout | None = None
        self._n_members = 0
        self._n_floored = 0
        self._n_fill = 0

    def add(self, member: Member) -> None:
        """Add one member.

        Raises:
            DataError: NaN or Inf inside the crop, or probabilities that are none.
            GeometryError: shape or crop differ from the members before.
        """
        layout = _Layout(member.values.shape, member.crop, member.kind, str(member.path))
        if self._first is None:
            self._first = layout
        self._first.check_same(layout)
        if self._sum is None:
            self._sum = self._empty(member)
        stored = torch.from_numpy(inside(member))
        floor = _Floor.of(member)
        like_probabilities = member.kind == "logits" and not self._regions
        for block in _chunks(stored.shape):
            part = stored[block].to(self._sum)
            _check_values(part, member, regions=self._regions)
            like_probabilities = like_probabilities and _like_probabilities(part)
            if self._n_members == 0 and member.kind == "logits":
                self._n_fill += _n_fill(part, regions=self._regions)
            addend = self._addend(part, member.kind, floor)
            if self._n_members == 0:
                self._sum[block] = addend
            else:
                self._sum[block] += addend
        if like_probabilities:
            raise DataError(
                f"{member.path}: declared as logits but all values lie between 0 and 1 and every voxel sums to 1, as "
                "probabilities do. Set `kind: probabilities` and store them under the key `probabilities`."
            )
        self._n_members += 1

    def result(self) -> Pooled:
        """The pooled logits. The sum is handed over, so this ends the pool."""
        if self._sum is None or self._first is None:
            raise DataError("there is no member to pool: the case lists none, or the pool was already used.")
        total, self._sum = self._sum, None
        shape, crop = self._first.shape, self._first.crop
        if crop == tuple((0, size) for size in shape[1:]):
            crop = None  # a box around everything says nothing, and volumes are worked on without copies
        if crop is None and total.shape == shape and total.dtype == torch.float32:
            logits = total  # in place: a second volume would double the memory of the case
        else:
            logits = torch.zeros(shape, dtype=torch.float32, device=self._device)
        target = logits if crop is None else logits[:, *box_slices(crop)]
        for block in _chunks(target.shape):
            finished = self._finished(total[block])
            if logits is not total or self._pooling != "logits":  # otherwise it was divided where it stands
                target[block] = finished.to(target)
        return Pooled(logits, crop, self._n_floored, self._n_fill)

    def _empty(self, member: Member) -> Tensor:
        n_classes, *space = inside(member).shape
        channels = 2 * n_classes if self._regions and self._pooling == "probabilities" else n_classes
        # Double precision files may hold what single precision cannot; Apple's MPS has no double precision.
        wide = member.values.dtype == np.float64
        device = torch.device("cpu") if wide and self._device.type == "mps" else self._device
        return empty_volume((channels, *space), torch.float64 if wide else torch.float32, device)

    def _addend(self, part: Tensor, kind: Kind, floor: _Floor) -> Tensor:
        """What one member adds to the sum, (class, z, y, x); twice the channels (p, 1-p) for regions by probability."""
        if kind == "logits":
            if self._pooling == "logits":
                return part
            # exp(x/2)^2 reaches twice as far down as exp(x) and, unlike exp(x + 80), loses no digits near p = 1.
            if self._regions:
                log_p = torch.cat([logsigmoid(part), logsigmoid(-part)])
                return log_p.mul_(0.5).exp_().mul_(_ROOT_SCALE).square_()
            root = (part - part.amax(dim=0)).mul_(0.5).exp_()
            total = root[0].square()
            for channel in root[1:]:  # one after the other: `sum` adds in another order at the ends of a piece
                total += channel.square()
            return root.mul_(_ROOT_SCALE).square_().div_(total)
        p = self._raised(part, floor.p)
        if not self._regions:
            return _log(p, floor.p) if self._pooling == "logits" else p.mul_(_SCALE)
        complement = self._raised(1 - part, floor.complement)
        if self._pooling == "logits":
            return _log(p, floor.p) - complement.log_()
        return torch.cat([p, complement]).mul_(_SCALE)

    def _raised(self, values: Tensor, floor: float) -> Tensor:
        # Stored values are 0 or at least `floor`; half of it also rounds to 0 on devices without subnormal numbers.
        self._n_floored += int((values <= floor / 2).sum())
        return values.clamp(min=floor)

    def _finished(self, total: Tensor) -> Tensor:
        if self._pooling == "logits":
            return total.div_(self._n_members)
        log_mean = self._log_mean(total)
        if not self._regions:
            return log_mean
        n = total.shape[0] // 2
        return log_mean[:n] - log_mean[n:]

    def _log_mean(self, total: Tensor) -> Tensor:
        """log(total / (2^116 M)), exact to rounding both near p = 1 and far below the smallest float."""
        smallest = torch.finfo(total.dtype).tiny
        mean = total.mul(1 / _SCALE).div_(self._n_members)
        tiny = mean <= smallest
        log_mean = mean.log_()
        if bool(tiny.any()):
            far = total[tiny]
            self._n_floored += int((far < smallest).sum())
            offset = _SCALE_BITS * math.log(2) + math.log(self._n_members)
            log_mean[tiny] = far.clamp(min=smallest).log() - offset
        return log_mean


def pooled_decision(logits: Tensor, *, regions: bool, dtype: torch.dtype = torch.int64) -> Tensor:
    """What pooled logits decide: (z, y, x) class index, first index on ties; regions: (R, z, y, x) log-odds > 0.

    Args:
        logits: (class or region, z, y, x).
        regions: whether channels are regions.
        dtype: of class indices; int64 takes 71 MB at BraTS size, bytes 9.
    """
    if regions:
        return logits > 0
    flat = logits.reshape(logits.shape[0], -1)
    largest = _largest_by_loop if takes_loop(flat) else _largest
    return largest(flat, dtype).reshape(logits.shape[1:])


def _largest_by_loop(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as `_largest` by one compiled loop, but for NaN, which `Pool.add` refuses."""
    from segcal.compiled.flat_rows import flat_rows  # brings numba, which only those who need it wait for
    from segcal.compiled.winners import find_largest

    # One type for everybody: the loop is compiled, and kept for later runs, once.
    narrow = torch.uint8 if flat.shape[0] <= 256 else torch.int64
    largest = empty_volume(flat.shape[1:], narrow, flat.device)
    find_largest(*flat_rows(flat), flat.shape[0], largest.numpy())
    return largest.to(dtype)


def _largest(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """The first largest class of (C, n), in pieces: indices of a whole volume are large."""
    largest = empty_volume(flat.shape[1:], dtype, flat.device)
    for part in chunk_slices(flat.shape[1], chunk_voxels(flat.shape[0])):
        # `max` also gives the first index on ties and is four times faster than `argmax` across channels.
        largest[part] = flat[:, part].max(dim=0).indices
    return largest


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all members of a case have in common."""

    shape: tuple[int, ...]
    crop: Box | None
    kind: Kind
    path: str

    def check_same(self, other: _Layout) -> None:
        if self.shape != other.shape:
            raise GeometryError(
                f"{other.path}: shape {other.shape} (class, z, y, x) differs from {self.shape} of {self.path}; "
                "the members of a case must be predictions of the same image by models with the same classes."
            )
        if self.crop != other.crop:
            raise GeometryError(
                f"{other.path}: crop {other.crop} differs from {self.crop} of {self.path}; the members of a case must "
                "have been predicted in the same box. Predict them with the same preprocessing."
            )
        if self.kind != other.kind:
            raise DataError(
                f"{other.path}: holds {other.kind} but {self.path} holds {self.kind}; they cannot be pooled."
            )


@dataclass(frozen=True, slots=True)
class _Floor:
    """Smallest positive p and smallest positive 1 - p that the stored type of a member can say."""

    p: float
    complement: float

    @classmethod
    def of(cls, member: Member) -> _Floor:
        if member.step is not None:
            return cls(member.step, member.step)
        info = np.finfo(member.values.dtype)
        return cls(float(info.smallest_subnormal), float(info.epsneg))


def _log(p: Tensor, floor: float) -> Tensor:
    # The bound matters only where a device takes subnormal numbers for 0.
    return p.log_().clamp_(min=math.log(floor))


def _chunks(shape: torch.Size | tuple[int, ...]) -> Iterator[tuple[slice, slice, slice]]:
    """Blocks (class, z, y) of as many voxels as the budget allows that cover the volume, in order."""
    n_classes, depth, height, width = shape
    n_voxels = chunk_voxels(n_classes)
    planes = max(1, n_voxels // (height * width))
    rows = max(1, min(height, n_voxels // width))
    for z in range(0, depth, planes):
        for y in range(0, height, rows):
            yield slice(None), slice(z, z + planes), slice(y, y + rows)


def _n_fill(part: Tensor, *, regions: bool) -> int:
    n_zero = n_equal(part, torch.zeros(part.shape[0], device=part.device))
    return n_zero if regions else n_zero + n_equal(part, torch.eye(part.shape[0], device=part.device)[0])


def _like_probabilities(part: Tensor) -> bool:
    """Whether every voxel sums to 1 with all values in [0, 1]; the first voxel nearly always answers no."""
    if not abs(float(part[:, 0, 0, 0].sum()) - 1) <= RANGE_TOLERANCE:
        return False
    low, high = (float(bound) for bound in part.aminmax())
    return low >= 0 and high <= 1 and float((part.sum(dim=0) - 1).abs().max()) <= RANGE_TOLERANCE


def _check_values(part: Tensor, member: Member, *, regions: bool) -> None:
    low, high = (float(bound) for bound in part.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        values = inside(member)
        n_bad = values.size - int(np.isfinite(values).sum())
        raise DataError(
            f"{member.path}: {n_bad:,} of {values.size:,} values where the network predicted are NaN or Inf. "
            "Predict this case again; a network that diverged in training writes such files without an error."
        )
    if member.kind == "logits":
        if max(-low, high) > MOST_LOGIT:
            raise DataError(
                f"{member.path}: holds logits from {low:.4g} to {high:.4g}, expected at most {MOST_LOGIT:g} in either "
                "direction. A network that diverged in training writes such files; train it again, or leave it out."
            )
        return
    if low < -RANGE_TOLERANCE or high > 1 + RANGE_TOLERANCE:
        raise DataError(
            f"{member.path}: declared as probabilities but holds values from {low:.4g} to {high:.4g}, expected 0 to 1. "
            "If the file holds logits, declare `kind: logits`."
        )
    if regions:
        return
    off = float((part.sum(dim=0) - 1).abs().max())
    if off > SUM_TOLERANCE:
        raise DataError(
            f"{member.path}: the probabilities of a voxel sum to 1 ± {off:.3g}, expected 1. A region-based model needs "
            "`regions` in the manifest; zeros around the predicted part need a `crop`."
        )
