"""Uploads: streamed into the uploads folder, checked there, and gone again whatever happens."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from anyio import CancelScope, to_thread
from starlette.requests import Request

from segcal.service.api.context import ApiContext
from segcal.service.api.problems import INVALID, TOO_LARGE, WRONG_TYPE, ProblemError
from segcal.service.errors import IntakePausedError

MEDIA_TYPE = "application/octet-stream"
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary", "minLength": 1}}},
    }
}
"""How the OpenAPI file describes the body of an upload."""

_WRITE_BYTES = 1 << 20
_LOOK_AT_DISK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Upload:
    """What was received: a whole file that nobody knows of yet."""

    path: Path
    size: int
    sha256: str


@asynccontextmanager
async def received(request: Request, context: ApiContext, *, suffix: str, most: int) -> AsyncIterator[Upload]:
    """Receive the body into a file that lasts as long as the block, unless the block moves it away.

    How long it may take is bounded by `BodyLimit`.

    Args:
        suffix: end of the file's name.
        most: bytes that are taken.

    Raises:
        ProblemError: too large, empty, of another type, or as many uploads as allowed are under way.
        IntakePausedError: the disk is nearly full, or got so.
        ClientDisconnect: the client left.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != MEDIA_TYPE:
        raise ProblemError(WRONG_TYPE, f"send the file itself as {MEDIA_TYPE}, not as {given[:100] or 'nothing'!r}")
    length = int(request.headers.get("content-length", "0"))
    if length > most:
        raise ProblemError(TOO_LARGE, f"at most {most:,} bytes are taken here", headers={"Connection": "close"})
    with context.uploads.one():
        await to_thread.run_sync(context.check_intake, length)
        path = context.files.uploads / f"{secrets.token_hex(12)}{suffix}"
        try:
            yield await _receive(request, context, path, most)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise IntakePausedError("intake paused: the disk became full while the upload arrived") from None
        finally:
            # Also when the request is cancelled: the client left, or the server ends.
            with CancelScope(shield=True):
                await to_thread.run_sync(lambda: path.unlink(missing_ok=True))


async def _receive(request: Request, context: ApiContext, path: Path, most: int) -> Upload:
    digest, size, looked, pending = hashlib.sha256(), 0, 0, bytearray()

    def write(file: BinaryIO) -> None:
        digest.update(pending)
        file.write(pending)
        pending.clear()

    file = await to_thread.run_sync(_new_file, path)
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise ProblemError(TOO_LARGE, f"at most {most:,} bytes are taken here", headers={"Connection": "close"})
            pending += piece
            if len(pending) >= _WRITE_BYTES:
                await to_thread.run_sync(write, file)
            if size - looked > _LOOK_AT_DISK_BYTES:
                looked = size
                await to_thread.run_sync(context.check_intake)
        await to_thread.run_sync(write, file)
        await to_thread.run_sync(_flush, file)
    finally:
        file.close()
    if size == 0:
        raise ProblemError(INVALID, "the upload is empty")
    return Upload(path, size, digest.hexdigest())


def remove_stale(folder: Path, older_than_s: float) -> None:
    """Delete uploads that a killed server left; those of other servers that share the folder are younger."""
    now = time.time()
    for path in folder.glob("*"):
        try:
            if path.is_file() and now - path.stat().st_mtime > older_than_s:
                path.unlink()
        except FileNotFoundError:
            continue


def _new_file(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
