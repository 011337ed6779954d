"""Calibrators: what each was fitted on, what it warns of, where it is in use; two of them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse

from segcal.report.wording import DASH, count
from segcal.service.api.auth import Caller, allowed
from segcal.service.model import CalibratorRecord, Job
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store, TrendPoint
from segcal.service.web.job_pages import made_by
from segcal.service.web.reliability import pooled_errors
from segcal.service.web.render import PageRoute, page
from segcal.service.web.wording import moment, percent, setting, signed

MOST_JOBS = 200
"""Evaluations and fits that are searched for reports of a calibrator."""

MOST_CASES = 500
"""The last cases of a calibrator that are summed up."""

_KEEPS = {"order": "the order of all classes", "argmax": "the winning class"}

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
Sha256Query = Annotated[str, Query(pattern=r"^([0-9a-f]{64})?$")]


@dataclass(frozen=True, slots=True)
class Pair:
    """A fact about two calibrators."""

    name: str
    one: str
    other: str

    @property
    def differs(self) -> bool:
        return self.one != self.other


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
        records = store.calibrators.list()
        pair = [store.calibrators.get(sha256) for sha256 in (a, b) if sha256]
        both = len(pair) == 2
        return page(
            request,
            "compare.html.j2",
            records=records,
            a=a,
            b=b,
            pair=pair if both else None,
            facts=_compared([dict(calibrator_facts(each)) for each in pair]) if both else [],
            uses=_compared([dict(_use_facts(store, each)) for each in pair]) if both else [],
            warnings=[list(each.info.get("warnings") or []) for each in pair],
        )

    @routes.get("/calibrators/{sha256}")
    def calibrator(request: Request, sha256: Sha256) -> HTMLResponse:
        record = store.calibrators.get(sha256)
        return page(
            request,
            "calibrator.html.j2",
            record=record,
            facts=calibrator_facts(record),
            uses=_use_facts(store, record),
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


def n_reference_cases(info: Mapping[str, Any]) -> int | None:
    """How many calibration cases a calibrator remembers; None when it remembers none."""
    statistics = info.get("reference_statistics") or {}
    return max((len(values) for values in statistics.values()), default=0) or None


def calibrator_facts(record: CalibratorRecord) -> list[tuple[str, str]]:
    """What its file says, for people."""
    info = record.info
    n_cases = n_reference_cases(info)
    facts = [
        ("method", record.method),
        ("fitted on", DASH if n_cases is None else count(n_cases, "calibration case")),
        ("manifest SHA-256", setting(info.get("manifest_sha256"))),
        ("regions" if info.get("regions") else "classes", ", ".join(record.classes)),
        ("members pooled", f"{setting(info.get('n_members'))}, by {record.pooling}"),
        ("files held", record.kind),
        ("keeps", _KEEPS.get(str(info.get("preserves")), "")),
        ("NLL on its own cases", setting(info.get("fit_nll"))),
        ("NLL on validation cases", setting(info.get("validation_nll"))),
        ("λ, μ, α", ", ".join(setting(info.get(name)) for name in ("lambda", "mu", "alpha"))),
        ("solver and seed", f"{setting(info.get('solver'))}, {setting(info.get('seed'))}"),
        ("prediction", setting(info.get("prediction"))),
        ("made with", setting(info.get("versions"))),
        ("here since", moment(record.created)),
        ("SHA-256", record.sha256),
    ]
    return [(name, text or "nothing for sure") for name, text in facts]


def _use_facts(store: Store, record: CalibratorRecord) -> list[tuple[str, str]]:
    """How its last cases did."""
    points = store.cases.trend(calibrator=record.sha256)
    n_flagged = sum(point.n_flags > 0 for point in points)
    flagged = DASH if not points else f"{n_flagged} of the last {len(points)} ({percent(n_flagged / len(points), 0)} %)"
    return [
        *_labelled(store, record),
        ("cases so far", f"{store.calibrators.n_cases(record.sha256):,}"),
        ("flagged", flagged),
        ("median expected DSC", _median(points, "expected_dsc", " %")),
        ("median boundary confidence", _median(points, "boundary_confidence", " %")),
        ("median z of the mean free energy", _median(points, "z_free_energy")),
        ("median z of the confidence before calibration", _median(points, "z_confidence")),
    ]


def _labelled(store: Store, record: CalibratorRecord) -> list[tuple[str, str]]:
    """Its calibration error, where the last cases had labels."""
    cases = store.cases.page(calibrator=record.sha256, status="ok", sort="newest", limit=MOST_CASES)
    found = pooled_errors(each.case.reliability for each in cases)
    if found is None:
        return [("calibration error (ECE) with labels", DASH)]
    n_cases, before, after = found
    words = f"{100 * before:.2f} % before, {100 * after:.2f} % after, over {count(n_cases, 'case')}"
    return [("calibration error (ECE) with labels", words)]


def _median(points: list[TrendPoint], name: str, unit: str = "") -> str:
    values = [value for point in points if (value := getattr(point, name)) is not None]
    if not values:
        return DASH
    return f"{percent(median(values))}{unit}" if unit else signed(median(values))


def _compared(facts: list[dict[str, str]]) -> list[Pair]:
    one, other = facts
    return [Pair(name, one.get(name, DASH), other.get(name, DASH)) for name in dict.fromkeys([*one, *other])]


def _reports(store: Store, sha256: str) -> list[Job]:
    """Finished evaluations and studies that measured it, and the fit that made it, the latest first."""
    found = [
        job
        for kind in ("evaluate", "fit")
        for job in store.jobs.page(state="done", kind=kind, limit=MOST_JOBS)
        if sha256 in (job.request.get("calibrators") or []) or sha256 in made_by(job)
    ]
    return sorted(found, key=lambda job: job.id, reverse=True)
