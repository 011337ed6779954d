"""What happens on a connection before the application sees a request: nothing for too long, or what is no HTTP."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from segcal.service.api.doorway import SECURITY_HEADERS
from segcal.service.api.problems import BAD_REQUEST, problem


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol, which waits for ever for the headers of a request and has a form of its own for errors.

    Connections on which no request comes are closed, so that nobody holds them all by saying nothing. How long a body
    may take is the matter of `BodyLimit`.
    """

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

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as everything else is answered."""
        answer = problem(BAD_REQUEST, msg)
        headers = [*answer.headers.items(), *SECURITY_HEADERS.items(), ("Connection", "close")]
        for event in (
            h11.Response(status_code=answer.status_code, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

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
