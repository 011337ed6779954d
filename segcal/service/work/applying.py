"""Jobs that write calibrated maps: of a manifest, or of a folder of nnU-Net outputs; then QA of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from segcal.apply import apply_calibrator
from segcal.applying.record import load_record
from segcal.applying.stored import MapFormat, StorageType
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.nnunet.postprocess import postprocess_folder
from segcal.scan_folders import find_labels
from segcal.service.requests import ApplyRequest
from segcal.service.work.context import JobFolder, WorkContext, stored_calibrator
from segcal.service.work.finishing import check_some_worked, outcome_of
from segcal.service.work.looking import look
from segcal.service.work.outcome import Outcome
from segcal.service.work.paths import check_folder, load_manifest
from segcal.service.work.rows import case_rows


@dataclass(frozen=True, slots=True)
class Written:
    """What applying left in the job's folder; the same whether it was interrupted or not.

    Attributes:
        manifest: the cases, as QA reads them.
        ids: all cases that were asked for, in order.
        failed: with the message.
        files: by case, relative to the job's folder.
        notes: what the user should know.
    """

    manifest: Manifest
    ids: tuple[str, ...]
    failed: Mapping[str, str]
    files: Mapping[str, tuple[str, ...]] = field(repr=False)
    notes: tuple[str, ...] = ()


def run_apply(request: ApplyRequest, job: JobFolder, context: WorkContext) -> Outcome:
    """Calibrate every case, list those that cannot be read, and look at the others."""
    fitted = stored_calibrator(request.calibrator, context.files)
    if request.manifest is not None:
        manifest = load_manifest(request.manifest, context.roots)
        written = apply_to_manifest(
            fitted, manifest, job, context, cases=request.cases, format=request.format, dtype=request.dtype
        )
    else:
        assert request.folder is not None
        folder = check_folder(request.folder, context.roots)
        written = apply_to_folder(fitted, folder, job, context, dtype=request.dtype)
    return look_and_finish(written, fitted, request.calibrator, job, context, qa=request.qa)


def apply_to_manifest(
    fitted: FittedCalibrator,
    manifest: Manifest,
    job: JobFolder,
    context: WorkContext,
    *,
    cases: list[str] | None = None,
    format: MapFormat = "nnunet",
    dtype: StorageType = "float32",
) -> Written:
    """Maps of the cases of a manifest; those that an interrupted attempt finished are not done again."""
    run = apply_calibrator(
        fitted,
        manifest,
        job.out,
        device=context.device,
        format=format,
        dtype=dtype,
        resume=True,
        keep_going=True,
        cases=cases,
        progress=context.progress,
        case_map=context.case_map,
    )
    ids = tuple(case.id for case in manifest.cases) if cases is None else tuple(dict.fromkeys(cases))
    files, notes = _recorded(job)
    return Written(manifest, ids, job.said_all(run.failed), files, notes)


def apply_to_folder(
    fitted: FittedCalibrator, folder: Path, job: JobFolder, context: WorkContext, *, dtype: StorageType = "float32"
) -> Written:
    """A calibrated copy of a folder of nnU-Net's, see `segcal.nnunet.postprocess`."""
    run = postprocess_folder(
        fitted,
        folder,
        job.out,
        device=context.device,
        dtype=dtype,
        resume=True,
        keep_going=True,
        progress=context.progress,
        case_map=context.case_map,
    )
    recorded, warnings = _recorded(job)
    originals = find_labels(folder)
    files = {}
    for case in run.manifest.cases:
        beside = [f"out/{case.id}.pkl", *([f"out/{originals[case.id].name}"] if case.id in originals else [])]
        files[case.id] = tuple(dict.fromkeys([*recorded.get(case.id, ()), *job.existing(*beside)]))
    # What apply noticed is in its record for all cases, in the run only for those of this attempt.
    notes = (*(text for text in run.notes if text not in run.applied.warnings), *warnings)
    return Written(run.manifest, tuple(files), job.said_all(run.failed), files, notes)


def look_and_finish(
    written: Written, fitted: FittedCalibrator, calibrator: str, job: JobFolder, context: WorkContext, *, qa: bool
) -> Outcome:
    """QA of what was written, if wanted, and the outcome of the job."""
    check_some_worked(written.ids, written.failed)
    finished = [case_id for case_id in written.ids if case_id not in written.failed]
    looked = look(written.manifest, fitted, job, context, numbered=written.ids, cases=finished) if qa else None
    rows = case_rows(written.ids, calibrator, failed=written.failed, result=looked, files=written.files)
    return outcome_of(
        rows,
        job,
        verb="calibrated",
        calibrator=calibrator,
        method=fitted.info.method,
        looked=looked,
        notes=written.notes,
    )


def _recorded(job: JobFolder) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The files of every case that are there, relative to the job's folder, and the warnings, from run.json."""
    record = load_record(job.out)
    assert record is not None
    files = {
        case_id: job.existing(*(f"out/{output.file}" for output in entry.outputs))
        for case_id, entry in record.cases.items()
        if entry.status == "done"
    }
    noticed = (f"{case_id}: {text}" for case_id, entry in sorted(record.cases.items()) for text in entry.warnings)
    return files, (*record.warnings, *noticed)
