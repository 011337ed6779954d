"""One case in a fit: which of its voxels count, and the small sample that is left of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.case_map import ReadAhead
from segcal.cases import CaseData, load_case
from segcal.checks.tell_tales import TellTales
from segcal.fitting.condense import RowReservoir
from segcal.fitting.patches import PatchReservoir
from segcal.fitting.rows import BLOCK_ROWS, Rows
from segcal.fitting.voxel_pass import PassSums
from segcal.manifest import Manifest
from segcal.metrics.energy import FreeEnergy, mean_confidence
from segcal.regions import binary_logits
from segcal.threads import one_thread
from segcal.types import IGNORED, Pooling, box_slices


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """How much of the data is kept.

    Attributes:
        rows: weighted voxels per channel for the voxel-wise methods; 0 keeps none.
        patches: weighted patches per channel for local temperature scaling; 0 keeps none.
        seed: decides which.
    """

    rows: int
    patches: int
    seed: int


class CaseToSample(NamedTuple):
    """A case, and what the sample of the cases before it would drop anyway: by channel, of rows and of patches.

    The bounds only save traffic. They never fall, so the sample of all cases is the same whatever they are.
    """

    case_id: str
    row_floors: tuple[tuple[float, ...], ...]
    patch_floors: tuple[float, ...]

    def __str__(self) -> str:
        return self.case_id


@dataclass(frozen=True, slots=True, eq=False)
class CaseSample:
    """What is left of one case; see `Gathered` for what becomes of it."""

    rows: tuple[RowReservoir, ...]
    patches: tuple[PatchReservoir, ...]
    energy: FreeEnergy
    confidence: float
    n_floored: int
    label_counts: tuple[int, ...]
    n_counted: int
    noticed: TellTales


@dataclass(frozen=True)
class SampleWork(ReadAhead[CaseToSample, CaseData, CaseSample]):
    """From a case to its sample: what `segcal.case_map` runs."""

    manifest: Manifest
    pooling: Pooling
    sizes: SampleSizes
    device: torch.device

    def read(self, item: CaseToSample) -> CaseData:
        case = self.manifest.case(item.case_id)
        return load_case(self.manifest, case, pooling=self.pooling, device=self.device, with_labels=True)

    @one_thread()
    def finish(self, item: CaseToSample, data: CaseData) -> CaseSample:
        manifest, sizes, case = self.manifest, self.sizes, data
        n_classes = 2 if manifest.has_regions else manifest.n_classes
        rows = tuple(RowReservoir(n_classes, sizes.seed, sizes.rows, floors) for floors in item.row_floors)
        patches = tuple(PatchReservoir(sizes.seed, sizes.patches, floor=floor) for floor in item.patch_floors)
        label_counts, n_counted, sums = [0] * manifest.n_classes, 0, list[PassSums]()
        for channel, part in enumerate(labelled_voxels(case)):
            if rows:
                sums.append(rows[channel].add(case.case_id, part.logits, part.labels, part.decision, part.voxels))
            _count_labels(label_counts, channel, part, regions=manifest.has_regions)
            n_counted += part.labels.numel()
        for channel, reservoir in enumerate(patches):
            reservoir.add(case.case_id, *_labelled_volume(case, channel))
        energy, confidence = _statistics(case, sums, regions=manifest.has_regions)
        noticed = TellTales()
        noticed.look(case)
        return CaseSample(rows, patches, energy, confidence, case.n_floored, tuple(label_counts), n_counted, noticed)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledVoxels:
    """The voxels of one channel of one case that count for fitting: labelled, not ignored, inside the crop."""

    logits: Tensor  # (C, n) float32
    labels: Tensor  # (n,) int64
    decision: Tensor  # (n,) int64
    voxels: Tensor | None  # (n,) int64, position in the volume; None for all of it

    def rows(self) -> Iterator[Rows]:
        """Unweighted rows in fixed blocks."""
        n_classes = self.logits.shape[0]
        for begin in range(0, self.labels.shape[0], BLOCK_ROWS):
            part = slice(begin, begin + BLOCK_ROWS)
            counts = torch.bincount(self.decision[part], minlength=n_classes).to(torch.float64)
            weights = torch.ones_like(self.labels[part], dtype=torch.float64)
            yield Rows(self.logits[:, part].T, self.labels[part], self.decision[part], weights, counts)


def labelled_voxels(case: CaseData) -> Iterator[LabelledVoxels]:
    """The voxels a fit may use, channel by channel (one channel unless the model has regions)."""
    everything = case.valid is None and case.inside is None
    chosen = None if everything else _counted(case).reshape(-1).nonzero().squeeze(1)
    for channel in range(1 if case.region_labels is None else case.region_labels.shape[0]):
        logits, labels, decision = _channel(case, channel)
        flat = logits.reshape(logits.shape[0], -1), labels.reshape(-1), decision.reshape(-1)
        if chosen is not None:
            flat = flat[0][:, chosen], flat[1][chosen], flat[2][chosen]
        yield LabelledVoxels(*flat, chosen)


def _channel(case: CaseData, channel: int) -> tuple[Tensor, Tensor, Tensor]:
    """(C, z, y, x) logits, (z, y, x) labels and decision of one channel."""
    if case.region_labels is None:
        assert case.labels is not None
        return case.logits, case.labels, case.decision
    labels, decision = case.region_labels[channel], case.decision[channel]
    return binary_logits(case.logits[channel]), labels.to(torch.int64), decision.to(torch.int64)


def _counted(case: CaseData) -> Tensor:
    """(z, y, x) bool: labelled and inside the crop."""
    counted = torch.ones(case.logits.shape[1:], dtype=torch.bool, device=case.logits.device)
    for mask in (case.valid, case.inside):
        if mask is not None:
            counted &= mask
    return counted


def _labelled_volume(case: CaseData, channel: int) -> tuple[Tensor, Tensor]:
    """Logits and labels of the crop: no neighbour may see the fill outside it."""
    logits, labels, _ = _channel(case, channel)
    box = (slice(None),) * 3 if case.crop is None else box_slices(case.crop)
    return logits[:, *box], labels.masked_fill(~_counted(case), IGNORED)[box]


def _statistics(case: CaseData, sums: Sequence[PassSums], *, regions: bool) -> tuple[FreeEnergy, float]:
    """Free energy and mean confidence of all voxels the network predicted."""
    if sums and not regions and case.valid is None:  # then these are the voxels that count for the fit
        n_voxels = max(sums[0].energy.count, 1)
        return FreeEnergy({case.case_id: sums[0].energy}), sums[0].confidence / n_voxels
    energy = FreeEnergy()
    energy.update(case.case_id, case.logits, inside=case.inside)
    return energy, mean_confidence(case.logits, regions=regions, inside=case.inside)


def _count_labels(totals: list[int], channel: int, part: LabelledVoxels, *, regions: bool) -> None:
    counts = torch.bincount(part.labels, minlength=part.logits.shape[0]).tolist()
    if regions:
        totals[channel] += counts[1]
    else:
        totals[:] = [total + count for total, count in zip(totals, counts, strict=True)]
