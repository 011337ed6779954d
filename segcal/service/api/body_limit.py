"""How much a request may send and how long it may take: checked while it arrives, before anybody reads it."""

from __future__ import annotations

from time import monotonic

from anyio import fail_after
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segcal.service.api.problems import BAD_REQUEST, TOO_LARGE, TOO_SLOW, ProblemError, problem
from segcal.service.settings import Limits

UPLOADS = frozenset({"/v1/calibrators", "/v1/cases"})
LOGIN, LOGIN_BYTES = "/login", 4096
"""The one body that is read before anybody knows whose it is: no more than the form needs."""
_CLOSE = {"Connection": "close"}  # what is left of the body is not read


class BodyLimit:
    """ASGI middleware that lets no more than the limits through to the routes."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most, seconds = self._bounds(scope)
        length = Headers(scope=scope).get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            await problem(BAD_REQUEST, "Content-Length is not a number", headers=_CLOSE)(scope, receive, send)
        elif int(length[:20]) > most:
            await problem(TOO_LARGE, _too_large(most), headers=_CLOSE)(scope, receive, send)
        else:
            await self._app(scope, _Bounded(receive, most, seconds, self._limits.idle_seconds), send)

    def _bounds(self, scope: Scope) -> tuple[int, float]:
        if scope["path"] in UPLOADS and scope["method"] == "POST":
            return self._limits.upload_bytes, self._limits.upload_seconds
        most = LOGIN_BYTES if scope["path"] == LOGIN else self._limits.body_bytes
        return most, self._limits.idle_seconds


class _Bounded:
    """`receive` that counts; once the body is whole it only waits for the client to leave, without a limit."""

    def __init__(self, receive: Receive, most: int, seconds: float, idle_seconds: float) -> None:
        self._receive, self._most, self._idle = receive, most, idle_seconds
        self._seconds, self._until = seconds, monotonic() + seconds
        self._size, self._whole = 0, False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            with fail_after(max(0.0, min(self._idle, self._until - monotonic()))):
                message = await self._receive()
        except TimeoutError:
            raise ProblemError(
                TOO_SLOW,
                f"the request was not whole after {self._seconds:g} s, or nothing came for {self._idle:g} s",
                headers=_CLOSE,
            ) from None
        self._size += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._size > self._most:
            raise ProblemError(TOO_LARGE, _too_large(self._most), headers=_CLOSE)
        return message


def _too_large(most: int) -> str:
    return f"at most {most:,} bytes are taken here"
