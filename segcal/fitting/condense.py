"""One pass over the voxels to a small weighted sample that fits like all of them.

Most voxels are certain background and say next to nothing about calibration. Each voxel gets a score, roughly
the length of its gradient; priority sampling (Duffield, Lund & Thorup 2007) keeps the rows with the largest
score / u, u uniform, so that sums weighted by 1 / P(kept) are unbiased. The priorities are a pure function of
(seed, case, voxel): the sample does not depend on the order of the cases, on batches or on workers, and two
reservoirs merge by keeping the largest again. Every predicted class has a reservoir of its own, so a rare
class keeps all it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from segcal.fitting.rows import Rows
from segcal.fitting.voxel_pass import Noted, PassSums, VoxelPass, voxel_pass

DEFAULT_ROWS = 120_000
"""Size of the whole sample, shared by the predicted classes; docs/adr/0002 has the measurements."""
MIN_ROWS_PER_CLASS = 4_000
BLOCK_VOXELS = 1 << 16
"""Voxels between two looks at the thresholds. torch's sums are rounded block by block, so it is fixed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Rows of one predicted class with the largest priorities so far."""

    priority: Tensor  # (k,) float64
    score: Tensor  # (k,) float64
    logits: Tensor  # (k, C) float32
    label: Tensor  # (k,) int64
    case: Tensor  # (k,) int64, position in the reservoir's list of cases
    voxel: Tensor  # (k,) int64, position in the case's volume

    def take(self, index: Tensor) -> _Kept:
        return _Kept(*(getattr(self, name)[index] for name in self.__slots__))

    def join(self, other: _Kept) -> _Kept:
        return _Kept(*(torch.cat([getattr(self, name), getattr(other, name)]) for name in self.__slots__))


