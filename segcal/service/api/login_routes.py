"""Signing in with a browser: the token is typed once and kept in a cookie that scripts cannot read."""

from __future__ import annotations

from urllib.parse import parse_qs, quote

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.responses import HTMLResponse, RedirectResponse

from segcal.service.api.auth import COOKIE
from segcal.service.api.context import Context
from segcal.service.web.render import login_page

router = APIRouter(include_in_schema=False)

_WEEK_S = 7 * 86400


@router.get("/login")
def login_form(request: Request) -> Response:
    """The form."""
    return _page(local_path(request.query_params.get("next", "")), wrong=False)


@router.post("/login")
async def login(context: Context, request: Request) -> Response:
    """Check the token; the cookie if it is good, the form again if not."""
    body = await request.body()
    form = parse_qs(body.decode("ascii", errors="replace"))
    text, following = form.get("token", [""])[0].strip(), local_path(form.get("next", [""])[0])
    token = await to_thread.run_sync(context.store.tokens.check, text) if text.isascii() else None
    if token is None:
        return _page(following, wrong=True)
    answer = RedirectResponse(following, status_code=303)
    # The browser tells how the page was reached; what a proxy says about that could be anybody's word.
    secure = request.headers.get("origin", "").startswith("https://")
    answer.set_cookie(COOKIE, text, max_age=_WEEK_S, path="/", httponly=True, samesite="strict", secure=secure)
    return answer


@router.post("/logout")
def logout() -> Response:
    """Forget the cookie, and what the browser kept of the pages."""
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    answer.headers["Clear-Site-Data"] = '"cache"'  # the next one at this screen finds no slices of patients
    return answer


def local_path(text: str) -> str:
    """Where to go after signing in: a path of this server, never another one."""
    plain = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isascii() and text.isprintable()
    return quote(text, safe="/?=&%-._~") if plain and len(text) < 1000 else "/"


def _page(following: str, *, wrong: bool) -> Response:
    return HTMLResponse(login_page(following=following, wrong=wrong), status_code=401 if wrong else 200)
