"""One read of the cases: from files to the small samples that every method is fitted on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segcal.cases import CaseData, load_case
from segcal.checks.tell_tales import TellTales
from segcal.errors import DataError
from segcal.fitting.condense import RowReservoir
from segcal.fitting.patches import PatchReservoir, PatchSample
from segcal.fitting.rows import BLOCK_ROWS, Rows
from segcal.manifest import Manifest
from segcal.metrics.energy import FreeEnergy
from segcal.regions import binary_logits
from segcal.types import IGNORED, Pooling, Progress


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


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """What is left of a set of cases after one read.

    Attributes:
        rows: by channel (one channel unless the model has regions); empty when no method asked for rows.
        patches: by channel, likewise.
        statistics: per case, in the order of the ids: what QA compares new cases with.
        n_floored: stored zeros that were raised before taking their logarithm.
        label_counts: voxels of each label index, over all cases (regions: inside each region).
        doubts: signs of broken input, a sentence each.
    """

    rows: tuple[Rows, ...]
    patches: tuple[PatchSample, ...]
    statistics: dict[str, tuple[float, ...]]
    n_floored: int
    label_counts: tuple[int, ...]
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LabelledVoxels:
    """The voxels of one channel of one case that count for fitting: labelled, not ignored, inside the crop."""

    logits: Tensor  # (C, n) float32
    labels: Tensor  # (n,) int64
    decision: Tensor  # (n,) int64
    voxels: Tensor  # (n,) int64, position in the volume

    def rows(self) -> Iterator[Rows]:
        """Unweighted rows in fixed blocks."""
        n_classes = self.logits.shape[0]
        for begin in range(0, self.labels.shape[0], BLOCK_ROWS):
            part = slice(begin, begin + BLOCK_ROWS)
            counts = torch.bincount(self.decision[part], minlength=n_classes).to(torch.float64)
            weights = torch.ones_like(self.labels[part], dtype=torch.float64)
            yield Rows(self.logits[:, part].T, self.labels[part], self.decision[part], weights, counts)


def gather(
    manifest: Manifest,
    ids: Sequence[str],
    *,
    pooling: Pooling,
    sizes: SampleSizes,
    device: torch.device,
    progress: Progress | None = None,
    stage: str = "reading",
) -> Gathered:
    """Read every case once and condense it."""
    n_channels = manifest.n_classes if manifest.has_regions else 1
    n_classes = 2 if manifest.has_regions else manifest.n_classes
    rows = [RowReservoir(n_classes, sizes.seed, sizes.rows) for _ in range(n_channels if sizes.rows else 0)]
    patches = [PatchReservoir(sizes.seed, sizes.patches) for _ in range(n_channels if sizes.patches else 0)]
    energy, confidence, n_floored = FreeEnergy(), list[float](), 0
    label_counts, n_counted, noticed = [0] * manifest.n_classes, 0, TellTales()
    for done, case in enumerate(_read(manifest, ids, pooling, device)):
        for channel, part in enumerate(labelled_voxels(case)):
            if rows:
                rows[channel].add(case.case_id, part.logits, part.labels, part.decision, part.voxels)
            _count_labels(label_counts, channel, part, regions=manifest.has_regions)
            n_counted += part.labels.numel()
        for channel, reservoir in enumerate(patches):
            reservoir.add(case.case_id, *_labelled_volume(case, channel))
        energy.update(case.case_id, case.logits, inside=case.inside)
        confidence.append(_mean_confidence(case))
        n_floored += case.n_floored
        noticed.look(case)
        if progress is not None:
            progress(stage, done + 1, len(ids))
    if n_counted == 0:
        raise DataError(
            f"{stage} of manifest {manifest.name!r}: every voxel is ignored or outside the crop ({ids[0]}, …)"
        )
    measured = energy.compute()
    return Gathered(
        rows=tuple(reservoir.sample() for reservoir in rows),
        patches=tuple(reservoir.sample() for reservoir in patches),
        statistics={
            "free_energy_mean": tuple(measured[case_id]["free_energy_mean"] for case_id in ids),
            "free_energy_std": tuple(measured[case_id]["free_energy_std"] for case_id in ids),
            "confidence_mean": tuple(confidence),
        },
        n_floored=n_floored,
        label_counts=tuple(label_counts),
        doubts=tuple(noticed.warnings()),
    )


def stream_rows(
    manifest: Manifest, ids: Sequence[str], *, pooling: Pooling, device: torch.device
) -> Iterable[tuple[int, Rows]]:
    """All labelled voxels once more, as (channel, rows) in fixed blocks: for passes over the full data."""
    for case in _read(manifest, ids, pooling, device):
        for channel, part in enumerate(labelled_voxels(case)):
            for block in part.rows():
                yield channel, block


def labelled_voxels(case: CaseData) -> Iterator[LabelledVoxels]:
    """The voxels a fit may use, channel by channel (one channel unless the model has regions)."""
    counted = _counted(case)
    voxels = torch.arange(counted.numel(), device=case.logits.device)
    chosen = None if bool(counted.all()) else counted.reshape(-1).nonzero().squeeze(1)
    if chosen is not None:
        voxels = voxels[chosen]
    for channel in range(1 if case.region_labels is None else case.region_labels.shape[0]):
        logits, labels, decision = _channel(case, channel)
        flat = logits.reshape(logits.shape[0], -1), labels.reshape(-1), decision.reshape(-1)
        if chosen is not None:
            flat = flat[0][:, chosen], flat[1][chosen], flat[2][chosen]
        yield LabelledVoxels(*flat, voxels)


def _read(manifest: Manifest, ids: Sequence[str], pooling: Pooling, device: torch.device) -> Iterator[CaseData]:
    if not ids:
        raise DataError(f"manifest {manifest.name!r}: there is no labelled case to fit on")
    for case_id in ids:
        yield load_case(manifest, manifest.case(case_id), pooling=pooling, device=device, with_labels=True)


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
    box = (slice(None),) * 3 if case.crop is None else tuple(slice(low, high) for low, high in case.crop)
    return logits[:, *box], labels.masked_fill(~_counted(case), IGNORED)[box]


def _count_labels(totals: list[int], channel: int, part: LabelledVoxels, *, regions: bool) -> None:
    counts = torch.bincount(part.labels, minlength=part.logits.shape[0]).tolist()
    if regions:
        totals[channel] += counts[1]
    else:
        totals[:] = [total + count for total, count in zip(totals, counts, strict=True)]


def _mean_confidence(case: CaseData) -> float:
    """Mean probability of the decision over the voxels the network predicted."""
    if case.region_labels is None:
        confident = (case.logits.amax(0) - torch.logsumexp(case.logits, 0)).exp_()
    else:
        confident = torch.sigmoid(case.logits.abs()).mean(0)
    if case.inside is not None:
        confident = confident[case.inside]
    return float(confident.sum(dtype=torch.float64) / max(confident.numel(), 1))
