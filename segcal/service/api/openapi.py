"""The OpenAPI file: what FastAPI finds out by itself, and what it cannot know."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from segcal.service.api.auth import COOKIE
from segcal.service.api.gate import OPEN_PATHS
from segcal.service.api.problems import FieldError, Problem

_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token made by `segcal token create`."},
    "cookie": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "Set by the login page."},
}


def describe(app: FastAPI, *, tokens_required: bool) -> None:
    """Let the app serve a complete description of itself."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(app, tokens_required=tokens_required)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _complete(app: FastAPI, *, tokens_required: bool) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in (Problem, FieldError):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        schemas[model.__name__] = schema
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = _SCHEMES
    ways: list[dict[str, list[str]]] = [{"token": []}, {"cookie": []}]
    for path, operations in found["paths"].items():
        for operation in operations.values():
            if path in OPEN_PATHS:
                operation["security"] = []
            else:
                operation["security"] = ways if tokens_required else [*ways, {}]
    return found
