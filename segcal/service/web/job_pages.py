"""Jobs: what waits, what runs and how far it is, what came out; a job can be cancelled or tried again here."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse

from segcal.report.wording import MEASURES, number
from segcal.service.api.answers import ResultFile
from segcal.service.api.auth import Caller, allowed
from segcal.service.api.common import Text
from segcal.service.api.context import Context
from segcal.service.api.results import REPORTS, list_results
from segcal.service.api.submission import try_again
from segcal.service.errors import UnknownError
from segcal.service.files import ServiceFiles
from segcal.service.model import FINISHED, CalibratorRecord, Job, JobKind, JobState
from segcal.service.store import Store
from segcal.service.web.render import PageRoute, address, page

PAGE_JOBS, PAGE_FILES = 50, 200
PIPELINE_COLUMNS = ("nll", "ece", "ba_ece", "ace", "dsc", "flip")

JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{24}$")]


def job_routes(store: Store, files: ServiceFiles) -> APIRouter:
    """GET /jobs and /jobs/{id}, POST /jobs/{id}/cancel and /jobs/{id}/retry."""
    routes = APIRouter(route_class=PageRoute, include_in_schema=False)

    @routes.get("/jobs")
    def jobs(
        request: Request,
        state: JobState | Literal[""] = "",
        kind: JobKind | Literal[""] = "",
        batch: Text = "",
        before: Annotated[str, Query(pattern=r"^([0-9a-f]{24})?$")] = "",
    ) -> HTMLResponse:
        found = store.jobs.page(
            state=state or None, kind=kind or None, batch=batch or None, before=before or None, limit=PAGE_JOBS
        )
        given = {"state": state, "kind": kind, "batch": batch}
        older = {**given, "before": found[-1].id} if len(found) == PAGE_JOBS else None
        return page(
            request,
            "jobs.html.j2",
            jobs=found,
            counts=store.jobs.counts(),
            given=given,
            older=None if older is None else address("/jobs", older),
            newest=address("/jobs", given) if before else None,
            now=store.now(),
            base=str(request.base_url).rstrip("/"),
        )

    @routes.get("/jobs/{job_id}")
    def job(request: Request, job_id: JobId) -> HTMLResponse:
        found = store.jobs.get(job_id)
        results = list_results(files.job(job_id)) if found.state in FINISHED else []
        return page(
            request,
            "job.html.j2",
            job=found,
            records=store.cases.of_job(job_id),
            calibrators=_calibrators(store, found),
            reports=[file.path for file in results if file.path in REPORTS],
            results=_worth_listing(results),
            n_results=len(results),
            page_files=PAGE_FILES,
            pipeline_columns=[MEASURES[name] for name in PIPELINE_COLUMNS],
            pipelines=_measured(found),
            now=store.now(),
        )

    @routes.post("/jobs/{job_id}/cancel")
    def cancel(job_id: JobId, _caller: Annotated[Caller, Depends(allowed("submit"))]) -> RedirectResponse:
        store.jobs.cancel(job_id)
        return RedirectResponse(f"/jobs/{job_id}", status_code=303)

    @routes.post("/jobs/{job_id}/retry")
    def retry(
        job_id: JobId, context: Context, _caller: Annotated[Caller, Depends(allowed("submit"))]
    ) -> RedirectResponse:
        try_again(job_id, context)
        return RedirectResponse(f"/jobs/{job_id}", status_code=303)

    return routes


def _worth_listing(results: list[ResultFile]) -> list[ResultFile]:
    """Files of the job without the layers, which every case's page has."""
    return [file for file in results if not file.path.startswith("view/")][:PAGE_FILES]


def made_by(job: Job) -> list[str]:
    """Hashes of the calibrators that a job of kind `fit` made."""
    return [each["sha256"] for each in job.result.get("calibrators") or []]


def _calibrators(store: Store, job: Job) -> list[CalibratorRecord]:
    """Those a job was asked to use, and those it made."""
    named = [job.request.get("calibrator"), *(job.request.get("calibrators") or [])]
    found = []
    for sha256 in dict.fromkeys(text for text in [*named, *made_by(job)] if text):
        try:
            found.append(store.calibrators.get(sha256))
        except UnknownError:
            continue
    return found


def _measured(job: Job) -> list[tuple[str, ...]]:
    """What an evaluation or a study measured: a row a pipeline, as `PIPELINE_COLUMNS`."""
    return [
        (str(each["name"]), *(number(each.get(name), name) for name in PIPELINE_COLUMNS))
        for each in job.result.get("pipelines") or []
    ]
