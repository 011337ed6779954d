"""Errors as `application/problem+json` (RFC 9457): a stable name, the status, a sentence; never a traceback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from segcal.errors import OutputError, SegcalError
from segcal.service.errors import (
    IntakePausedError,
    KeyReusedError,
    QueueFullError,
    RefusedPathError,
    StoreError,
    UnknownError,
    UploadError,
    WrongStateError,
)

MEDIA_TYPE = "application/problem+json"
PREFIX = "urn:segcal:problem:"
_MOST_ERRORS = 50
_SCHEMA = {"schema": {"$ref": "#/components/schemas/Problem"}}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


class FieldError(BaseModel):
    """One value of a request that was not accepted."""

    where: str = Field(description="Path to the value: `body.calibrator`, `query.limit`.")
    message: str


class Problem(BaseModel):
    """What went wrong, for programs (`type`, `status`) and for people (`title`, `detail`)."""

    type: str = Field(description="A name that does not change, `urn:segcal:problem:queue-full`.")
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = Field(default=None, description="Of a request that does not fit the schema.")


class Kind(NamedTuple):
    """A sort of problem: its name, status and title, and after how many seconds asking again makes sense."""

    name: str
    status: int
    title: str
    retry_after_s: int | None = None


BAD_REQUEST = Kind("bad-request", 400, "The request cannot be read")
NOT_SIGNED_IN = Kind("not-signed-in", 401, "A valid token is needed")
FORBIDDEN = Kind("forbidden", 403, "Not allowed")
NOT_FOUND = Kind("not-found", 404, "There is no such thing")
NOT_ACCEPTABLE_METHOD = Kind("method-not-allowed", 405, "Not a method of this address")
TOO_SLOW = Kind("too-slow", 408, "The request took too long to arrive")
NOT_YET = Kind("not-yet", 409, "Not in this state")
KEY_USED = Kind("key-used", 409, "The Idempotency-Key belongs to another request")
TOO_LARGE = Kind("too-large", 413, "The request is too large")
WRONG_TYPE = Kind("wrong-type", 415, "Another content type is needed")
RANGE = Kind("range", 416, "The file has no such range")
WRONG_HOST = Kind("wrong-host", 421, "The service does not go by this name")
INVALID = Kind("invalid", 422, "The request does not fit")
QUEUE_FULL = Kind("queue-full", 429, "Too much is waiting", 30)
BUSY = Kind("busy", 429, "Too many at once", 5)
INTERNAL = Kind("internal", 500, "An error of the service")
PAUSED = Kind("intake-paused", 503, "Nothing new is taken in for now", 60)
NO_STORE = Kind("store", 503, "The store does not answer", 10)

_OF_ERRORS: tuple[tuple[type[SegcalError], Kind], ...] = (
    (UnknownError, NOT_FOUND),
    (KeyReusedError, KEY_USED),
    (WrongStateError, NOT_YET),
    (RefusedPathError, FORBIDDEN),
    (QueueFullError, QUEUE_FULL),
    (IntakePausedError, PAUSED),
    (UploadError, INVALID),
    (StoreError, NO_STORE),
    (OutputError, PAUSED),
    (SegcalError, INVALID),
)


class ProblemError(HTTPException):
    """Raised to answer with a problem. An HTTPException, because FastAPI hides any other one met in a body."""

    def __init__(self, kind: Kind, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(kind.status, detail, headers)
        self.kind = kind


def problem(
    kind: Kind, detail: str, *, headers: Mapping[str, str] | None = None, errors: Sequence[FieldError] | None = None
) -> Response:
    """The response that tells of a problem."""
    body = Problem(
        type=PREFIX + kind.name,
        title=kind.title,
        status=kind.status,
        detail=detail,
        errors=None if errors is None else list(errors),
    )
    retry = {} if kind.retry_after_s is None else {"Retry-After": str(kind.retry_after_s)}
    return JSONResponse(
        body.model_dump(exclude_none=True),
        status_code=kind.status,
        headers={**retry, **(headers or {})},
        media_type=MEDIA_TYPE,
    )


def kind_of(error: SegcalError) -> Kind:
    """Which problem an error of the library is."""
    return next(kind for cls, kind in _OF_ERRORS if isinstance(error, cls))


def documented(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these problems."""
    found: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        answer = found.setdefault(kind.status, {"description": kind.title, "content": {MEDIA_TYPE: _SCHEMA}})
        if kind.title not in answer["description"]:
            answer["description"] += f"; {kind.title[0].lower()}{kind.title[1:]}"
        if kind.retry_after_s is not None:
            answer["headers"] = _RETRY_AFTER
    return found


def handle_problems(app: FastAPI) -> None:
    """Let the app answer every exception made on purpose with a problem."""

    async def raised(_request: Request, error: Any) -> Response:
        return problem(error.kind, error.detail, headers=error.headers)

    async def of_library(_request: Request, error: Any) -> Response:
        return problem(kind_of(error), str(error))

    async def of_http(_request: Request, error: Any) -> Response:
        phrase = HTTPStatus(error.status_code).phrase
        kind = Kind(phrase.lower().replace(" ", "-"), error.status_code, phrase)
        known = {404: NOT_FOUND, 405: NOT_ACCEPTABLE_METHOD, 400: BAD_REQUEST}.get(error.status_code, kind)
        return problem(known, str(error.detail), headers=error.headers)

    async def of_schema(_request: Request, error: Any) -> Response:
        # What was sent is not repeated: it may be long, and it may be a secret in the wrong place.
        found = [
            FieldError(where=".".join(str(part) for part in each["loc"])[:500], message=str(each["msg"])[:500])
            for each in error.errors()[:_MOST_ERRORS]
        ]
        first = f"{found[0].where}: {found[0].message}" if found else "see the OpenAPI file"
        return problem(INVALID, first, errors=found)

    app.add_exception_handler(ProblemError, raised)
    app.add_exception_handler(SegcalError, of_library)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_schema)
