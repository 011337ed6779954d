"""Signing in with a browser: the token is typed once and kept in a cookie that scripts cannot read."""

from __future__ import annotations

from html import escape
from urllib.parse import parse_qs, quote

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.responses import HTMLResponse, RedirectResponse

from segcal.service.api.auth import COOKIE
from segcal.service.api.context import Context
from segcal.service.api.problems import BAD_REQUEST, ProblemError

router = APIRouter(include_in_schema=False)

_WEEK_S = 7 * 86400
_LONGEST_FORM = 4096


@router.get("/login")
def login_page(context: Context, request: Request) -> Response:
    """The form."""
    return _page(request, local_path(request.query_params.get("next", "")), wrong=False)


@router.post("/login")
async def login(context: Context, request: Request) -> Response:
    """Check the token; the cookie if it is good, the form again if not."""
    body = await request.body()
    if len(body) > _LONGEST_FORM:
        raise ProblemError(BAD_REQUEST, "this is not the login form")
    form = parse_qs(body.decode("ascii", errors="replace"))
    text, following = form.get("token", [""])[0].strip(), local_path(form.get("next", [""])[0])
    token = await to_thread.run_sync(context.store.tokens.check, text) if text.isascii() else None
    if token is None:
        return _page(request, following, wrong=True)
    answer = RedirectResponse(following, status_code=303)
    # The browser tells how the page was reached; what a proxy says about that could be anybody's word.
    secure = request.headers.get("origin", "").startswith("https://")
    answer.set_cookie(COOKIE, text, max_age=_WEEK_S, path="/", httponly=True, samesite="strict", secure=secure)
    return answer


@router.post("/logout")
def logout() -> Response:
    """Forget the cookie."""
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


def local_path(text: str) -> str:
    """Where to go after signing in: a path of this server, never another one."""
    plain = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isascii() and text.isprintable()
    return quote(text, safe="/?=&%-._~") if plain and len(text) < 1000 else "/"


def _page(request: Request, following: str, *, wrong: bool) -> Response:
    """The pages' own template when they are there, a plain form otherwise."""
    status = 401 if wrong else 200
    draw = getattr(request.app.state, "login_page", None)
    if draw is not None:
        return HTMLResponse(draw(following=following, wrong=wrong), status_code=status)
    note = "<p role='alert'>This token is not valid.</p>" if wrong else ""
    return HTMLResponse(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>segcal</title></head><body><main>"
        f"<h1>Sign in</h1>{note}<form method='post' action='/login'><label>Token "
        "<input type='password' name='token' autocomplete='current-password' required autofocus></label>"
        f"<input type='hidden' name='next' value='{escape(following, quote=True)}'><button>Sign in</button></form>"
        "</main></body></html>",
        status_code=status,
    )
