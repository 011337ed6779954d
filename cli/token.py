"""`segcal token`: who may use a service."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from segcal.errors import UsageError
from segcal.extras import how_to_install

from .common import DebugOption, JsonOption, Output, QuietOption, epilog, sub_app
from .serve import DataOption, StoreOption

if TYPE_CHECKING:
    from segcal.service.model import TokenRecord
    from segcal.service.store import Store

app = sub_app("Make, list and revoke the tokens of a service.")

_DAY_S = 86400.0


@app.command("create", epilog=epilog("segcal token create alice --scope submit --days 365 --data service"))
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; shown in the log and beside jobs.")],
    data: DataOption,
    scope: Annotated[
        Literal["read", "submit", "admin"],
        typer.Option(help="read: look at everything; submit: also new work; admin: also retire calibrators."),
    ] = "read",
    days: Annotated[
        float | None, typer.Option(min=0.0, max=36_500.0, metavar="N", help="Valid for so long; otherwise for ever.")
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a token and print it, once: only its hash is kept."""
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise UsageError(f"{name!r} cannot be a name: use 1 to 200 printable characters")
    output = Output(json=json, quiet=quiet)
    with _opened(data, store) as opened:
        expires = None if days is None else opened.now() + days * _DAY_S
        record, text = opened.tokens.create(name, scope, expires)
    if not json:
        print(text)  # the result, also with --quiet
    until = "for ever" if record.expires is None else f"until {_day(record.expires)}"
    output.note(f"token {record.id} for {name}, scope {scope}, valid {until}; it cannot be shown again")
    output.result({"token": text, **_values(record)})


@app.command("list", epilog=epilog("segcal token list --data service"))
def list_tokens(
    data: DataOption,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Who has a token; the tokens themselves are not known."""
    output = Output(json=json, quiet=quiet)
    with _opened(data, store, made=False) as opened:
        found = opened.tokens.list()
    rows = [(each.id, each.name, each.scope, _day(each.created), _state(each)) for each in found]
    if rows:
        output.table(("id", "name", "scope", "made", "state"), rows)
    else:
        output.line("no tokens yet; make one with `segcal token create`")
    output.result({"tokens": [_values(each) for each in found]})


@app.command("revoke", epilog=epilog("segcal token revoke 1f0c9a7e5b3d --data service"))
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `segcal token list` shows it.")],
    data: DataOption,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Let a token be valid no longer, from the next request on."""
    output = Output(json=json, quiet=quiet)
    with _opened(data, store, made=False) as opened:
        record = opened.tokens.revoke(token_id)
    output.line(f"token {record.id} of {record.name} is revoked")
    output.result(_values(record))


@contextmanager
def _opened(data: Path, url: str | None, *, made: bool = True) -> Iterator[Store]:
    """The store; where there is none it is made for the first token, or it is said that the folder is the wrong one."""
    try:
        from segcal.service.settings import ServiceSettings
        from segcal.service.store import open_store
    except ImportError as error:
        raise UsageError(f"the service needs more packages ({error}): {how_to_install('service')}") from error
    settings = ServiceSettings(data=data, store_url=url)
    if not made and url is None and not settings.database.is_file():
        raise UsageError(f"--data {data}: no service keeps its store there; give the --data of `segcal serve`")
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = open_store(settings.url)
    try:
        yield store
    finally:
        store.close()


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _state(token: TokenRecord) -> str:
    if token.revoked is not None:
        return f"revoked {_day(token.revoked)}"
    if token.expires is None:
        return "valid"
    return f"{'expired' if token.expires <= time.time() else 'valid until'} {_day(token.expires)}"


def _values(token: TokenRecord) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "scope": token.scope,
        "created": token.created,
        "expires": token.expires,
        "revoked": token.revoked,
    }
