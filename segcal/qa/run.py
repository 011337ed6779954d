"""QA of a batch: one case in memory at a time, worst cases first in the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from segcal.case_map import CaseMap, in_process
from segcal.device import resolve_device
from segcal.errors import OutputError, SegcalError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.qa.applied import AppliedFolder
from segcal.qa.case import QaMaps, measure
from segcal.qa.ensemble import Ensemble
from segcal.qa.flags import case_flags
from segcal.qa.pictures import QaSlice, cut_slice, draw_slice
from segcal.qa.results import FlaggedCase, QaResult
from segcal.qa.settings import QaSettings, load_qa_settings
from segcal.qa.sources import Source
from segcal.threads import one_thread
from segcal.types import Progress

Keep: TypeAlias = Callable[[QaMaps, FlaggedCase], Any]
"""Sees the maps of a case while they are in memory; picklable, and what it returns is picklable and small."""


def run_qa(
    source: Path | Manifest,
    *,
    calibrator: FittedCalibrator | None = None,
    images: Path | None = None,
    settings: QaSettings | None = None,
    cases: Sequence[str] | None = None,
    force: bool = False,
    device: torch.device | str = "auto",
    progress: Progress | None = None,
    case_map: CaseMap = in_process,
    keep: Keep | None = None,
) -> QaResult:
    """Look at a batch of cases without ground truth.

    A case that cannot be read is listed under `failed` and does not end the run.

    Args:
        source: A folder written by `segcal apply`, or a manifest of members (a Manifest, or its file).
        calibrator: Needed for a manifest. For a folder it gives the class names and must be the one that wrote it.
        images: For a folder: where the images lie, for the pictures.
        settings: Thresholds; the shipped ones when absent.
        cases: Ids to look at; all when absent.
        force: For a manifest: apply in spite of a mismatch that can be overridden.
        device: Where voxels are processed.
        case_map: Where the cases are worked on; here, one after the other, by default.
        keep: Called with the maps and the numbers of every case, where the case is worked on; what it returns is in
            the result. A file that it cannot write ends the run.
    """
    settings = settings or load_qa_settings()
    on_device = resolve_device(device, sums=True)
    opened = _open(source, calibrator, images, cases, force, on_device, keep_case=keep is not None)
    done: list[FlaggedCase] = []
    failed: dict[str, str] = {}
    slices: dict[str, QaSlice] = {}
    kept: dict[str, Any] = {}
    if progress is not None:
        progress("qa", 0, len(opened.ids))
    with closing(case_map(_Look(opened, settings, keep), opened.ids)) as outcomes:
        for position, outcome in enumerate(outcomes, start=1):
            if progress is not None:
                progress("qa", position, len(opened.ids))
            try:
                flagged, part, kept[outcome.item] = outcome.result()
            except OutputError:
                raise
            except (SegcalError, OSError) as error:
                failed[outcome.item] = str(error)
                continue
            done.append(flagged)
            if part is not None:
                slices[outcome.item] = part
                slices = _worst(slices, done, settings.max_pictures)
    pictures = {case_id: draw_slice(part, opened.names, case_id=case_id) for case_id, part in slices.items()}
    return QaResult(
        describe=opened.describe,
        names=opened.names,
        settings=settings,
        cases=tuple(sorted(done, key=lambda each: each.rank)),
        failed=failed,
        pictures=pictures,
        warnings=opened.warnings,
        kept=kept,
    )


def _open(
    source: Path | Manifest,
    calibrator: FittedCalibrator | None,
    images: Path | None,
    cases: Sequence[str] | None,
    force: bool,
    device: torch.device,
    *,
    keep_case: bool,
) -> Source:
    if isinstance(source, Path) and source.suffix.lower() not in (".yaml", ".yml"):
        return AppliedFolder(source, fitted=calibrator, images=images, cases=cases, device=device)
    name = source if isinstance(source, Path) else source.name
    if calibrator is None:
        raise UsageError(
            f"{name}: QA of a manifest needs --calibrator; what uncalibrated probabilities expect is far too good. "
            "Or give a folder written by `segcal apply`."
        )
    if images is not None:
        raise UsageError("--images belongs to a folder of applied results; a manifest names its images itself")
    manifest = Manifest.load(source) if isinstance(source, Path) else source
    return Ensemble(manifest, calibrator, cases=cases, force=force, device=device, keep_case=keep_case)


@dataclass(frozen=True, slots=True)
class _Look:
    """From the id of a case to its numbers, a slice to show if it is flagged, and what `keep` makes of it."""

    source: Source
    settings: QaSettings
    keep: Keep | None = None

    def __call__(self, case_id: str) -> tuple[FlaggedCase, QaSlice | None, Any]:
        with one_thread():  # its sums are those of a worker, whatever the threads of this process
            maps = self.source.load(case_id)
            case = measure(maps, self.source.names, self.settings, self.source.reference)
        flagged = FlaggedCase(case, case_flags(case, self.settings))
        wanted = bool(flagged.flags) and self.settings.max_pictures > 0
        part = cut_slice(maps) if wanted else None
        return flagged, part, None if self.keep is None else self.keep(maps, flagged)


def _worst(slices: dict[str, QaSlice], done: Sequence[FlaggedCase], n: int) -> dict[str, QaSlice]:
    """Only the slices of the n worst cases so far, so that memory does not grow with the batch."""
    if len(slices) <= n:
        return slices
    ranks = {each.case.case_id: each.rank for each in done if each.case.case_id in slices}
    kept = sorted(slices, key=ranks.__getitem__)[:n]
    return {case_id: slices[case_id] for case_id in kept}
