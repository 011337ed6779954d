"""Live progress: a job as server-sent events, one on every change, until it is finished or the client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from anyio import sleep, to_thread
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from segcal.service.api.answers import JobAnswer
from segcal.service.api.context import ApiContext
from segcal.service.errors import StoreError

POLL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
"""Proxies close connections over which nothing comes."""

LONGEST_SECONDS = 3600.0
"""Browsers connect again by themselves; tokens are checked then."""


EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "enum": ["job", "end"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/JobAnswer"},
        },
    },
    "required": ["event", "data"],
}
"""One event, as OpenAPI describes those of a stream."""


class JobEvents(StreamingResponse):
    """The events of one job. The place it takes is given back however the answer ends."""

    def __init__(self, context: ApiContext, job: JobAnswer) -> None:
        self._context = context
        super().__init__(_events(context, job), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._context.streams.give_back()


async def _events(context: ApiContext, job: JobAnswer) -> AsyncIterator[str]:
    """`job` at the beginning and on every change, `end` when it is finished, comments in between."""
    began = said = monotonic()
    shown = job.model_dump_json()
    yield _event("job", shown)
    while not (job.is_finished or context.stopping.is_set() or monotonic() - began > LONGEST_SECONDS):
        await sleep(POLL_SECONDS)
        try:
            job = JobAnswer.of(await to_thread.run_sync(context.store.jobs.get, job.id))
        except StoreError:
            continue  # the store may come back; the client sees that it waits
        text = job.model_dump_json()
        if text != shown:
            shown, said = text, monotonic()
            yield _event("job", shown)
        elif monotonic() - said > KEEP_ALIVE_SECONDS:
            said = monotonic()
            yield ": still there\n\n"
    if job.is_finished:
        yield _event("end", shown)


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"
