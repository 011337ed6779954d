"""Runs the application on a socket until somebody asks it to end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from segcal.errors import UsageError
from segcal.service.api.connections import ImpatientProtocol
from segcal.service.api.context import ApiContext

_GRACE_S = 10
_KEEP_ALIVE_S = 20
_MOST_CONNECTIONS = 1000
_MOST_HEADER_BYTES = 32 * 1024


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        UsageError: the address is not one of this machine, or in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}; choose another") from error
    # Connections inherit it. asyncio does not set it on a socket it did not make, and an answer that goes out in two
    # pieces would then wait 40 ms for the client's acknowledgement of the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """What to type into a browser on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listening.getsockname()[1]}"


def run_app(app: FastAPI, listening: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let requests that are under way end.

    Args:
        started: called as soon as requests are answered.
    """
    config = uvicorn.Config(
        app,
        http=ImpatientProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # What a request says about its origin is nobody's word: the socket's peer is what counts.
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    context = app.state.context
    assert isinstance(context, ApiContext)
    _Server(config, context, started).run(sockets=[listening])


class _Server(uvicorn.Server):
    """uvicorn's, which tells the application about a signal at once: event streams would hold it open."""

    def __init__(self, config: uvicorn.Config, context: ApiContext, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._context, self._tell_started = context, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> Any:
        # Not handed on: uvicorn would raise the signal again after a clean end, and the exit code would tell a lie.
        if not self._context.stopping.is_set():  # setting it takes a lock that a second signal could come upon
            self._context.stopping.set()
        self.force_exit = self.should_exit
        self.should_exit = True
