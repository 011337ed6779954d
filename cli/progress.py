"""How far a long run has come: bars on a terminal, a line now and then in a log file."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from segcal.types import Progress  # not at run time: it brings numpy

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show progress(stage, done, total) on stderr, so that stdout keeps nothing but results."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bars() as report:
            yield report
    else:
        yield PlainLines(sys.stderr)


@contextmanager
def _bars() -> Iterator[Progress]:
    # rich is only worth its import time where there is a terminal.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g}/s")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), Rate())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}
        lock = threading.Lock()

        def report(stage: str, done: int, total: int) -> None:
            with lock:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


@dataclass
class PlainLines:
    """`stage: 3 of 20, 0.8/s, 21 s left`: at the first and the last step of a stage, and every ten seconds between."""

    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    _stages: dict[str, _Stage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _opened: float = field(init=False)

    def __post_init__(self) -> None:
        self._opened = self.clock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            now = self.clock()
            seen = self._stages.get(stage)
            if seen is None:
                # A resumed run starts with many steps done; only the last of them happened just now.
                start = max((known.last_step for known in self._stages.values()), default=self._opened)
                seen = self._stages[stage] = _Stage(started=start, steps_before=max(done - 1, 0))
            seen.last_step = now
            if done < total and now - seen.last_line < SECONDS_BETWEEN_LINES:
                return
            seen.last_line = now
            print(seen.text(stage, done, total, now), file=self.stream, flush=True)


@dataclass
class _Stage:
    started: float
    steps_before: int
    last_step: float = 0.0
    last_line: float = float("-inf")

    def text(self, stage: str, done: int, total: int, now: float) -> str:
        parts = [f"{stage}: {done} of {total}"]
        seconds, steps = now - self.started, done - self.steps_before
        if seconds > 0 and steps > 0:
            rate = steps / seconds
            parts.append(f"{rate:.3g}/s")
            if done < total:
                parts.append(f"{(total - done) / rate:.0f} s left")
        return ", ".join(parts)
