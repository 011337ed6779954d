"""The file that keeps finished trials: opened again after a kill, and every trouble with it told by its name."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from segcal.errors import FileFormatError, OutputError
from segcal.io.atomic import write_failure

_LOCK_SECONDS = 5
"""The lock is held for one line at a time; one this old was left by a process that was killed."""
_BEGINNING = b'{"op_code":'
"""Of every line Optuna writes."""


def open_journal(path: Path) -> JournalStorage:
    """Open or begin the file.

    Raises:
        FileFormatError: it holds something else.
        OutputError: it cannot be written; also later, whenever a trial is kept.
    """
    path = path.absolute()
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
    try:
        return JournalStorage(_JournalFile(path))
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise _no_journal(path, f"{type(error).__name__}: {error}") from error


class _JournalFile(JournalFileBackend):
    """Optuna's file, which says its name when it cannot be written; what happens in a trial is not its business."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Optuna's default lock is a link, which dangles for a relative path and is then never found to be stale.
        lock = JournalFileOpenLock(str(path), grace_period=_LOCK_SECONDS)
        with _naming(path):
            super().__init__(str(path), lock)

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        with _naming(self._path):
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with _naming(self._path):
            super().append_logs(logs)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn a full disk and the like into an error that says which file could not be written."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: finished trials cannot be kept here: {write_failure(error)}.") from error


def _drop_torn_line(path: Path) -> None:
    """A process killed while it wrote leaves half a line, and what is appended to it could not be read."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        content = file.read()
        if not content.startswith(_BEGINNING[: len(content)]):
            raise _no_journal(path, f"it begins with {content[:20]!r}")
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())


def _no_journal(path: Path, why: str) -> FileFormatError:
    return FileFormatError(
        f"{path}: not a file of tuning trials, or damaged: {why}. Give --storage the name of a new file."
    )
