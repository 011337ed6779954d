"""What a fit asks of every voxel of a case, in one pass: how much it matters, its losses, its free energy.

On the CPU one compiled loop does it (`segcal.compiled.scores`, where the formulas are), elsewhere torch. Both compute
in float64 and agree to about 1e-15 a voxel; the random number of a voxel is the same bit for bit, so both keep the same
rows unless two priorities lie closer than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.device import takes_loop
from segcal.errors import DataError
from segcal.fitting.hashing import stream_of, voxel_uniforms
from segcal.metrics.energy import Moments

SCORE_FLOOR = 2e-3
"""Lowest score: bounds the weight of a certain voxel at a few hundred times that of a doubtful one."""


class Noted(NamedTuple):
    """Voxels worth keeping: where they are among those of the pass, and why."""

    where: Tensor  # (k,) int64, ascending
    priority: Tensor  # (k,) float64, score / u with u uniform
    score: Tensor  # (k,) float64, see `TorchPass`


@dataclass(frozen=True, slots=True)
class PassSums:
    """What is left of all voxels of a pass.

    Attributes:
        control: summed NLL of softmax(z / T) for each T of `segcal.fitting.rows.CONTROL_TEMPERATURES`.
        counts: voxels by decision.
        energy: moments of the free energy.
        confidence: summed largest probability.
    """

    control: tuple[float, float]
    counts: tuple[int, ...]
    energy: Moments
    confidence: float


@dataclass(eq=False)
class VoxelPass(ABC):
    """One pass over voxels of a case, block by block.

    Attributes:
        seed, case_id: choose the random numbers.
        logits: (C, n) float32, pooled.
        labels: (n,) int64 in [0, C).
        decision: (n,) int64 in [0, C).
        voxels: (n,) int64 position of each in its volume; None where that is its index.
    """

    seed: int
    case_id: str
    logits: Tensor
    labels: Tensor
    decision: Tensor
    voxels: Tensor | None

    @abstractmethod
    def block(self, begin: int, end: int, thresholds: tuple[float, ...]) -> Noted:
        """Go over the voxels from `begin` to `end`; note those with a priority above the threshold of their class."""

    @abstractmethod
    def sums(self) -> PassSums:
        """Of all blocks so far."""


def voxel_pass(
    seed: int, case_id: str, logits: Tensor, labels: Tensor, decision: Tensor, voxels: Tensor | None
) -> VoxelPass:
    """The pass for the device the voxels are on."""
    kind = CompiledPass if takes_loop(logits) else TorchPass
    return kind(seed, case_id, logits, labels, decision, voxels)


@dataclass(eq=False)
class CompiledPass(VoxelPass):
    """The compiled loop. Its sums do not depend on the size of blocks."""

    def __post_init__(self) -> None:
        from segcal.compiled.scores import N_SUMS

        n_classes = self.logits.shape[0]
        self._values = self.logits.contiguous().numpy()
        self._labels, self._decision = self.labels.contiguous().numpy(), self.decision.contiguous().numpy()
        self._voxels = np.empty(0, dtype=np.int64) if self.voxels is None else self.voxels.contiguous().numpy()
        self._stream = np.uint64(stream_of(self.seed, self.case_id))
        self._sums, self._counts = np.zeros(N_SUMS), np.zeros(n_classes, dtype=np.int64)

    def block(self, begin: int, end: int, thresholds: tuple[float, ...]) -> Noted:
        from segcal.compiled.scores import score_voxels

        index, noted = np.empty(end - begin, dtype=np.int64), np.empty((2, end - begin))
        found = score_voxels(
            self._values,
            self._labels,
            self._decision,
            self._voxels,
            begin,
            end,
            self._stream,
            SCORE_FLOOR,
            np.asarray(thresholds),
            self._sums,
            self._counts,
            index,
            noted[0],
            noted[1],
        )
        if found < 0:
            raise ValueError(f"{self.case_id}: labels and decision must be from 0 to {self.logits.shape[0] - 1}")
        device = self.labels.device
        priority, score = torch.from_numpy(noted[:, :found]).to(device)
        return Noted(torch.from_numpy(index[:found]).to(device), priority, score)

    def sums(self) -> PassSums:
        nll_1, nll_2, confidence, count, mean, squares = self._sums.tolist()
        energy = _finite(self.case_id, Moments(int(count), mean, squares), confidence)
        return PassSums((nll_1, nll_2), tuple(self._counts.tolist()), energy, confidence)


@dataclass(eq=False)
class TorchPass(VoxelPass):
    """The same in torch operations, for other devices.

    The score is the distance of softmax(z / 2) from the label, a stand-in for the length of the voxel's gradient. The
    label makes the score: a confidently wrong voxel matters most, and a score of the confidence alone would thin it out
    with its confidently right neighbours. Tempered because networks are over-confident.
    """

    def __post_init__(self) -> None:
        self._control, self._counts = [0.0, 0.0], torch.zeros(self.logits.shape[0], dtype=torch.int64, device="cpu")
        self._energy, self._confidence = Moments(), 0.0

    def block(self, begin: int, end: int, thresholds: tuple[float, ...]) -> Noted:
        part = slice(begin, end)
        decision, picked = self.decision[part], self.labels[part].unsqueeze(0)
        half = self.logits[:, part].to(torch.float64)
        top = half.amax(0)
        half = half.sub_(top).mul_(0.5)
        own_half, e = half.gather(0, picked).squeeze(0), half.exp()
        own = e.gather(0, picked).squeeze(0)
        e.scatter_(0, picked, 0.0)
        others, squares = e.sum(0), e.square_().sum(0)
        total, total_squares = others + own, squares + own.square()
        score = (squares + others.square()).sqrt_().div_(total).add_(SCORE_FLOOR)
        self._add(top, total_squares, total.log_() - own_half, total_squares.log() - 2.0 * own_half)
        self._counts += decision.bincount(minlength=len(self._counts)).cpu()
        places = torch.arange(begin, end, device=decision.device)
        voxels = places if self.voxels is None else self.voxels[part]
        priority = score / voxel_uniforms(self.seed, self.case_id, voxels)
        bounds = torch.tensor(thresholds, dtype=torch.float64, device=priority.device)
        noted = (priority > bounds[decision]).nonzero().squeeze(1)
        return Noted(places[noted], priority[noted], score[noted])

    def sums(self) -> PassSums:
        energy = _finite(self.case_id, self._energy, self._confidence)
        return PassSums((self._control[0], self._control[1]), tuple(self._counts.tolist()), energy, self._confidence)

    def _add(self, top: Tensor, total_squares: Tensor, loss_2: Tensor, loss_1: Tensor) -> None:
        self._control = [self._control[0] + float(loss_1.sum()), self._control[1] + float(loss_2.sum())]
        self._confidence += float(total_squares.reciprocal().sum())
        energy = total_squares.log_().add_(top)
        mean = float(energy.mean())
        self._energy = self._energy + Moments(energy.numel(), mean, float((energy - mean).square_().sum()))


def _finite(case_id: str, energy: Moments, confidence: float) -> Moments:
    # A NaN always reaches the confidence; the compiled energy may lose it.
    if not (np.isfinite(energy.mean) and np.isfinite(confidence)):
        raise DataError(f"{case_id}: the logits hold NaN or infinity where the network predicted")
    return energy
