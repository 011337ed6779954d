"""The gate every request passes before any route sees it: right name, known caller, own site.

Routes are closed unless this file opens them: a new one needs a token of scope `read` to be read and of scope `submit`
to change something without saying so itself.
"""

from __future__ import annotations

import logging
from urllib.parse import quote

from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from segcal.service.api.auth import Caller, find_caller, says_who
from segcal.service.api.context import ApiContext
from segcal.service.api.hosts import came_through_proxy, from_other_site, known_host, says_own_site
from segcal.service.api.problems import FORBIDDEN, NO_STORE, NOT_SIGNED_IN, WRONG_HOST, problem
from segcal.service.errors import StoreError
from segcal.service.model import Scope

log = logging.getLogger("segcal.service.gate")

OPEN_PATHS = frozenset({"/v1/health", "/v1/ready", "/login"})
"""What needs no token: for whatever watches over the process, and to sign in."""

OPEN_FOLDER = "/static/"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_ANY_READER_MAY_POST = frozenset({"/logout"})


class Gate:
    """ASGI middleware; leaves the `Caller` in `request.state.caller`."""

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._stranger(request) or await self._caller(request)
        await (refusal or self._app)(scope, receive, send)

    def _stranger(self, request: Request) -> Response | None:
        """The refusal of a request that was sent under a foreign name or by a foreign page."""
        settings = self._context.settings
        if not known_host(request.headers, settings):
            return problem(
                WRONG_HOST, "the Host header names another server; whoever runs this one adds names with --host-name"
            )
        if not settings.tokens_required and came_through_proxy(request.headers):
            return problem(
                FORBIDDEN,
                "this server trusts every user of its machine and must not stand behind a proxy like that; "
                "start it with --host-name NAME, which makes tokens required",
            )
        if request.method not in _READING and from_other_site(request.headers):
            return problem(FORBIDDEN, "a page of another site may not change anything here")
        return None

    async def _caller(self, request: Request) -> Response | None:
        """Note who asks; the refusal if nobody known does, or they may not."""
        # As the router sees it: in the address, an encoded `?` or `#` would end the path early.
        path = request.scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        try:
            # Only a token has to be looked up; without one, no thread is needed.
            headers = request.headers
            caller = await to_thread.run_sync(self._find, headers) if says_who(headers) else self._find(headers)
        except StoreError as error:
            # Where the store lies is not for strangers.
            log.warning("a token could not be checked: %s", error)
            return problem(NO_STORE, "the store does not answer; try again later")
        if caller is None:
            return _sign_in(request)
        request.state.caller = caller
        if not caller.may(needed := _needed(request)):
            return problem(FORBIDDEN, f"this needs a token of scope `{needed}`, yours has `{caller.scope}`")
        if caller.by == "cookie" and request.method not in _READING and not says_own_site(request.headers):
            return problem(FORBIDDEN, "with a cookie, the browser has to say that the request comes from our own page")
        return None

    def _find(self, headers: Headers) -> Caller | None:
        return find_caller(headers, self._context.store, tokens_required=self._context.settings.tokens_required)


def _needed(request: Request) -> Scope:
    if request.method in _READING or request.scope["path"] in _ANY_READER_MAY_POST:
        return "read"
    return "submit"


def _sign_in(request: Request) -> Response:
    """Browsers that open a page are sent to the login page; programs get 401."""
    path = request.scope["path"]
    is_page = request.method == "GET" and not path.startswith("/v1/")
    if is_page and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"/login?next={quote(path, safe='/')}", status_code=303)
    return problem(
        NOT_SIGNED_IN,
        "send a valid token as `Authorization: Bearer segcal_…`; whoever runs segcal makes one with `segcal token`",
        headers={"WWW-Authenticate": 'Bearer realm="segcal"'},
    )
