"""The web application: routes behind the gate, behind the doorway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import to_thread
from fastapi import FastAPI
from starlette.middleware import Middleware

import segcal
from segcal.service.api import calibrators_routes, cases_routes, jobs_routes, login_routes, status_routes
from segcal.service.api.body_limit import BodyLimit
from segcal.service.api.case_intake import remove_lost
from segcal.service.api.context import ApiContext
from segcal.service.api.doorway import Doorway
from segcal.service.api.gate import Gate
from segcal.service.api.openapi import describe
from segcal.service.api.problems import handle_problems
from segcal.service.api.uploads import remove_stale
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store
from segcal.service.web.render import login_page
from segcal.service.web.router import router as pages

THREADS = 16
"""Requests worked on at once; more wait. Each may hold a connection of the store and the memory of a slice."""

_STALE_MARGIN_S = 60.0


def create_app(settings: ServiceSettings, store: Store) -> FastAPI:
    """The application of one server; the store is closed by whoever opened it.

    Nothing is sent anywhere: FastAPI's own telemetry, which environment variables could turn on, is off.
    """
    context = ApiContext.of(settings, store)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        await to_thread.run_sync(_clean_up, context)
        yield

    app = FastAPI(
        title="segcal",
        version=segcal.__version__,
        description="Calibrated maps and QA of nnU-Net ensembles.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Names of functions in generated clients: `jobs_submit`, `cases_upload`.
        generate_unique_id_function=lambda route: "_".join([*map(str, route.tags), route.name]),
        lifespan=lifespan,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
        middleware=[
            Middleware(Doorway, context=context),
            Middleware(Gate, context=context),
            Middleware(BodyLimit, limits=settings.limits),
        ],
    )
    app.state.context = context
    app.state.login_page = login_page
    handle_problems(app)
    for module in (status_routes, calibrators_routes, jobs_routes, cases_routes, login_routes):
        app.include_router(module.router)
    app.include_router(pages(settings, store), include_in_schema=False)
    describe(app, tokens_required=settings.tokens_required)
    return app


def _clean_up(context: ApiContext) -> None:
    """Remove what a killed server left of uploads; those under way on other servers are younger than that."""
    context.files.uploads.mkdir(parents=True, exist_ok=True)
    age = context.settings.limits.upload_seconds + _STALE_MARGIN_S
    remove_lost(context.files, context.store, age)
    remove_stale(context.files.uploads, age)
