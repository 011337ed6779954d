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
    length = _announced(request, most)
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


async def digest_of(request: Request, *, most: int) -> str:
    """SHA-256 of a body that is not kept, because it was received before; read to its end, so that the answer arrives.

    Raises:
        ProblemError: too large, empty, or of another type.
    """
    _announced(request, most)
    digest = hashlib.sha256()
    async for piece in _pieces(request, most):
        await to_thread.run_sync(digest.update, piece)
    return digest.hexdigest()


async def _receive(request: Request, context: ApiContext, path: Path, most: int) -> Upload:
    digest, size, looked = hashlib.sha256(), 0, 0

    def write(piece: bytes) -> None:
        digest.update(piece)
        file.write(piece)

    file = await to_thread.run_sync(_new_file, path)
    try:
        async for piece in _pieces(request, most):
            await to_thread.run_sync(write, piece)
            size += len(piece)
            if size - looked > _LOOK_AT_DISK_BYTES:
                looked = size
                await to_thread.run_sync(context.check_intake)
        await to_thread.run_sync(_flush, file)
    finally:
        file.close()
    return Upload(path, size, digest.hexdigest())


def _announced(request: Request, most: int) -> int:
    """The length that the header tells, 0 without one; raises ProblemError for what is not taken at all."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != MEDIA_TYPE:
        raise ProblemError(WRONG_TYPE, f"send the file itself as {MEDIA_TYPE}, not as {given[:100] or 'nothing'!r}")
    length = int(request.headers.get("content-length", "0"))
    if length > most:
        raise _too_large(most)
    return length


async def _pieces(request: Request, most: int) -> AsyncIterator[bytes]:
    """The body in pieces that are worth a thread; raises ProblemError for one that is empty or too large."""
    size, pending = 0, bytearray()
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise _too_large(most)
        pending += piece
        if len(pending) >= _WRITE_BYTES:
            yield bytes(pending)
            pending.clear()
    if size == 0:
        raise ProblemError(INVALID, "the upload is empty")
    if pending:
        yield bytes(pending)


def _too_large(most: int) -> ProblemError:
    return ProblemError(TOO_LARGE, f"at most {most:,} bytes are taken here", headers={"Connection": "close"})


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
