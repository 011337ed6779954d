"""Calibrators: what each was fitted on, what it warns of, where it is in use; two of them side by side."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse

from segcal.service.api.auth import Caller, allowed
from segcal.service.model import CaseRecord, Job
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store
from segcal.service.web.calibrator_facts import (
    calibrator_facts,
    case_facts,
    compared,
    n_reference_cases,
    shared_cases,
)
from segcal.service.web.job_pages import made_by
from segcal.service.web.render import PageRoute, page

MOST_JOBS = 200
"""Evaluations and fits that are searched for reports of a calibrator."""

MOST_CASES = 500
"""The last cases of a calibrator that are summed up."""

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
Sha256Query = Annotated[str, Query(pattern=r"^([0-9a-f]{64})?$")]


def calibrator_routes(settings: ServiceSettings, store: Store) -> APIRouter:
    """GET /calibrators, /calibrators/compare and /calibrators/{sha256}, POST /calibrators/{sha256}/retire."""
    routes = APIRouter(route_class=PageRoute, include_in_schema=False)

    @routes.get("/calibrators")
    def calibrators(request: Request) -> HTMLResponse:
        records = store.calibrators.list()
        return page(
            request,
            "calibrators.html.j2",
            records=records,
            uses={record.sha256: store.calibrators.n_cases(record.sha256) for record in records},
            fitted_on={record.sha256: n_reference_cases(record.info) for record in records},
            base=str(request.base_url).rstrip("/"),
            tokens_required=settings.tokens_required,
        )

    @routes.get("/calibrators/compare")
    def compare(request: Request, a: Sha256Query = "", b: Sha256Query = "") -> HTMLResponse:
        pair = [store.calibrators.get(sha256) for sha256 in (a, b) if sha256]
        values: dict[str, Any] = {}
        if len(pair) == 2:
            cases = [_last_cases(store, each.sha256) for each in pair]
            shared = shared_cases(*cases)
            values = {
                "facts": compared(*(calibrator_facts(each) for each in pair)),
                "uses": compared(*(case_facts(each) for each in cases)),
                "shared": compared(*(case_facts(each) for each in shared)) if shared[0] else [],
                "n_shared": len(shared[0]),
                "n_cases": [len(each) for each in cases],
                "warnings": [list(each.info.get("warnings") or []) for each in pair],
            }
        return page(
            request,
            "compare.html.j2",
            records=store.calibrators.list(),
            a=a,
            b=b,
            pair=pair if values else None,
            **values,
        )

    @routes.get("/calibrators/{sha256}")
    def calibrator(request: Request, sha256: Sha256) -> HTMLResponse:
        record = store.calibrators.get(sha256)
        return page(
            request,
            "calibrator.html.j2",
            record=record,
            facts=calibrator_facts(record),
            n_cases=store.calibrators.n_cases(sha256),
            uses=case_facts(_last_cases(store, sha256)),
            most_cases=MOST_CASES,
            warnings=list(record.info.get("warnings") or []),
            batches=store.calibrators.batches(sha256),
            watched=[str(each.folder) for each in settings.watch if each.calibrator == sha256],
            reports=_reports(store, sha256),
            others=[each for each in store.calibrators.list() if each.sha256 != sha256],
        )

    @routes.post("/calibrators/{sha256}/retire")
    def retire(sha256: Sha256, _caller: Annotated[Caller, Depends(allowed("admin"))]) -> RedirectResponse:
        store.calibrators.retire(sha256)
        return RedirectResponse(f"/calibrators/{sha256}", status_code=303)

    return routes


def _last_cases(store: Store, sha256: str) -> list[CaseRecord]:
    return store.cases.page(calibrator=sha256, status="ok", sort="newest", limit=MOST_CASES)


def _reports(store: Store, sha256: str) -> list[Job]:
    """Finished evaluations and studies that measured it, and the fit that made it, the latest first."""
    found = [
        job
        for kind in ("evaluate", "fit")
        for job in store.jobs.page(state="done", kind=kind, limit=MOST_JOBS)
        if sha256 in (job.request.get("calibrators") or []) or sha256 in made_by(job)
    ]
    return sorted(found, key=lambda job: job.id, reverse=True)
