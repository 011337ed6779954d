"""The one seam between the stages and where their work is done: a function over many cases, results in order.

A stage says what is done for one case, as a pure function with a small result, and which cases there are. It does not
know whether they run here one after the other (`in_process`, the default) or on many machines at once
(`segcal.scale`); results come back in the order of the cases, so both give the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

from segcal.threads import allowed_threads

Item = TypeVar("Item")
Data = TypeVar("Data")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Outcome(Generic[Item, Result]):
    """What became of one case: a value or an error.

    Attributes:
        item: which.
        value: what the work returned; only there without an error.
        error: what it raised.
    """

    item: Item
    value: Result | None = None
    error: Exception | None = None

    def result(self) -> Result:
        """The value; raises the error if there was one."""
        if self.error is not None:
            raise self.error
        return cast(Result, self.value)


class CaseMap(Protocol):
    """Runs a function over cases.

    `work` is a pure function: what it holds and the items must be picklable, results picklable and small, and it may
    be called twice for an item when a machine fails. `str(item)` names the case in messages. Items are drawn one by
    one, at most a bounded number ahead of the outcomes handed out, so an item may carry what was learnt from earlier
    results as long as the final result does not depend on how much that was. Outcomes come in the order of the items.

    Closing the iterator early stops what has not begun. An error of the work is in its outcome; whoever runs the work
    raises only what concerns the run as a whole.
    """

    def __call__(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]: ...


class ReadAhead(ABC, Generic[Item, Data, Result]):
    """Work in two steps, so that one process can read a case while it works on the one before."""

    @abstractmethod
    def read(self, item: Item) -> Data:
        """From files to memory; runs in a thread of its own, beside `finish` of the case before."""

    @abstractmethod
    def finish(self, item: Item, data: Data) -> Result:
        """The rest."""

    def __call__(self, item: Item) -> Result:
        return self.finish(item, self.read(item))


def in_process(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]:
    """The `CaseMap` of one process: a case after the other.

    One is being read ahead if the work says how and there may be a second thread.
    """
    if isinstance(work, ReadAhead) and allowed_threads() > 1:
        with closing(_reading_ahead(work, iter(items))) as outcomes:
            yield from outcomes
        return
    for item in items:
        try:
            outcome = Outcome(item, work(item))
        except Exception as error:
            outcome = Outcome(item, error=error)
        yield outcome
        del outcome  # before the next case makes its own


def _reading_ahead(work: ReadAhead[Item, Data, Result], items: Iterator[Item]) -> Generator[Outcome[Item, Result]]:
    """Items are drawn by the caller's thread; the next case is read while the one before is finished."""
    nothing = object()
    with ThreadPoolExecutor(1, thread_name_prefix="segcal-ahead") as reader:

        def begin(item: object) -> Future[Data] | None:
            return None if item is nothing else reader.submit(work.read, cast(Item, item))

        item = next(items, nothing)
        reading = begin(item)
        try:
            while reading is not None:
                reading.exception()  # waits, so that never more than two cases are in memory
                following = next(items, nothing)
                current, reading = reading, begin(following)
                outcome = _finished(work, cast(Item, item), current)
                del current  # and with it the case
                yield outcome
                item = following
        finally:
            if reading is not None:
                reading.cancel()


def _finished(work: ReadAhead[Item, Data, Result], item: Item, reading: Future[Data]) -> Outcome[Item, Result]:
    try:
        return Outcome(item, work.finish(item, reading.result()))
    except Exception as error:
        return Outcome(item, error=error)
