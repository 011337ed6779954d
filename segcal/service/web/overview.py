"""The first page: what came in on the last days, which cases to look at first, and whether something drifts."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from segcal.qa.settings import QaSettings
from segcal.service.api.common import Text
from segcal.service.model import CaseRecord
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store
from segcal.service.web.render import PageRoute, page
from segcal.service.web.trend import trend_charts

N_DAYS, N_WORST, N_BATCHES = 7, 12, 40
"""Days the worst cases are looked for in, cases shown of them, batches listed."""


def overview_routes(settings: ServiceSettings, store: Store, limits: QaSettings) -> APIRouter:
    """GET /."""
    routes = APIRouter(route_class=PageRoute, include_in_schema=False)

    @routes.get("/")
    def overview(request: Request, calibrator: Text = "", batch: Text = "") -> HTMLResponse:
        days = store.cases.days(N_BATCHES)
        points = store.cases.trend(calibrator=calibrator or None, batch=batch or None)
        chosen = [each for each in days if not batch or each.batch == batch]
        last_days = list(dict.fromkeys(each.day for each in chosen))[:N_DAYS]
        return page(
            request,
            "overview.html.j2",
            days=chosen,
            batches=sorted({each.batch for each in days}),
            calibrators=store.calibrators.list(),
            calibrator=calibrator,
            batch=batch,
            last_days=last_days,
            worst=_worst(store, last_days, calibrator or None, batch or None),
            charts=trend_charts(points, limits),
            n_points=len(points),
            limits=limits,
            counts=store.jobs.counts(),
            base=str(request.base_url).rstrip("/"),
            tokens_required=settings.tokens_required,
        )

    return routes


def _worst(store: Store, days: list[str], calibrator: str | None, batch: str | None) -> list[CaseRecord]:
    """The worst cases of some days together, only such as are flagged or failed."""
    found = [
        record
        for day in days
        for record in store.cases.page(day=day, calibrator=calibrator, batch=batch, sort="worst", limit=N_WORST)
        if record.case.n_flags or record.case.status == "failed"
    ]
    return sorted(found, key=_rank)[:N_WORST]


def _rank(record: CaseRecord) -> tuple[bool, int, float, int]:
    """Failed ones first, then most flags, then lowest expected DSC (none at all before any), then the latest."""
    case = record.case
    score = -1.0 if case.expected_dsc is None else case.expected_dsc
    return case.status != "failed", -case.n_flags, score, -record.key
