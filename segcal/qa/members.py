"""How far the members of an ensemble agree, gathered while they are read for pooling: one read, one count per voxel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.io.members import Member
from segcal.metrics.base import Score, Undefined
from segcal.qa.boundary import NO_BOUNDARY
from segcal.types import box_slices

ONE_MEMBER = Undefined("there is one member only")
NEVER_PREDICTED = Undefined("no member segments the class")

_CHUNK_VALUES = 2**21


@dataclass(frozen=True, slots=True)
class VolumeSpread:
    """Expected volumes of one class by the members on their own, in voxels; not calibrated.

    Their spread is what the ensemble says about the uncertainty of the volume. The variance of a sum of independent
    voxels would be smaller by orders of magnitude, because the errors of neighbouring voxels go together.
    """

    by_member: tuple[float, ...]

    @property
    def low(self) -> float:
        return min(self.by_member)

    @property
    def high(self) -> float:
        return max(self.by_member)

    @property
    def std(self) -> Score:
        """Sample standard deviation (M - 1)."""
        return ONE_MEMBER if len(self.by_member) < 2 else float(np.std(self.by_member, ddof=1))

    @property
    def variation(self) -> Score:
        """Standard deviation over mean."""
        mean, std = sum(self.by_member) / len(self.by_member), self.std
        return std if isinstance(std, Undefined) else (std / mean if mean > 0 else NEVER_PREDICTED)


class MemberTally:
    """Counts, for every voxel and class, the members that decide for it, and sums up each member's volumes.

    Memory is one small integer per voxel and class, whatever the number of members. Give `add` to
    `load_poolings(on_member=...)`.
    """

    def __init__(self, *, regions: bool) -> None:
        self._regions = regions
        self._votes: NDArray[np.int16] | None = None
        self._volumes: list[tuple[float, ...]] = []

    @property
    def n_members(self) -> int:
        """Members counted so far."""
        return len(self._volumes)

    def add(self, position: int, member: Member) -> None:
        """Count one member; its values outside the crop are background (no region)."""
        assert position == len(self._volumes)
        values = member.values
        first = 0 if self._regions else 1
        if self._votes is None:
            self._votes = np.zeros((values.shape[0] - first, *values.shape[1:]), dtype=np.int16)
        box = [slice(0, n) for n in values.shape[1:]] if member.crop is None else box_slices(member.crop)
        planes = max(1, _CHUNK_VALUES // (values.shape[0] * values.shape[2] * values.shape[3]))
        totals = np.zeros(len(self._votes))
        for start in range(box[0].start, box[0].stop, planes):
            part = (slice(start, min(start + planes, box[0].stop)), box[1], box[2])
            probs, votes = self._decided(torch.from_numpy(values[:, *part]).to(torch.float32), member.kind)
            totals += probs[first:].sum(dim=(1, 2, 3), dtype=torch.float64).numpy()
            self._votes[:, *part] += votes.numpy()
        self._volumes.append(tuple(totals.tolist()))

    def volume_spreads(self) -> tuple[VolumeSpread, ...]:
        """For each foreground class or region."""
        return tuple(VolumeSpread(by_member) for by_member in zip(*self._volumes, strict=True))

    def dice(self) -> tuple[Score, ...]:
        """Agreement of the members on each class: pairwise Dice, pooled over all pairs of members.

        Of the n(v) members that give voxel v to the class: sum n(n-1) / ((M-1) sum n), which is the sum of 2|A∩B|
        over all pairs divided by the sum of |A|+|B|.
        """
        n_members = len(self._volumes)
        assert self._votes is not None
        if n_members < 2:
            return (ONE_MEMBER,) * len(self._votes)
        scores: list[Score] = []
        for votes in self._votes:
            # Few values occur, so counting each keeps the sums exact.
            voxels = np.bincount(votes.reshape(-1), minlength=n_members + 1)
            n = np.arange(n_members + 1)
            total = int(voxels @ n)
            scores.append(int(voxels @ (n * (n - 1))) / ((n_members - 1) * total) if total else NEVER_PREDICTED)
        return tuple(scores)

    def disagreement(self, zone: NDArray[np.bool_] | None) -> Score:
        """Chance that two different members decide differently at a voxel, mean over a zone (and over regions).

        1 - sum_c n_c (n_c - 1) / (M (M - 1)) with n_c members for class c, the background among them; every region
        is a decision of its own with "outside" as its other class.
        """
        assert self._votes is not None
        if self.n_members < 2:
            return ONE_MEMBER
        if zone is None or not zone.any():
            return NO_BOUNDARY
        return float(self._differing(self._votes[:, zone]).mean())

    def disagreement_map(self, planes: slice) -> Tensor:
        """The same for every voxel of some planes, (z, y, x) float64, mean over regions; needs two members."""
        assert self._votes is not None
        assert self.n_members > 1
        differing = self._differing(self._votes[:, planes])
        return differing.mean(0) if self._regions else differing

    def _differing(self, votes: NDArray[np.int16]) -> Tensor:
        """From votes (K, ...) to the chance that two members differ: (...), for regions (K, ...)."""
        n_members, counts = self.n_members, torch.from_numpy(votes).to(torch.float64)
        if self._regions:
            same = _pairs(counts) + _pairs(n_members - counts)
        else:
            same = _pairs(counts).sum(0) + _pairs(n_members - counts.sum(0))
        return 1.0 - same / (n_members * (n_members - 1))

    def _decided(self, values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Probabilities (class, ...) and votes (foreground, ...) int16 of one member's stored values."""
        if self._regions:
            return (
                (torch.sigmoid(values), (values > 0).short()) if kind == "logits" else (values, (values > 0.5).short())
            )
        decision = values.max(0).indices
        votes = torch.stack([decision == c for c in range(1, values.shape[0])]).short()
        return (torch.softmax(values, 0) if kind == "logits" else values), votes


def _pairs(n: Tensor) -> Tensor:
    return n * (n - 1)