@dataclass
class RowReservoir:
    """Collects a weighted sample of labelled voxels, case by case.

    Attributes:
        n_classes: C.
        seed: of the sample.
        max_rows: rows kept over all predicted classes (each has at least `MIN_ROWS_PER_CLASS`).
        floors: `thresholds` of the reservoir this one will be merged into; rows it would drop are not collected.
    """

    n_classes: int
    seed: int = 0
    max_rows: int = DEFAULT_ROWS
    floors: tuple[float, ...] = ()
    _cases: list[str] = field(default_factory=list)
    _kept: dict[int, _Kept] = field(default_factory=dict)
    _counts: list[int] = field(default_factory=list)
    _control: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = [0] * self.n_classes

    @property
    def rows_per_class(self) -> int:
        return max(self.max_rows // self.n_classes, MIN_ROWS_PER_CLASS)

    def thresholds(self) -> tuple[float, ...]:
        """By predicted class the priority a further row has to exceed: never falls, and is 0 while there is room."""
        lowest = list(self.floors) or [0.0] * self.n_classes
        for expert, kept in self._kept.items():
            if kept.priority.shape[0] > self.rows_per_class:
                lowest[expert] = max(lowest[expert], float(kept.priority.min()))
        return tuple(lowest)

    def add(
        self, case_id: str, logits: Tensor, labels: Tensor, decision: Tensor, voxels: Tensor | None = None
    ) -> PassSums:
        """Offer the voxels of one case.

        Args:
            case_id: must not have been added before.
            logits: (C, n) float32, pooled.
            labels: (n,) int64 in [0, C).
            decision: (n,) int64.
            voxels: (n,) int64, position of each in its volume: with the case, its identity; None for 0 to n - 1.

        Returns:
            Sums over all these voxels, which fall out of the same exponentials.
        """
        if case_id in self._control:
            raise ValueError(f"case {case_id} was added twice")
        self._cases.append(case_id)
        work = voxel_pass(self.seed, case_id, logits, labels, decision, voxels)
        for begin in range(0, labels.shape[0], BLOCK_VOXELS):
            self._take(work.block(begin, min(begin + BLOCK_VOXELS, labels.shape[0]), self.thresholds()), work)
        for expert in self._kept:
            self._compact(expert)
        sums = work.sums()
        self._control[case_id] = list(sums.control)
        self._counts = [a + b for a, b in zip(self._counts, sums.counts, strict=True)]
        return sums

    def merge(self, other: RowReservoir) -> None:
        """Take in what another worker collected from other cases."""
        if twice := self._control.keys() & other._control.keys():
            raise ValueError(f"case {min(twice)} was added twice")
        offset = len(self._cases)
        self._cases.extend(other._cases)
        self._control.update(other._control)
        for expert, kept in other._kept.items():
            self._push(expert, replace(kept, case=kept.case + offset))
            self._compact(expert)
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]

    def sample(self) -> Rows:
        """The weighted rows, in the order of case names and voxels, on the CPU."""
        rank = torch.tensor(_ranks(self._cases), dtype=torch.int64, device="cpu")
        parts = []
        for expert in sorted(self._kept):
            kept, weights = self._weighted(expert)
            order = torch.argsort(kept.voxel, stable=True)
            order = order[torch.argsort(rank[kept.case[order]], stable=True)]
            parts.append((expert, kept.take(order), weights[order]))
        counts = torch.tensor(self._counts, dtype=torch.float64, device="cpu")
        if not parts:
            empty = torch.zeros(0, dtype=torch.int64, device="cpu")
            return Rows(torch.zeros(0, self.n_classes, device="cpu"), empty, empty, empty.double(), counts)
        totals = zip(*(self._control[case] for case in sorted(self._control)), strict=True)
        return Rows(
            torch.cat([kept.logits for _, kept, _ in parts]),
            torch.cat([kept.label for _, kept, _ in parts]),
            torch.cat([torch.full_like(kept.label, expert) for expert, kept, _ in parts]),
            torch.cat([weights for _, _, weights in parts]),
            counts,
            tuple(sum(total) / max(sum(self._counts), 1) for total in totals),
        )

    def _take(self, noted: Noted, work: VoxelPass) -> None:
        """Keep the best of the voxels that a block has noted."""
        deciders = work.decision[noted.where]
        for expert in deciders.unique().tolist():
            of_expert = (deciders == expert).nonzero().squeeze(1)
            n_best = min(len(of_expert), self.rows_per_class + 1)
            best = of_expert[torch.topk(noted.priority[of_expert], n_best, sorted=False).indices]
            chosen = noted.where[best]
            self._push(
                expert,
                _Kept(
                    noted.priority[best].cpu(),
                    noted.score[best].cpu(),
                    work.logits[:, chosen].T.float().cpu(),
                    work.labels[chosen].cpu(),
                    torch.full((len(chosen),), len(self._cases) - 1, dtype=torch.int64, device="cpu"),
                    (chosen if work.voxels is None else work.voxels[chosen]).cpu(),
                ),
            )

    def _push(self, expert: int, rows: _Kept) -> None:
        held = self._kept.get(expert)
        self._kept[expert] = rows if held is None else held.join(rows)
        if self._kept[expert].priority.shape[0] > 4 * self.rows_per_class:
            self._compact(expert)

    def _compact(self, expert: int) -> None:
        """Keep one row more than the sample needs: the last one's priority is the threshold."""
        kept = self._kept[expert]
        if kept.priority.shape[0] > self.rows_per_class + 1:
            self._kept[expert] = kept.take(torch.topk(kept.priority, self.rows_per_class + 1, sorted=False).indices)

    def _weighted(self, expert: int) -> tuple[_Kept, Tensor]:
        kept = self._kept[expert]
        if kept.priority.shape[0] <= self.rows_per_class:
            return kept, torch.ones_like(kept.score)
        best = torch.topk(kept.priority, self.rows_per_class + 1).indices
        threshold = kept.priority[best[-1]]
        sampled = kept.take(best[:-1])
        return sampled, (threshold / sampled.score).clamp(min=1.0)


def _ranks(names: list[str]) -> list[int]:
    position = {name: rank for rank, name in enumerate(sorted(names))}
    return [position[name] for name in names]
