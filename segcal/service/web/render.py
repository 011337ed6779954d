"""One way to answer with a page: escaped templates, and errors as pages too."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from segcal import __version__
from segcal.errors import SegcalError
from segcal.report.render import page_environment
from segcal.report.wording import DASH
from segcal.service.api.auth import Caller
from segcal.service.api.problems import kind_of
from segcal.service.model import FINISHED, REPEATABLE, Scope
from segcal.service.web import wording


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page for whoever asks."""
    caller = getattr(request.state, "caller", None)
    text = _text(template, path=request.url.path, caller=caller if isinstance(caller, Caller) else None, **values)
    return HTMLResponse(text, status_code=status)


def login_page(*, following: str, wrong: bool) -> str:
    """The form that asks for a token; `following` is where it leads to."""
    return _text("login.html.j2", path="/login", caller=None, following=following, wrong=wrong)


class PageRoute(APIRoute):
    """A route whose errors are pages, with the words that the API uses for them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await answer(request)
            except SegcalError as error:
                kind = kind_of(error)
                return error_page(request, kind.status, kind.title, str(error))
            except RequestValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"][1:])
                return error_page(request, 422, "The address does not fit", f"{where}: {first['msg']}")
            except HTTPException as error:
                return error_page(request, error.status_code, "Not possible", str(error.detail))

        return answered


def error_page(request: Request, status: int, title: str, detail: str) -> Response:
    """What went wrong, and the way on."""
    return page(request, "error.html.j2", status=status, title=title, detail=detail)


def address(path: str, values: Mapping[str, object]) -> str:
    """A path with a query of those values that are neither None nor empty."""
    kept = {name: value for name, value in values.items() if value is not None and value != ""}
    return f"{path}?{urlencode(kept)}" if kept else path


def _text(template: str, *, caller: Caller | None, **values: Any) -> str:
    def may(scope: Scope) -> bool:
        return caller is not None and caller.may(scope)

    return _environment().get_template(template).render(caller=caller, may=may, **values)


@cache
def _environment() -> Environment:
    environment = page_environment("segcal.service.web")
    words = ("percent", "plain", "signed", "moment", "duration", "file_size", "short_hash", "setting")
    environment.filters |= {name: getattr(wording, name) for name in words}
    environment.globals |= {
        "address": address,
        "DASH": DASH,
        "FINISHED": FINISHED,
        "REPEATABLE": REPEATABLE,
        "KINDS": wording.KIND_WORDS,
        "STATES": wording.STATE_WORDS,
        "STATE_BADGES": wording.STATE_BADGES,
        "version": __version__,
    }
    return environment
