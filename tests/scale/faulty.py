"""Work that goes wrong in a real worker process, once or always; importable there, so it cannot live in a test file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from segcal.case_map import CaseMap, Item, Outcome, Result
from segcal.errors import DataError

Fault = Literal["kill", "kill while writing", "eat memory", "memory error", "data error", "bug"]


@dataclass(frozen=True, slots=True)
class Faulty:
    """Does `work`, but on one case the worker fails: each time, or only if `once` is not there yet."""

    work: Callable[[Any], Any]
    case: str
    fault: Fault
    once: Path | None = None

    def __call__(self, item: Any) -> Any:
        if str(item) == self.case and self._due():
            _fail(self.case, self.fault)
        return self.work(item)

    def _due(self) -> bool:
        if self.once is None:
            return True
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def with_fault(case_map: CaseMap, case: str, fault: Fault, once: Path | None = None) -> CaseMap:
    """The same place to work at, with a fault in it."""

    def faulty(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]:
        return case_map(Faulty(work, case, fault, once), items)

    return faulty


def _fail(case: str, fault: Fault) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "kill while writing":
        _kill_at_the_next_file()
    elif fault == "eat memory":
        eaten = []
        while True:  # the nanny ends us
            eaten.append(bytearray(os.urandom(1 << 20) * 32))
            time.sleep(0.05)
    elif fault == "memory error":
        raise MemoryError
    elif fault == "data error":
        raise DataError(f"{case}: nothing but noise")
    elif fault == "bug":
        raise KeyError("nobody thought of this")


def _kill_at_the_next_file() -> None:
    """The process dies with half a map in a temporary file."""
    import segcal.applying.files as files

    def half(path: Path, arrays: object) -> None:
        path.write_bytes(b"PK half a map")
        os.kill(os.getpid(), signal.SIGKILL)

    files.write_npz = half  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Slow:
    """Says which process did it, after a while that is longer for earlier items: they finish in the wrong order."""

    n_items: int

    def __call__(self, item: int) -> tuple[int, int]:
        time.sleep(0.02 * (self.n_items - item))
        return item, os.getpid()


@dataclass(frozen=True, slots=True)
class Meet:
    """Two items wait for each other, 0 for 1 and 2 for 3: both must be under way at once, in two processes."""

    folder: Path

    def __call__(self, item: int) -> int:
        (self.folder / str(item)).touch()
        deadline = time.monotonic() + 120  # a new worker on a busy machine imports for long before its first item
        while not (self.folder / str(item ^ 1)).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{item} was alone")
            time.sleep(0.01)
        return os.getpid()


def sleep_long(item: int) -> int:
    time.sleep(20)
    return item


def unreadable() -> None:
    """As Dask says it of a scheduler that lacks what a task is made of."""
    raise RuntimeError("Error during deserialization of the task graph. This frequently\noccurs if environments differ")


def raising(error: Exception) -> None:
    raise error


class Stubborn(Exception):  # noqa: N818
    """Pickled, it would be made again from its message alone, which is too little."""

    def __init__(self, item: str, reason: str) -> None:
        super().__init__(f"{item} {reason}")


def raise_stubborn(item: str) -> None:
    raise Stubborn(item, "is no file")


@dataclass(frozen=True, slots=True)
class Held:
    """Does `work`, but `failing` fails once `held` is under way, and `held` goes on when it is let go."""

    work: Callable[[Any], Any]
    failing: str
    held: str
    folder: Path

    @property
    def under_way(self) -> Path:
        return self.folder / "under_way"

    @property
    def let_go(self) -> Path:
        return self.folder / "let_go"

    @property
    def over(self) -> Path:
        return self.folder / "over"

    def __call__(self, item: Any) -> Any:
        if str(item) == self.failing:
            wait_for(self.under_way)
            raise DataError(f"{item}: nothing but noise")
        if str(item) != self.held:
            return self.work(item)
        self.under_way.touch()
        wait_for(self.let_go)
        try:
            return self.work(item)
        finally:
            self.over.touch()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.01)
