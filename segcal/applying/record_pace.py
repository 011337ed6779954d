"""How often run.json is written: after every case, unless it has grown so long that writing it would hold up the run.

The file is written as a whole. With 10,000 cases that takes longer than many workers need for a case, so a long record
is written less often: a share of the time that stays small. Whoever is killed then does the last few cases again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from segcal.applying.record import RunRecord
from segcal.errors import OutputError

QUICK_S = 0.05
"""A record that is written as fast as this is written after every case."""
SHARE = 0.05
"""Of the time, spent on writing a longer one."""


@dataclass(slots=True)
class RecordPace:
    """When the record was last written, and how long that took."""

    clock: Callable[[], float] = time.monotonic
    _took: float = 0.0
    _ended: float = 0.0
    _unsaved: bool = False

    def save(self, record: RunRecord, out: Path) -> None:
        """Write the record now, or leave it to a later call."""
        self._unsaved = True
        if self._took <= QUICK_S or self.clock() - self._ended >= self._took / SHARE:
            self._write(record, out)

    @contextmanager
    def saved_at_the_end(self, record: RunRecord, out: Path) -> Iterator[None]:
        """Write what was left to later when the block ends, also by an error or Ctrl-C."""
        try:
            yield
        except BaseException:
            with suppress(OutputError):  # the error under way matters more
                self._write_rest(record, out)
            raise
        self._write_rest(record, out)

    def _write_rest(self, record: RunRecord, out: Path) -> None:
        if self._unsaved:
            self._write(record, out)

    def _write(self, record: RunRecord, out: Path) -> None:
        start = self.clock()
        record.save(out)
        self._ended = self.clock()
        self._took, self._unsaved = self._ended - start, False
