"""Cases: upload one, list them, look at one and its layers; batches and the trend."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Path, Query, Request, Response

from segcal.service.api.answers import (
    BatchAnswer,
    BatchesAnswer,
    CaseAnswer,
    CaseDetail,
    CasesAnswer,
    JobAnswer,
    TrendAnswer,
    TrendAnswerPoint,
)
from segcal.service.api.case_intake import submit_upload
from segcal.service.api.common import CaseKey, Key, Limit, Submitter, Text, everywhere
from segcal.service.api.context import ApiContext, Context
from segcal.service.api.downloads import file_answer, file_route
from segcal.service.api.problems import BUSY, KEY_USED, NOT_FOUND, PAUSED, QUEUE_FULL, WRONG_TYPE
from segcal.service.api.results import result_path
from segcal.service.api.submission import check_room, usable_calibrator
from segcal.service.api.uploads import UPLOAD_BODY, digest_of, received
from segcal.service.errors import UnknownError
from segcal.service.model import CaseRecord
from segcal.service.requests import BatchName, CaseName, CaseRequest, Sha256
from segcal.service.store import CaseOrder, same_job
from segcal.service.web.slices import LARGEST, PICTURE_PIXELS, SMALLEST, SliceStyle, draw_slice
from segcal.service.web.view import VIEW_FILE, Axis, read_view

router = APIRouter(prefix="/v1", tags=["cases"])

_LOCATION = {"Location": {"description": "Address of the job.", "schema": {"type": "string"}}}
_PNG = {"image/png": {"schema": {"type": "string", "format": "binary"}}}

Day = Annotated[str, Query(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$", description="UTC.", examples=["2026-03-01"])]
LayerName = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,100}$", description="Name of a layer.")]
Number = Annotated[float | None, Query(ge=-1e9, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Query(ge=0, le=1, allow_inf_nan=False)]


@router.post(
    "/cases",
    status_code=202,
    summary="Upload one case",
    openapi_extra=UPLOAD_BODY,
    responses={
        202: {"description": "A job waits to calibrate it and to look at it.", "headers": _LOCATION},
        **everywhere(NOT_FOUND, KEY_USED, WRONG_TYPE, QUEUE_FULL, BUSY, PAUSED),
    },
)
async def upload(
    request: Request,
    response: Response,
    context: Context,
    caller: Submitter,
    case: Annotated[CaseName, Query(description="Its name.")],
    calibrator: Annotated[Sha256, Query(description="Hash of the calibrator it gets.")],
    key: Key,
    batch: BatchName = "",
) -> JobAnswer:
    """The body is an .npz with an array `logits` or `probabilities` (class, z, y, x); for small volumes."""

    def wanted(sha256: str) -> CaseRequest:
        return CaseRequest(calibrator=calibrator, case=case, batch=batch, fingerprint=f"sha256:{sha256}")

    def check() -> None:
        check_room(context)
        usable_calibrator(context, calibrator)

    most = context.settings.limits.upload_bytes
    known = None if key is None else await to_thread.run_sync(context.store.jobs.by_key, key)
    if key is not None and known is not None:
        job = same_job(known, wanted(await digest_of(request, most=most)), key)
    else:
        await to_thread.run_sync(check)
        async with received(request, context, suffix=".npz", most=most) as upload:
            job = await to_thread.run_sync(
                lambda: submit_upload(upload.path, wanted(upload.sha256), context, submitted_by=caller.name, key=key)
            )
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobAnswer.of(job)


@router.get("/cases", summary="List cases", responses=everywhere())
def cases(
    context: Context,
    batch: Text | None = None,
    day: Day | None = None,
    calibrator: Sha256 | None = None,
    flagged: bool | None = None,
    status: Literal["ok", "failed"] | None = None,
    search: Annotated[Text, Query(description="Part of the case's name.")] = "",
    sort: CaseOrder = "worst",
    descending: bool = False,
    limit: Limit = 50,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> CasesAnswer:
    """The worst first: failed, then most flags, then lowest expected DSC."""
    store = context.store.cases
    found = store.page(
        batch=batch,
        day=day,
        calibrator=calibrator,
        flagged=flagged,
        status=status,
        search=search,
        sort=sort,
        descending=descending,
        limit=limit,
        offset=offset,
    )
    total = store.count(batch=batch, day=day, calibrator=calibrator, flagged=flagged, status=status, search=search)
    return CasesAnswer(cases=[CaseAnswer.of(record) for record in found], total=total)


@router.get("/cases/{key}", summary="Look at a case", responses=everywhere(NOT_FOUND))
def case(key: CaseKey, context: Context) -> CaseDetail:
    """Everything that was found about it."""
    return CaseDetail.of(context.store.cases.get(key))


@file_route(router, "/cases/{key}/layers/{name}.nii.gz", NOT_FOUND, summary="Download a layer of a case")
def layer(key: CaseKey, name: LayerName, context: Context, request: Request) -> Response:
    """A volume to look at: the image, the segmentation, a probability, the uncertainty, the disagreement."""
    record = context.store.cases.get(key)
    folder = _view_folder(context, record)
    file = read_view(folder).layer(name).file
    path = result_path(context.files.job(record.job_id), f"{record.case.view}/{file}")
    return file_answer(request, path, media_type="application/gzip")


@router.get(
    "/cases/{key}/slices/{name}/{axis}/{index}.png",
    summary="A slice of a layer as a picture",
    response_class=Response,
    responses={200: {"description": "The picture.", "content": _PNG}, **everywhere(NOT_FOUND)},
)
def slice_picture(
    key: CaseKey,
    name: LayerName,
    axis: Axis,
    index: Annotated[int, Path(ge=0, le=1_000_000)],
    context: Context,
    low: Number = None,
    high: Number = None,
    threshold: Share = 0.0,
    opacity: Share = 0.7,
    size: Annotated[int, Query(ge=SMALLEST, le=LARGEST, description="Longer side in pixels.")] = PICTURE_PIXELS,
) -> Response:
    """Images in grey between `low` and `high`; shares over the image where they reach `threshold`."""
    folder = _view_folder(context, context.store.cases.get(key))
    style = SliceStyle(low=low, high=high, threshold=threshold, opacity=opacity, size=size)
    # Results never change, so a browser may keep its slices while somebody scrolls.
    headers = {"Cache-Control": "private, max-age=3600"}
    return Response(draw_slice(folder, name, axis, index, style), media_type="image/png", headers=headers)


@router.get("/batches", summary="Batches by day, newest first", responses=everywhere())
def batches(context: Context, limit: Limit = 60) -> BatchesAnswer:
    """How many cases each has, how many are flagged, and their mean expected DSC."""
    return BatchesAnswer(batches=[BatchAnswer.of(found) for found in context.store.cases.days(limit)])


@router.get("/trend", summary="The last cases over time", responses=everywhere())
def trend(
    context: Context,
    calibrator: Sha256 | None = None,
    batch: Text | None = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> TrendAnswer:
    """Expected DSC, confidence and outlyingness against the calibration cases, oldest first."""
    found = context.store.cases.trend(calibrator=calibrator, batch=batch, limit=limit)
    return TrendAnswer(points=[TrendAnswerPoint.of(point) for point in found])


def _view_folder(context: ApiContext, record: CaseRecord) -> FilePath:
    if record.case.view is None:
        raise UnknownError(f"case {record.key} has no layers to look at")
    # Through `result_path`, so that what a job wrote into its record cannot lead out of its folder either.
    return result_path(context.files.job(record.job_id), f"{record.case.view}/{VIEW_FILE}").parent
