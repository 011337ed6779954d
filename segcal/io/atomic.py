"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path

from segcal.errors import Interrupted, OutputError, SegcalError

TEMPORARY_PREFIX = ".segcal-"
"""Unfinished files start with this; what stands behind it ends in the real name, so suffixes keep their meaning."""

_WANTED: ContextVar[Callable[[], bool]] = ContextVar("_WANTED", default=lambda: True)

_WRITE_FAILURES = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder",
    errno.EDQUOT: "your disk quota is used up; free some space or choose another folder",
    errno.EFBIG: "the file system does not allow files this large; choose another folder",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; choose a folder you may write to",
    errno.EPERM: "permission denied; choose a folder you may write to",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another path",
    errno.EISDIR: "a folder of that name is in the way; choose another path",
    errno.ENAMETOOLONG: "the name is too long for the file system; choose a shorter one",
}


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; when the block ends well it becomes `path`, otherwise it is removed.

    The content is flushed to the disk before the rename and the folder after it, so a power cut leaves the old
    file or the new one. Missing parent folders are made. The temporary name ends in the real one.

    Raises:
        OutputError: the disk is full, the folder is not writable or the like.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made here with the user's umask, and before the caller does long work for a folder that is not writable.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        _flush_to_disk(temporary)
        if not _WANTED.get()():
            raise Interrupted(f"{path}: not written, the run it was made for has ended")
        temporary.replace(path)
        _flush_to_disk(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, SegcalError) and _concerns(error, temporary, path):
            raise OutputError(f"{path}: cannot be written: {write_failure(error)}.") from error
        raise


@contextmanager
def written_while(wanted: Callable[[], bool]) -> Iterator[None]:
    """No file appears any more once `wanted` is false; only for this thread.

    A worker may still be at a case when its run has ended, and another run may own the folder by then.
    """
    token = _WANTED.set(wanted)
    try:
        yield
    finally:
        _WANTED.reset(token)


def write_failure(error: OSError) -> str:
    """Why a file could not be written, and the way out, in words."""
    return _WRITE_FAILURES.get(error.errno or 0, error.strerror or str(error))


def check_folder(folder: Path) -> None:
    """Say at once that nothing can be written into a folder, before hours are spent on what is to be kept there.

    Nothing is made; a folder that does not exist yet is judged by the one it would be made in.

    Raises:
        OutputError: it cannot be made or written to.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise OutputError(f"{folder}: cannot be a folder, {existing} is a file; choose another path.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: {existing} is read-only or not yours; choose another folder.")


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with plain line feeds, whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def remove_unfinished(folder: Path, own: Iterable[str] = ()) -> None:
    """Delete what killed processes left half-written in the folder of a run.

    Args:
        folder: no other run writes directly into it.
        own: its subfolders that belong to the run from top to bottom. All others are left alone: another run may have
            its folder there, and be writing.
    """
    unfinished = f"{TEMPORARY_PREFIX}*"
    for leftover in [*folder.glob(unfinished), *chain(*((folder / name).rglob(unfinished) for name in own))]:
        if leftover.is_file() and not leftover.is_symlink():
            leftover.unlink(missing_ok=True)


def _concerns(error: OSError, temporary: Path, path: Path) -> bool:
    """Whether the block failed at its output; an input it could not read is another story."""
    if error.filename is None:
        return error.errno in _WRITE_FAILURES
    return Path(os.fsdecode(error.filename)) in {temporary, path, *path.parents}


def _flush_to_disk(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return  # only POSIX opens folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
