"""The outermost layer: security headers on every answer, one log line and one count a request, no traceback outside."""

from __future__ import annotations

import logging
import secrets
from time import perf_counter

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segcal.service.api.auth import Caller
from segcal.service.api.context import ApiContext
from segcal.service.api.problems import INTERNAL, problem

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)

SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Nothing leaves the site. Not `no-referrer`: browsers then send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Of every answer; a route may set its own value of one."""

_GONE = 499  # what logs and counts show when the client left before there was an answer
_LOG = logging.getLogger("segcal.service.requests")


class Doorway:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), None

        async def send_safely(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, send_safely)
        except ClientDisconnect:
            pass
        except Exception as error:
            name = secrets.token_hex(4)
            _LOG.error("error of the service", exc_info=error, extra={"values": {"error": name}})
            if status is not None:
                raise  # half an answer is out; closing the connection is all that is left
            detail = f"something went wrong in the service; its log tells more under {name}"
            await problem(INTERNAL, detail)(scope, receive, send_safely)
        finally:
            self._note(scope, _GONE if status is None else status, perf_counter() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        """One line without the address itself: it may hold names of patients, and what was typed by mistake."""
        route = str(getattr(scope.get("route"), "path", "(none)"))
        caller = getattr(Request(scope).state, "caller", None)
        self._context.metrics.count(scope["method"], route, status, seconds)
        values = {
            "method": scope["method"],
            "route": route,
            "status": status,
            "ms": round(1000 * seconds, 1),
            "by": caller.name if isinstance(caller, Caller) else "",
        }
        _LOG.info("request", extra={"values": values})
