"""Connections that send no request: closed after a while, so that nobody holds them all by saying nothing."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol, which itself waits for ever for the headers of a request; `BodyLimit` times the rest."""

    head_seconds = 20.0
    """How long the headers of a request may take: at least this, at most twice as long."""

    _waiting: asyncio.TimerHandle | None = None
    _seen: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._waiting is not None:
            self._waiting.cancel()

    def _look_again(self) -> None:
        self._waiting = asyncio.get_running_loop().call_later(self.head_seconds, self._look)

    def _look(self) -> None:
        """Close when no request is under way and none came since the last look."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._look_again()
