"""Applying a calibrator: every case of a manifest to calibrated maps and a segmentation on disk.

`segcal.applying.work` says what is done for one case; here is what the run as a whole keeps: run.json, and what is
left to do. Nothing is kept of a finished case, so memory is bounded by two cases whatever their number.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import nibabel
import numpy
import torch

import segcal
from segcal.applying.inputs import input_files, input_fingerprints
from segcal.applying.possible_files import possible_files
from segcal.applying.record import SUBFOLDERS, ApplySettings, CaseEntry, Recipe, RunRecord, open_record
from segcal.applying.record_pace import RecordPace
from segcal.applying.stored import MapFormat, StorageType, check_storage
from segcal.applying.work import ApplyWork, CaseToApply
from segcal.case_map import CaseMap, in_process
from segcal.checks.tell_tales import TellTales
from segcal.device import resolve_device
from segcal.errors import Interrupted, OutputError, SegcalError
from segcal.fitted import FittedCalibrator
from segcal.io.atomic import remove_unfinished
from segcal.io.own_files import PAGE_FILE
from segcal.manifest import Manifest, ManifestCase
from segcal.types import AppliedPooling, Progress


@dataclass
class ApplyRun:
    """What a run did, by case id.

    Attributes:
        out: The folder with the files and run.json.
        done: Cases written by this run.
        redone: Those of them that an earlier run had finished, with what has changed since.
        skipped: Cases an earlier run had finished from the same.
        failed: Cases that could not be done, with the message; only with `keep_going`.
        n_floored: Stored probabilities of exactly 0 (and the like) that were raised to have a logarithm.
        differing: With members-probabilities: voxels by case where the map does not say the segmentation's class.
        warnings: What the user should know about the match of calibrator and data.
    """

    out: Path
    done: list[str] = field(default_factory=list)
    redone: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    n_floored: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def apply_calibrator(
    fitted: FittedCalibrator,
    manifest: Manifest,
    out: Path,
    *,
    device: torch.device | str = "auto",
    format: MapFormat = "nnunet",
    dtype: StorageType = "float32",
    pooling: AppliedPooling | None = None,
    resume: bool = False,
    keep_going: bool = False,
    confidence: bool = False,
    entropy: bool = False,
    force: bool = False,
    cases: Sequence[str] | None = None,
    progress: Progress | None = None,
    case_map: CaseMap = in_process,
) -> ApplyRun:
    """Write calibrated probabilities and the segmentation of every case; see `segcal.applying.files` for the layout.

    The maps of order- and argmax-preserving methods hold the pooled decision at every voxel, in the file, at every
    dtype. Outside a case's crop the background is certain (regions: absent). Files appear whole or not at all, and
    run.json names a case only after its files are finished.

    Args:
        device: Where voxels are processed.
        format: nnU-Net's `.npz`, or NIfTI with the case's true affine.
        dtype: float32; float16 (nnunet only); uint16 in steps of 1/65535 with scl_slope (nifti only).
        pooling: How members are pooled; that of the calibrator when absent. `members-probabilities` calibrates each
            member and averages then; the segmentation stays the decision of the pooled members, and voxels where
            the averaged map says otherwise are counted. Any other pooling than the calibrator's is refused.
        resume: Continue the run in `out`: skip cases whose inputs, calibrator, settings and files are unchanged.
        keep_going: Note a case that cannot be done and go on with the next; a full disk still ends the run.
        confidence, entropy: Also write these maps.
        force: Apply in spite of a mismatch that can be overridden.
        cases: Ids to apply to; all when absent.
        case_map: Where the cases are worked on; here, one after the other, by default.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; what was finished so far is in run.json.
    """
    check_storage(format, dtype)
    pooling = pooling or fitted.info.pooling
    warnings = tuple(fitted.check_compatible(manifest, pooling, force=force))
    chosen = manifest.cases if cases is None else tuple(manifest.case(case_id) for case_id in dict.fromkeys(cases))
    settings = ApplySettings(
        format=format,
        dtype=dtype,
        confidence=confidence,
        entropy=entropy,
        kind=manifest.kind,
        pooling=pooling,
        axes=manifest.axes,
        label_values=manifest.regions_class_order or tuple(range(manifest.n_classes)),
    )
    record = open_record(
        out,
        _fresh_record(fitted, manifest, settings, warnings),
        resume=resume,
        chosen={case.id for case in chosen},
        inputs=input_files(manifest, chosen),
        targets=(name for case in chosen for name in possible_files(case.id)),
    )
    job = _Job(manifest, out, record, settings, resumed=bool(record.cases))
    # Absolute, because whoever works on a case may have been started in another folder.
    work = ApplyWork(fitted, manifest, out.absolute(), settings, resolve_device(device))
    run = ApplyRun(out, warnings=warnings)
    try:
        with job.pace.saved_at_the_end(record, out):
            _run_cases(job, run, work, chosen, keep_going, progress, case_map)
    except KeyboardInterrupt:
        finished = len(run.done) + len(job.standing)
        raise Interrupted(
            f"{finished} of {len(chosen)} cases are finished in {out}; run the same command with --resume to go on"
        ) from None
    # What a worker that was killed left half-written; its cases were done again elsewhere.
    remove_unfinished(out, SUBFOLDERS)
    # Of all its cases: one that an earlier run left failed may not be among those chosen now.
    record.complete = all(entry.status == "done" for entry in record.cases.values())
    record.save(out)
    return run


@dataclass(frozen=True, slots=True)
class _Job:
    """The run's side of applying: what is worked on, and what run.json says about it."""

    manifest: Manifest
    out: Path
    record: RunRecord
    settings: ApplySettings
    resumed: bool
    before: dict[str, CaseEntry] = field(default_factory=dict)
    standing: set[str] = field(default_factory=set)
    changed: dict[str, str] = field(default_factory=dict)
    pace: RecordPace = field(default_factory=RecordPace)

    def to_do(self, cases: Sequence[ManifestCase]) -> Iterator[CaseToApply]:
        """Cases in order, without those whose files are there already: they are noted in `standing`."""
        for case in cases:
            entry = self.record.cases.get(case.id)
            if entry is None:
                self._remove_page()
                yield CaseToApply(case.id)
                continue
            self.before[case.id] = entry
            if self._stands(case, entry):
                self.standing.add(case.id)
                continue
            self._remove_page()
            # From here on the files may be of either run, so the old entry no longer describes them.
            del self.record.cases[case.id]
            self.record.save(self.out)
            yield CaseToApply(case.id, tuple(output.file for output in entry.outputs))

    def _stands(self, case: ManifestCase, entry: CaseEntry) -> bool:
        try:
            recipe = Recipe(
                calibrator_sha256=self.record.calibrator_sha256,
                settings=self.settings,
                inputs=input_fingerprints(self.manifest, case),
            )
        except SegcalError:
            self.changed[case.id] = "input files"
            return False  # whoever reads the case says what is wrong with it
        self.changed[case.id] = entry.differs_from(recipe)
        return entry.stands_for(recipe, self.out)

    def _remove_page(self) -> None:
        """The page of an earlier run shows what is about to change; in a new folder such a file is not ours."""
        if self.resumed:
            (self.out / PAGE_FILE).unlink(missing_ok=True)

    def failed(self, case_id: str, error: SegcalError) -> None:
        """Put the case into run.json with the message and what an earlier run left of it."""
        before = self.before.get(case_id)
        left = () if before is None else before.outputs
        self.record.cases[case_id] = CaseEntry(status="failed", error=str(error), outputs=left)
        self.record.save(self.out)


