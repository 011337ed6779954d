"""Who is asking and what they may do: a token in the header or in the cookie, or a user of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Literal

from fastapi import Request
from starlette.datastructures import Headers

from segcal.service.api.problems import FORBIDDEN, ProblemError
from segcal.service.model import SCOPES, Scope

if TYPE_CHECKING:
    from segcal.service.store import Store

COOKIE = "segcal_token"
_LONGEST_TOKEN = 200


@dataclass(frozen=True, slots=True)
class Caller:
    """The one behind a request.

    Attributes:
        id: of the token; empty for a user of this machine where no tokens are required.
        name: of the token; empty likewise.
        scope: what they may do.
        by: how we know. A browser adds cookies, and "machine", to requests that other sites make it send.
    """

    id: str
    name: str
    scope: Scope
    by: Literal["header", "cookie", "machine"]

    def may(self, scope: Scope) -> bool:
        """Whether their scope includes `scope`."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


ANYBODY_HERE = Caller("", "", "admin", "machine")
"""Who reaches a server on the loopback address that requires no tokens."""


def find_caller(headers: Headers, store: Store, *, tokens_required: bool) -> Caller | None:
    """The caller a request's headers speak for; None when they speak for nobody.

    A wrong token in the header is refused even where none is needed: its sender believes to be somebody. A cookie may
    be left over from another server, so where no token is needed a wrong one is ignored.
    """
    authorization = headers.get("authorization")
    if authorization is not None:
        method, _, text = authorization.partition(" ")
        return _checked(text.strip(), "header", store) if method.lower() == "bearer" else None
    cookie = cookie_token(headers)
    caller = None if cookie is None else _checked(cookie, "cookie", store)
    return ANYBODY_HERE if caller is None and not tokens_required else caller


def says_who(headers: Headers) -> bool:
    """Whether there is anything to look up in the store."""
    return "authorization" in headers or "cookie" in headers


def cookie_token(headers: Headers) -> str | None:
    """The token in the cookie that the login page set."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def allowed(scope: Scope) -> Callable[[Request], Caller]:
    """A dependency of routes that need more than the gate asks for: `Depends(allowed("admin"))`; gives the caller."""

    def check(request: Request) -> Caller:
        caller = request.state.caller
        assert isinstance(caller, Caller)
        if not caller.may(scope):
            raise ProblemError(
                FORBIDDEN, f"this needs a token of scope `{scope}`, yours has `{caller.scope}`; ask whoever runs segcal"
            )
        return caller

    return check


def _checked(text: str, by: Literal["header", "cookie"], store: Store) -> Caller | None:
    if not text or len(text) > _LONGEST_TOKEN or not text.isascii():
        return None
    token = store.tokens.check(text)
    return None if token is None else Caller(token.id, token.name, token.scope, by)
