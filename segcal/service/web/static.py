"""The files that pages load: style, scripts and, where it was built in, NiiVue. Nothing else has an address."""

from __future__ import annotations

import hashlib
import mimetypes
from functools import cache
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from segcal.service.errors import UnknownError
from segcal.service.web.render import PageRoute

FOLDER = Path(__file__).parent / "static"
REPORT_STYLE = "report.css"
"""The style of the reports comes first, so that who knows qa.html is at home; style.css adds what only pages have."""

VOLUME_VIEWER = "niivue/niivue.js"
"""NiiVue as one ES module; `build_viewer.py` puts it there."""

_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}


def has_volume_viewer() -> bool:
    """Whether NiiVue was built into the package."""
    return (FOLDER / VOLUME_VIEWER).is_file()


def static_routes() -> APIRouter:
    """GET /static/..."""
    routes = APIRouter(route_class=PageRoute, include_in_schema=False)

    @routes.get("/static/{name:path}")
    def static(request: Request, name: str) -> Response:
        path = _files().get(name)
        if path is None:
            raise UnknownError(f"there is no file {name[:200]!r}")
        content, tag = _content(path, path.stat().st_mtime_ns)
        # Asked for again every time, and answered with 304: an upgrade shows at once.
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        suffix = Path(name).suffix
        media_type = _TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")
        return Response(content, media_type=media_type, headers=headers)

    return routes


def _files() -> dict[str, Path]:
    """What there is: the list is the only way to a file, so a name cannot lead out of the folder."""
    found = {REPORT_STYLE: Path(str(files("segcal.report") / "templates" / "style.css"))}
    inside = (path for path in FOLDER.rglob("*") if path.is_file() and not path.is_symlink())
    return found | {path.relative_to(FOLDER).as_posix(): path for path in inside}


@cache
def _content(path: Path, _modified_ns: int) -> tuple[bytes, str]:
    content = path.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