def _run_cases(
    job: _Job,
    run: ApplyRun,
    work: ApplyWork,
    cases: Sequence[ManifestCase],
    keep_going: bool,
    progress: Progress | None,
    case_map: CaseMap,
) -> None:
    noticed, told = TellTales(), -1

    def report() -> None:
        nonlocal told
        done = len(run.done) + len(run.failed) + len(job.standing)
        if progress is not None and done != told:
            progress("apply", done, len(cases))
        told = done

    report()
    with closing(case_map(work, job.to_do(cases))) as outcomes:
        for outcome in outcomes:
            case_id = outcome.item.case_id
            try:
                applied = outcome.result()
            except OutputError:
                raise
            except SegcalError as error:
                job.failed(case_id, error)
                if not keep_going:
                    raise
                run.failed[case_id] = str(error)
                report()
                continue
            # Only now are all files of the case finished.
            job.record.cases[case_id] = applied.entry
            job.pace.save(job.record, job.out)
            noticed.merge(applied.noticed)
            run.done.append(case_id)
            run.n_floored += applied.entry.n_floored
            if work.settings.pooling == "members-probabilities":
                run.differing[case_id] = applied.entry.n_differing
            before = job.before.get(case_id)
            if before is not None and before.status == "done":
                run.redone[case_id] = job.changed[case_id]
            report()
    run.skipped = [case.id for case in cases if case.id in job.standing]
    run.warnings = (*run.warnings, *noticed.warnings())
    report()


def _fresh_record(
    fitted: FittedCalibrator, manifest: Manifest, settings: ApplySettings, warnings: tuple[str, ...]
) -> RunRecord:
    versions = {
        "segcal": segcal.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "nibabel": nibabel.__version__,
    }
    return RunRecord(
        calibrator_sha256=fitted.sha256,
        method=fitted.info.method,
        manifest_name=manifest.name,
        manifest_sha256=manifest.sha256,
        settings=settings,
        versions=versions,
        warnings=warnings,
    )
