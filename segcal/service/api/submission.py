"""From a request to a job in the store: everything that can be refused at once is refused here, not hours later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from segcal.errors import MissingFileError
from segcal.service.api.context import ApiContext
from segcal.service.api.problems import INVALID, ProblemError
from segcal.service.errors import QueueFullError
from segcal.service.model import CalibratorRecord, Job, SubmissionKey
from segcal.service.requests import JobRequest, read_request
from segcal.service.store import same_job
from segcal.service.work.paths import load_manifest


def submit_job(request: JobRequest, context: ApiContext, *, submitted_by: str, key: SubmissionKey | None) -> Job:
    """Check what a request names and put it into the queue; one that was submitted before is its job, whatever is now.

    Raises:
        KeyReusedError: its key was used for another request.
        IntakePausedError, QueueFullError: not now.
        RefusedPathError: it names, or its manifest names, what the service may not read.
        UnknownError: there is no such calibrator.
        SegcalError: a manifest that cannot be read.
    """
    if key is not None and (known := context.store.jobs.by_key(key)) is not None:
        return same_job(known, request, key)
    context.check_intake()
    check_room(context)
    for sha256 in _calibrators(request):
        usable_calibrator(context, sha256)
    manifest, folder = (getattr(request, name, None) for name in ("manifest", "folder"))
    if folder is not None and not context.roots.allow(folder).is_dir():
        raise MissingFileError(f"{folder}: no such folder")
    name = Path(folder).name if folder is not None else ""
    if manifest is not None:
        name = _check_manifest(manifest, context)
    return context.store.jobs.submit(
        request,
        batch=request.batch or name,
        submitted_by=submitted_by,
        queue_limit=context.settings.limits.queued_jobs,
        key=key,
    )


def try_again(job_id: str, context: ApiContext) -> Job:
    """Put a job that failed or was cancelled back into the queue, under the conditions of a new one.

    What it reads is not looked at here: a job is tried again when something outside of it was mended, and its worker
    checks every path and file as at the first time.

    Raises:
        UnknownError: there is no such job, or no more such a calibrator.
        WrongStateError: it waits, runs or is done.
        IntakePausedError, QueueFullError: not now.
    """
    job = context.store.jobs.get(job_id)
    context.check_intake()
    for sha256 in _calibrators(read_request(job.request)):
        usable_calibrator(context, sha256)
    return context.store.jobs.try_again(job_id, queue_limit=context.settings.limits.queued_jobs)


def check_room(context: ApiContext) -> None:
    """Raise QueueFullError early, before something large is read; `submit` itself makes sure."""
    limit = context.settings.limits.queued_jobs
    if context.store.jobs.counts()["queued"] >= limit:
        raise QueueFullError(f"{limit:,} jobs are waiting, which is the limit; submit again later")


def usable_calibrator(context: ApiContext, sha256: str) -> CalibratorRecord:
    """A calibrator that is known and not retired."""
    record = context.store.calibrators.get(sha256)
    if record.retired is not None:
        raise ProblemError(INVALID, f"calibrator {record.name!r} ({sha256[:12]}…) was retired; choose another one")
    return record


def _calibrators(request: JobRequest) -> Iterator[str]:
    if (one := getattr(request, "calibrator", None)) is not None:
        yield one
    yield from getattr(request, "calibrators", ())


def _check_manifest(path: str, context: ApiContext) -> str:
    """Load it and check every path in it; gives the name of its dataset."""
    if not context.roots.allow(path).is_file():  # a pipe would keep us waiting
        raise MissingFileError(f"{path}: no such manifest")
    return load_manifest(path, context.roots).name
