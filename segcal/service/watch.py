"""Turns every finished nnU-Net output that appears in a folder into one job, exactly one.

What was taken is remembered by the store, in the transaction that makes the job. This module only finds out what is
there and finished; it may be killed, started again, or run twice at once.
"""

from __future__ import annotations

import logging
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from segcal.errors import UsageError
from segcal.service.errors import IntakePausedError, QueueFullError, StoreError, UnknownError
from segcal.service.requests import CaseName, CaseRequest
from segcal.service.settings import WatchSettings
from segcal.service.store import Store
from segcal.service.watched_output import Output, Signature, fingerprint, outputs_in

log = logging.getLogger("segcal.service.watch")

_CASE_NAME: TypeAdapter[str] = TypeAdapter(CaseName)


@dataclass(slots=True)
class _Sighting:
    """What is remembered of an output between two looks.

    Attributes:
        files: as they were at the last look.
        since: when they were first seen like this.
        over: taken, or known not to be wanted; nothing is done until the files change.
    """

    files: Signature
    since: float
    over: bool = False


class Watcher:
    """Looks after one folder.

    Args:
        settings: the folder, its calibrator and how patient to be.
        store: where jobs go.
        queue_limit: jobs that may wait.
        check_intake: raises IntakePausedError while nothing may come in.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        settings: WatchSettings,
        store: Store,
        *,
        queue_limit: int,
        check_intake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        # Resolved at the start, so that the same folder by another name is the same folder.
        self._folder = settings.folder.resolve()
        self._store = store
        self._queue_limit = queue_limit
        self._check_intake = check_intake
        self._clock = clock
        self._seen: dict[str, _Sighting] = {}
        self._said: set[tuple[Any, ...]] = set()
        self._trouble = ""

    def run(self, stop: threading.Event) -> None:
        """Look until told to stop; trouble is logged and passes or stays, but never ends it."""
        log.info("watching %s", self._folder)
        while not stop.is_set():
            self.look()
            stop.wait(self._settings.poll_seconds)

    def look(self) -> int:
        """Look once; how many outputs became jobs."""
        taken = 0
        try:
            outputs = outputs_in(self._folder)
            self._forget({output.case for output in outputs})
            for output in outputs:
                taken += self._consider(output)
        except OSError as error:
            self._in_trouble(f"{self._folder}: cannot be read ({error.strerror or error}); waiting for it to come back")
        except (QueueFullError, IntakePausedError, StoreError, UsageError) as error:
            self._in_trouble(f"{self._folder}: outputs have to wait: {error}")
        except Exception:
            log.exception("watching %s: an internal error; it goes on", self._folder)
        else:
            self._trouble = ""
        return taken

    def _consider(self, output: Output) -> int:
        """Take an output if it is whole, wanted and new; how many jobs that made."""
        sighting = self._seen.get(output.case)
        if sighting is None or sighting.files != output.files:
            self._seen[output.case] = sighting = _Sighting(output.files, self._clock())
        settled = self._clock() - sighting.since >= self._settings.settle_seconds
        if sighting.over or not settled:
            return 0
        if not self._is_name(output.case):
            sighting.over = True
        elif output.missing:
            self._say_once("%s: %s is waiting for %s", output.case, " and ".join(output.missing))
        else:
            return self._take(output, sighting)
        return 0

    def _take(self, output: Output, sighting: _Sighting) -> int:
        try:
            name = fingerprint(self._folder, output)
        except FileNotFoundError:
            return 0  # being replaced; the next look shows
        except zipfile.BadZipFile as error:
            self._say_once("%s: %s.npz is not a whole archive (%s); waiting for it to change", output.case, str(error))
            return 0
        except OSError as error:
            self._say_once("%s: %s cannot be read (%s)", output.case, error.strerror or str(error))
            return 0
        folder = str(self._folder)
        if not self._store.watched.known(folder, output.case, name):
            self._check_intake()
            self._check_calibrator()
        request = CaseRequest(
            calibrator=self._settings.calibrator, case=output.case, source=folder, files=output.names, fingerprint=name
        )
        job = self._store.watched.take(
            folder, output.case, name, request, batch=self._folder.name, queue_limit=self._queue_limit
        )
        sighting.over = True
        if job is None:
            return 0
        log.info("%s: %s is job %s", folder, output.case, job.id)
        return 1

    def _check_calibrator(self) -> None:
        try:
            retired = self._store.calibrators.get(self._settings.calibrator).retired
        except UnknownError:
            return  # the job says so, with what to do
        if retired is not None:
            raise UsageError("their calibrator was retired; start the service with another --calibrator")

    def _is_name(self, case: str) -> bool:
        try:
            _CASE_NAME.validate_python(case)
        except ValidationError:
            self._say_once(
                "%s: %r is passed over: a temporary file, or no name of a case (letters, digits, . _ - and spaces, "
                "beginning with a letter or digit)",
                case,
            )
            return False
        return True

    def _forget(self, present: set[str]) -> None:
        """What is no longer there is new when it comes back."""
        for case in self._seen.keys() - present:
            del self._seen[case]

    def _say_once(self, text: str, *values: str) -> None:
        if (text, *values) not in self._said:
            self._said.add((text, *values))
            log.warning(text, self._folder, *values)

    def _in_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            log.warning("%s", text)
