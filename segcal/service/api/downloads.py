"""Files as answers: whole or in ranges, with types that no browser runs, unless it is our own report in a sandbox."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends, Header
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from segcal.service.api.common import everywhere
from segcal.service.api.problems import NOT_FOUND, RANGE, Kind, ProblemError, documented, problem

Route = TypeVar("Route", bound=Callable[..., Response])

REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Our reports hold their style and script. In the sandbox they are no part of this site: no cookie, no request."""

_TYPES = {
    ".json": "application/json",
    ".csv": "text/csv; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".yaml": "text/plain; charset=utf-8",
    ".png": "image/png",
    ".gz": "application/gzip",
}
_OTHER = "application/octet-stream"
_SHOWN = frozenset({".json", ".csv", ".txt", ".yaml", ".png"})
_RANGES = re.compile(r"bytes=\s*(?:\d{1,18}-\d{0,18}|-\d{1,18})(?:\s*,\s*(?:\d{1,18}-\d{0,18}|-\d{1,18}))*\s*")
_MOST_RANGES = 20

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"*/*": _BINARY}},
    206: {"description": "The ranges that were asked for.", "content": {"*/*": _BINARY}},
    304: {"description": "Unchanged since the ETag that was sent."},
    **documented(RANGE),
}


def file_route(router: APIRouter, path: str, *problems: Kind, summary: str) -> Callable[[Route], Route]:
    """Decorates a function that answers with `file_answer`: GET, and HEAD with the same headers and no body.

    Args:
        problems: that it may answer with, besides those of any route.
    """

    def add(function: Route) -> Route:
        shared: dict[str, Any] = {"dependencies": [Depends(_ranged)], "response_class": Response}
        # Every GET of HTTP has its HEAD; the OpenAPI file tells of the one, and so of both.
        router.head(path, include_in_schema=False, **shared)(function)
        responses = {**_FILE_RESPONSES, **everywhere(*problems)}
        return router.get(path, summary=summary, responses=responses, **shared)(function)

    return add


def _ranged(
    ranges: Annotated[
        str | None, Header(alias="Range", description="`bytes=0-99`, also several; 206 then.", examples=["bytes=0-99"])
    ] = None,
    if_range: Annotated[str | None, Header(alias="If-Range", description="Only of the file with this ETag.")] = None,
    if_none_match: Annotated[str | None, Header(alias="If-None-Match", description="ETags you have; 304 then.")] = None,
) -> None:
    """A dependency that has the OpenAPI file tell of the headers that `file_answer` reads itself."""


def file_answer(request: Request, path: Path, *, media_type: str | None = None, report: bool = False) -> Response:
    """A file that the caller made sure may be served.

    Args:
        media_type: of the answer; by the name's ending when absent.
        report: it is a page made by segcal; any other HTML is only ever saved.

    Raises:
        ProblemError: there is no such file (any more), or no such range of it (416).
    """
    try:
        status = path.stat()
    except OSError:
        status = None
    if status is None or not stat.S_ISREG(status.st_mode):
        raise ProblemError(NOT_FOUND, f"there is no file {path.name!r}")
    headers = _headers(path, status, report=report)
    if _unchanged(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    refused = _check_range(request, headers, status.st_size)
    if refused is not None:
        return refused
    kind = "text/html; charset=utf-8" if report else media_type or _TYPES.get(path.suffix.lower(), _OTHER)
    return FileResponse(path, headers=headers, media_type=kind, stat_result=status)


def _headers(path: Path, status: os.stat_result, *, report: bool) -> dict[str, str]:
    how = "inline" if report or path.suffix.lower() in _SHOWN else "attachment"
    headers = {
        # Files are replaced whole, so their time, size and inode tell versions apart.
        "ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"',
        "Last-Modified": formatdate(status.st_mtime, usegmt=True),
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"{how}; filename*=utf-8''{quote(path.name, safe='')}",
    }
    if report:
        headers["Content-Security-Policy"] = REPORT_POLICY
    return headers


def _unchanged(request: Request, etag: str) -> bool:
    known = request.headers.get("if-none-match", "")
    return any(each.strip().removeprefix("W/") == etag for each in known.split(","))


def _check_range(request: Request, headers: dict[str, str], size: int) -> Response | None:
    """The refusal of ranges behind the end. Ranges that nobody can read are dropped, as RFC 9110 wants it."""
    text = request.headers.get("range")
    if text is None:
        return None
    ranges = text.strip().removeprefix("bytes=").split(",")
    condition = request.headers.get("if-range", headers["ETag"])
    readable = _RANGES.fullmatch(text.strip()) and len(ranges) <= _MOST_RANGES and not any(map(_runs_back, ranges))
    if not readable or condition not in (headers["ETag"], headers["Last-Modified"]):
        request.scope["headers"] = [pair for pair in request.scope["headers"] if pair[0] != b"range"]
        return None
    if all(_begin(each, size) < size for each in ranges):
        return None
    return problem(
        RANGE,
        f"the file has {size:,} bytes; a range behind its end was asked for",
        headers={"Content-Range": f"bytes */{size}"},
    )


def _runs_back(text: str) -> bool:
    first, _, last = text.strip().partition("-")
    return first != "" and last != "" and int(last) < int(first)


def _begin(text: str, size: int) -> int:
    """Where a range begins; the end of the file for one that is empty."""
    first, _, last = text.strip().partition("-")
    return int(first) if first else size - int(last)
