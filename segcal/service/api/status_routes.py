"""Is it alive, does it take work, and the numbers for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse

from segcal.service.api.answers import HealthAnswer, ReadyAnswer
from segcal.service.api.common import everywhere
from segcal.service.api.context import ApiContext, Context
from segcal.service.errors import IntakePausedError, StoreError

router = APIRouter(prefix="/v1", tags=["status"])

_WORKER_SEEN_S = 60.0


@router.get("/health", summary="Whether the process is alive", responses=everywhere(open_to_all=True))
def health() -> HealthAnswer:
    """Needs no token and asks nobody else."""
    return HealthAnswer()


@router.get(
    "/ready",
    summary="Whether work is taken in and done",
    response_model=ReadyAnswer,
    responses={
        503: {"description": "Not ready, and why.", "model": ReadyAnswer},
        **{status: answer for status, answer in everywhere(open_to_all=True).items() if status != 503},
    },
)
def ready(context: Context) -> Response:
    """Needs no token. 503 when the store does not answer, the disk is nearly full or no worker runs."""
    reasons = _reasons(context)
    answer = ReadyAnswer(ready=not reasons, reasons=reasons)
    return JSONResponse(answer.model_dump(), status_code=503 if reasons else 200)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **everywhere(),
    },
)
def metrics(context: Context) -> Response:
    """Jobs by state, age of the queue, cases, disk; requests of this server by route and status."""
    return Response(context.metrics.text(context), media_type=CONTENT_TYPE_LATEST)


def _reasons(context: ApiContext) -> list[str]:
    found = []
    try:
        context.store.ping()
        if not context.store.workers.alive(_WORKER_SEEN_S):
            found.append("no worker was heard of in the last minute")
    except StoreError:
        # Why is for the log and for those with a token: this answer is for everybody.
        found.append("the store does not answer")
    try:
        context.check_intake()
    except IntakePausedError:
        found.append("the disk is nearly full, so intake is paused")
    return found
