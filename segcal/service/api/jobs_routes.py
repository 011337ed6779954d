"""Jobs: submit, look at, follow, cancel, try again, and their results."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Body, Query, Request, Response

from segcal.service.api.answers import CountsAnswer, JobAnswer, JobsAnswer, ResultsAnswer
from segcal.service.api.common import JobId, Key, Limit, Submitter, Text, everywhere
from segcal.service.api.context import ApiContext, Context
from segcal.service.api.downloads import file_answer, file_route
from segcal.service.api.events import EVENT_SCHEMA, JobEvents
from segcal.service.api.examples import SUBMISSIONS
from segcal.service.api.problems import BUSY, KEY_USED, NOT_FOUND, NOT_YET, PAUSED, QUEUE_FULL, ProblemError
from segcal.service.api.results import REPORTS, list_results, result_path
from segcal.service.api.submission import submit_job, try_again
from segcal.service.model import FINISHED, Job, JobKind, JobState
from segcal.service.requests import Submittable

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_LOCATION = {"Location": {"description": "Address of the job.", "schema": {"type": "string"}}}


@router.post(
    "",
    status_code=202,
    summary="Submit a job",
    responses={
        202: {"description": "The job waits, or has begun.", "headers": _LOCATION},
        **everywhere(NOT_FOUND, KEY_USED, QUEUE_FULL, PAUSED),
    },
)
def submit(
    body: Annotated[Submittable, Body(openapi_examples=SUBMISSIONS)],
    context: Context,
    caller: Submitter,
    response: Response,
    key: Key,
) -> JobAnswer:
    """Paths have to lie below the folders the service was given with --root, and so does all that a manifest names."""
    job = submit_job(body, context, submitted_by=caller.name, key=key)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobAnswer.of(job)


@router.get("", summary="List jobs, newest first", responses=everywhere())
def jobs(
    context: Context,
    state: JobState | None = None,
    kind: JobKind | None = None,
    batch: Text | None = None,
    before: Annotated[str | None, Query(pattern=r"^[0-9a-f]{24}$", description="`next` of the page before.")] = None,
    limit: Limit = 50,
) -> JobsAnswer:
    """Pages by key: what is submitted meanwhile shifts nothing."""
    found = context.store.jobs.page(state=state, kind=kind, batch=batch, before=before, limit=limit)
    following = found[-1].id if len(found) == limit else None
    return JobsAnswer(jobs=[JobAnswer.of(job) for job in found], next=following)


@router.get("/counts", summary="How many jobs are in each state", responses=everywhere())
def counts(context: Context) -> CountsAnswer:
    """Fast, however many there are."""
    return CountsAnswer(**context.store.jobs.counts())


@router.get("/{job_id}", summary="Look at a job", responses=everywhere(NOT_FOUND))
def job(job_id: JobId, context: Context) -> JobAnswer:
    """State, progress, and what became of it."""
    return JobAnswer.of(context.store.jobs.get(job_id))


@router.post("/{job_id}/cancel", summary="Cancel a job", responses=everywhere(NOT_FOUND))
def cancel(job_id: JobId, context: Context, caller: Submitter) -> JobAnswer:
    """A waiting job is cancelled at once, a running one within seconds; a finished one stays as it is."""
    return JobAnswer.of(context.store.jobs.cancel(job_id))


@router.post(
    "/{job_id}/retry",
    status_code=202,
    summary="Try a job again",
    responses={202: {"description": "The job waits again."}, **everywhere(NOT_FOUND, NOT_YET, QUEUE_FULL, PAUSED)},
)
def retry(job_id: JobId, context: Context, caller: Submitter) -> JobAnswer:
    """One that failed or was cancelled, after its cause was mended. It stays the same job and goes on with its files.

    Files it reads are taken as they are now. Only a watched output must be the one that was found: a new prediction
    gets a job of its own.
    """
    return JobAnswer.of(try_again(job_id, context))


@router.get(
    "/{job_id}/events",
    summary="Follow a job",
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: `job` with the job as JSON on every change, `end` when it is finished.",
            "content": {"text/event-stream": {"schema": EVENT_SCHEMA}},
        },
        **everywhere(NOT_FOUND, BUSY),
    },
)
async def events(job_id: JobId, context: Context) -> Response:
    """Ends with the job, after an hour, or when you leave."""
    found = await to_thread.run_sync(context.store.jobs.get, job_id)
    context.streams.take()
    return JobEvents(context, JobAnswer.of(found))


@router.get("/{job_id}/results", summary="List the files of a job", responses=everywhere(NOT_FOUND, NOT_YET))
def results(job_id: JobId, context: Context) -> ResultsAnswer:
    """Once the job is finished; a failed or cancelled one may have left some, too."""
    found = _finished(context, job_id)
    return ResultsAnswer(job=found.id, state=found.state, files=list_results(context.files.job(found.id)))


@file_route(router, "/{job_id}/results/{path:path}", NOT_FOUND, NOT_YET, summary="Download a file of a job")
def result(job_id: JobId, path: str, context: Context, request: Request) -> Response:
    """In ranges if asked to. HTML is saved, not shown, unless it is a report of segcal, which is shown in a sandbox."""
    found = _finished(context, job_id)
    return file_answer(request, result_path(context.files.job(found.id), path), report=path in REPORTS)


def _finished(context: ApiContext, job_id: str) -> Job:
    found = context.store.jobs.get(job_id)
    if found.state not in FINISHED:
        raise ProblemError(NOT_YET, f"job {job_id} is {found.state}; its results are there when it is finished")
    return found
