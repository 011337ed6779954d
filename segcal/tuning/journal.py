"""The file that keeps finished trials: opened again after a kill, and every trouble with it told by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from segcal.errors import FileFormatError, OutputError, SegcalError
from segcal.io.atomic import write_failure

_LOCK_SECONDS = 5
"""The lock is held for one line at a time; one this old was left by a process that was killed."""


def open_journal(path: Path) -> JournalStorage:
    """Open or begin the file.

    Raises:
        FileFormatError: it holds something else.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_line(path)
    # Optuna's default lock is a link, which dangles for a relative path and is then never found to be stale.
    lock = JournalFileOpenLock(str(path), grace_period=_LOCK_SECONDS)
    try:
        return JournalStorage(JournalFileBackend(str(path), lock))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{path}: not a file of tuning trials, or damaged ({type(error).__name__}: {error}). "
            "Give --storage the name of a new file."
        ) from error


@contextmanager
def naming_the_file(path: Path) -> Iterator[None]:
    """Turn a full disk and the like into an error that says which file could not be written."""
    try:
        yield
    except SegcalError:
        raise
    except OSError as error:
        raise OutputError(f"{path}: finished trials cannot be kept here: {write_failure(error)}.") from error


def _drop_torn_line(path: Path) -> None:
    """A process killed while it wrote leaves half a line, and what is appended to it could not be read."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if 0 < whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
