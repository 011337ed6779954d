"""An uploaded case becomes a job: the file first, in the job's own folder, then the row that makes it known."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from segcal.service.api.case_check import check_case_archive
from segcal.service.api.context import ApiContext
from segcal.service.api.submission import usable_calibrator
from segcal.service.errors import UnknownError, UploadError
from segcal.service.files import ServiceFiles, flush_folder
from segcal.service.model import Job, SubmissionKey, new_id
from segcal.service.requests import CaseRequest
from segcal.service.store import Store

_PENDING = ".pending"


def submit_upload(
    path: Path, request: CaseRequest, context: ApiContext, *, submitted_by: str, key: SubmissionKey | None
) -> Job:
    """Check the archive at `path`, move it into a new job's folder and put the job into the queue.

    A server killed on the way leaves a note behind by which `remove_lost` finds the folder.
    """
    calibrator = usable_calibrator(context, request.calibrator)
    try:
        check_case_archive(path, calibrator, context.settings.limits.unpacked_bytes)
    except ValueError as error:
        raise UploadError(str(error).replace(str(path), "the upload")) from None
    job_id = new_id()
    folder, note = context.files.job(job_id), context.files.uploads / f"{job_id}{_PENDING}"
    note.touch()
    try:
        (folder / "in").mkdir(parents=True)
        path.replace(folder / "in" / f"{request.case}.npz")
        for place in (folder / "in", folder, folder.parent):
            flush_folder(place)
        job = context.store.jobs.submit(
            request,
            batch=request.batch or "uploads",
            submitted_by=submitted_by,
            queue_limit=context.settings.limits.queued_jobs,
            key=key,
            job_id=job_id,
        )
        if job.id != job_id:  # the key was used before: the job that exists has its own file
            shutil.rmtree(folder)
    except BaseException:
        # If the store does not answer, this raises too, and `remove_lost` looks at the folder another day.
        if _is_unknown(context.store, job_id):
            shutil.rmtree(folder, ignore_errors=True)
            note.unlink(missing_ok=True)
        raise
    note.unlink(missing_ok=True)
    return job


def remove_lost(files: ServiceFiles, store: Store, older_than_s: float) -> None:
    """Delete folders of uploads whose job never came to be, because the server was killed in between."""
    for note in files.uploads.glob(f"*{_PENDING}"):
        try:
            if time.time() - note.stat().st_mtime <= older_than_s:
                continue
        except FileNotFoundError:
            continue
        job_id = note.name.removesuffix(_PENDING)
        if _is_unknown(store, job_id):
            shutil.rmtree(files.job(job_id), ignore_errors=True)
        note.unlink(missing_ok=True)


def _is_unknown(store: Store, job_id: str) -> bool:
    try:
        store.jobs.get(job_id)
    except UnknownError:
        return True
    return False
