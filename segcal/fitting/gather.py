"""One read of the cases: from files to the small samples that every method is fitted on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from segcal.case_map import CaseMap, in_process
from segcal.cases import load_case
from segcal.checks.tell_tales import TellTales
from segcal.errors import DataError
from segcal.fitting.case_sample import CaseToSample, SampleSizes, SampleWork, labelled_voxels
from segcal.fitting.condense import RowReservoir
from segcal.fitting.patches import PatchReservoir, PatchSample
from segcal.fitting.rows import Rows
from segcal.manifest import Manifest
from segcal.metrics.energy import FreeEnergy
from segcal.types import Pooling, Progress

__all__ = ["Gathered", "SampleSizes", "gather", "labelled_voxels", "stream_rows"]


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


def gather(
    manifest: Manifest,
    ids: Sequence[str],
    *,
    pooling: Pooling,
    sizes: SampleSizes,
    device: torch.device,
    progress: Progress | None = None,
    stage: str = "reading",
    case_map: CaseMap = in_process,
) -> Gathered:
    """Read every case once and condense it."""
    if not ids:
        raise DataError(f"manifest {manifest.name!r}: there is no labelled case to fit on")
    n_channels = manifest.n_classes if manifest.has_regions else 1
    n_classes = 2 if manifest.has_regions else manifest.n_classes
    rows = [RowReservoir(n_classes, sizes.seed, sizes.rows) for _ in range(n_channels if sizes.rows else 0)]
    patches = [PatchReservoir(sizes.seed, sizes.patches) for _ in range(n_channels if sizes.patches else 0)]
    energy, confidence, n_floored = FreeEnergy(), list[float](), 0
    label_counts, n_counted, noticed = [0] * manifest.n_classes, 0, TellTales()

    def to_sample() -> Iterator[CaseToSample]:
        for case_id in ids:
            yield CaseToSample(
                case_id, tuple(each.thresholds() for each in rows), tuple(each.threshold for each in patches)
            )

    with closing(case_map(SampleWork(manifest, pooling, sizes, device), to_sample())) as outcomes:
        for done, outcome in enumerate(outcomes, start=1):
            case = outcome.result()
            for mine, found in zip(rows, case.rows, strict=True):
                mine.merge(found)
            for kept, more in zip(patches, case.patches, strict=True):
                kept.merge(more)
            energy.merge(case.energy)
            confidence.append(case.confidence)
            n_floored += case.n_floored
            label_counts = [total + count for total, count in zip(label_counts, case.label_counts, strict=True)]
            n_counted += case.n_counted
            noticed.merge(case.noticed)
            if progress is not None:
                progress(stage, done, len(ids))
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
    for case_id in ids:
        case = load_case(manifest, manifest.case(case_id), pooling=pooling, device=device, with_labels=True)
        for channel, part in enumerate(labelled_voxels(case)):
            for block in part.rows():
                yield channel, block
