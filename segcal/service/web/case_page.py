"""One case: its slices, its numbers and flags in words, how well calibrated it was where labels exist, its files."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Path, Query, Request
from pydantic import BeforeValidator, Field
from starlette.responses import HTMLResponse

from segcal.errors import SegcalError
from segcal.qa.settings import QaSettings
from segcal.service.errors import UnknownError
from segcal.service.files import ServiceFiles
from segcal.service.model import CalibratorRecord, CaseRecord
from segcal.service.store import Store
from segcal.service.web.case_numbers import CLASS_HEADINGS, case_lines, class_rows
from segcal.service.web.reliability import reliability_diagram
from segcal.service.web.render import PageRoute, page
from segcal.service.web.slices import SliceStyle
from segcal.service.web.static import has_volume_viewer
from segcal.service.web.view import Axis
from segcal.service.web.viewer import THUMBNAIL_PIXELS, USUAL, Viewer, make_viewer, share_scale

MOST_NEIGHBOURS = 10_000
"""Cases of a batch among which the previous and the next one are looked for."""

Neighbour: TypeAlias = tuple[int, str]
"""Number and name of a case."""


def _none_if_empty(value: object) -> object:
    """What a form sends for a field that was left empty."""
    return None if value == "" else value


Number = Annotated[Annotated[float, Field(allow_inf_nan=False)] | None, BeforeValidator(_none_if_empty), Query()]
Share = Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(_none_if_empty), Query()]


def case_page_routes(store: Store, files: ServiceFiles, limits: QaSettings) -> APIRouter:
    """GET /cases/{key}."""
    routes = APIRouter(route_class=PageRoute, include_in_schema=False)

    @routes.get("/cases/{key}")
    def case(
        request: Request,
        key: Annotated[int, Path(ge=1, lt=2**63)],
        layer: Annotated[str | None, Query(max_length=100)] = None,
        axis: Axis = "z",
        index: Annotated[int | None, Query(ge=0)] = None,
        low: Number = None,
        high: Number = None,
        threshold: Share = None,
        opacity: Share = None,
    ) -> HTMLResponse:
        record = store.cases.get(key)
        style = SliceStyle(
            low,
            high,
            USUAL.threshold if threshold is None else threshold,
            USUAL.opacity if opacity is None else opacity,
        )
        viewer, missing = _viewer(record, files, layer, axis, index, style)
        before, after, place = _neighbours(store, record)
        return page(
            request,
            "case.html.j2",
            record=record,
            case=record.case,
            job=store.jobs.get(record.job_id),
            viewer=viewer,
            missing=missing,
            volume=has_volume_viewer(),
            scale=share_scale(),
            thumbnail=THUMBNAIL_PIXELS,
            lines=case_lines(record.case, limits),
            class_headings=CLASS_HEADINGS,
            classes=class_rows(record.case.numbers),
            diagram=reliability_diagram(record.case.reliability),
            calibrator=_calibrator(store, record.case.calibrator),
            downloads=_downloads(record, files),
            before=before,
            after=after,
            place=place,
        )

    return routes


def _viewer(
    record: CaseRecord, files: ServiceFiles, layer: str | None, axis: Axis, index: int | None, style: SliceStyle
) -> tuple[Viewer | None, str]:
    """The viewer, or why there is none: the numbers of a case are worth a page without it."""
    if record.case.view is None:
        return None, "Its job made no layers."
    folder = files.job(record.job_id) / record.case.view
    try:
        usual = make_viewer(record.key, folder)
    except SegcalError as error:
        return None, f"They cannot be shown: {error}."
    if layer is None and axis == "z" and index is None and style == USUAL:
        return usual, ""
    return make_viewer(record.key, folder, layer=layer, axis=axis, index=index, style=style), ""


def _neighbours(store: Store, record: CaseRecord) -> tuple[Neighbour | None, Neighbour | None, str]:
    """The cases before and after this one in its batch on that day, worst first, and its place among them."""
    batch = store.cases.worst_first(batch=record.batch, day=record.day, limit=MOST_NEIGHBOURS)
    place = next((k for k, (key, _) in enumerate(batch) if key == record.key), None)
    if place is None:
        return None, None, ""
    before = batch[place - 1] if place else None
    after = batch[place + 1] if place + 1 < len(batch) else None
    return before, after, f"{place + 1} of {len(batch)}"


def _downloads(record: CaseRecord, files: ServiceFiles) -> list[tuple[str, int]]:
    """The case's own result files that are there, with their sizes."""
    folder = files.job(record.job_id)
    return [(name, (folder / name).stat().st_size) for name in record.case.files if (folder / name).is_file()]


def _calibrator(store: Store, sha256: str | None) -> CalibratorRecord | None:
    try:
        return None if sha256 is None else store.calibrators.get(sha256)
    except UnknownError:
        return None
