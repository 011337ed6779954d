"""Calibrators: upload, list, describe, download, retire."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response

from segcal.errors import FileFormatError
from segcal.service.api.answers import CalibratorAnswer, CalibratorsAnswer, CalibratorUse
from segcal.service.api.common import Admin, Hash, Submitter, everywhere
from segcal.service.api.context import Context
from segcal.service.api.downloads import file_answer, file_route
from segcal.service.api.problems import BUSY, NOT_FOUND, PAUSED, WRONG_TYPE
from segcal.service.api.uploads import UPLOAD_BODY, received
from segcal.service.calibrator_files import import_calibrator
from segcal.service.errors import UploadError
from segcal.service.model import CalibratorRecord
from segcal.service.settings import MIB

router = APIRouter(prefix="/v1/calibrators", tags=["calibrators"])

_MOST_BYTES = 64 * MIB
_LOCATION = {"Location": {"description": "Address of the calibrator.", "schema": {"type": "string"}}}


@router.post(
    "",
    status_code=201,
    summary="Upload a calibrator",
    openapi_extra=UPLOAD_BODY,
    responses={
        201: {"description": "It is known now, or was already.", "headers": _LOCATION},
        **everywhere(WRONG_TYPE, BUSY, PAUSED),
    },
)
async def upload(
    request: Request,
    response: Response,
    context: Context,
    caller: Submitter,
    name: Annotated[
        str, Query(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$", description="For people.")
    ],
) -> CalibratorAnswer:
    """The body is the file that `segcal fit` wrote. It is checked before it is kept, and kept under its hash."""
    most = min(_MOST_BYTES, context.settings.limits.upload_bytes)
    async with received(request, context, suffix=".safetensors", most=most) as upload:

        def keep() -> CalibratorRecord:
            try:
                return import_calibrator(upload.path, name, context.files, context.store)
            except FileFormatError as error:
                raise UploadError(str(error).replace(str(upload.path), "the upload")) from None

        record = await to_thread.run_sync(keep)
    response.headers["Location"] = f"/v1/calibrators/{record.sha256}"
    return CalibratorAnswer.of(record)


@router.get("", summary="List calibrators, newest first", responses=everywhere())
def calibrators(context: Context, retired: bool = True) -> CalibratorsAnswer:
    """`retired=false` leaves out those that no new job takes."""
    found = context.store.calibrators.list(with_retired=retired)
    return CalibratorsAnswer(calibrators=[CalibratorAnswer.of(record) for record in found])


@router.get("/{sha256}", summary="Describe a calibrator", responses=everywhere(NOT_FOUND))
def calibrator(sha256: Hash, context: Context) -> CalibratorUse:
    """What it was fitted on, and where it was used."""
    store = context.store.calibrators
    answer = CalibratorAnswer.of(store.get(sha256))
    return CalibratorUse(**answer.model_dump(), n_cases=store.n_cases(sha256), batches=store.batches(sha256))


@file_route(router, "/{sha256}/file", NOT_FOUND, summary="Download a calibrator")
def calibrator_file(sha256: Hash, context: Context, request: Request) -> Response:
    """The file, byte by byte."""
    context.store.calibrators.get(sha256)
    return file_answer(request, context.files.calibrator(sha256))


@router.post("/{sha256}/retire", summary="Retire a calibrator", responses=everywhere(NOT_FOUND))
def retire(sha256: Hash, context: Context, caller: Admin) -> CalibratorAnswer:
    """No new job takes it then; what was made with it stays, and so does the file. Needs scope `admin`."""
    return CalibratorAnswer.of(context.store.calibrators.retire(sha256))
