"""Worker processes that each do one case at a time, so that one that dies can be named by its case.

They are started afresh (spawn), because a process that holds a GPU cannot be forked. What all cases share is handed
over once, at the start.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import torch

from segcal.errors import CaseError

Shared = TypeVar("Shared")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class WorkerDiedError(CaseError):
    """The process that had a case is gone; a file it was writing is left unfinished under its temporary name."""


@dataclass(frozen=True, slots=True, eq=False)
class Task(Generic[Result]):
    """A step of a case, under way in a worker."""

    case_id: str
    future: Future[Result]

    def result(self) -> Result:
        """Wait and hand over the result, or raise what the step raised.

        Raises:
            WorkerDiedError: the process was killed.
        """
        try:
            return self.future.result()
        except BrokenProcessPool:
            raise WorkerDiedError(
                f"{self.case_id}: the worker process that had this case died. Most often the system killed it because "
                "memory ran out: use fewer workers (-npp, -nps), or 0 for none."
            ) from None


class Workers(Generic[Shared]):
    """`n` processes, started when they are first needed; a dead one is replaced by the next task.

    Args:
        n: how many.
        shared: handed to every process once; functions given to `submit` get it as their first argument.
    """

    def __init__(self, n: int, shared: Shared) -> None:
        # Plain bytes: tensors inside would otherwise travel as shared memory, which lives only as long as the sender.
        self._start = (pickle.dumps(shared), torch.get_num_threads())
        self._executors: list[ProcessPoolExecutor | None] = [None] * n
        self._tasks: list[Task[Any] | None] = [None] * n

    def __len__(self) -> int:
        return len(self._executors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the running tasks end, so that no process outlives the run."""
        for executor in self._executors:
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)

    def submit(
        self,
        case_id: str,
        step: Callable[Concatenate[Shared, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Task[Result]:
        """Start a step in a free process; the caller sees to it that there is one."""
        slot = next(k for k, task in enumerate(self._tasks) if task is None or task.future.done())
        task = Task(case_id, self._executor(slot).submit(_run, step, args, kwargs))
        self._tasks[slot] = task
        return task

    def _executor(self, slot: int) -> ProcessPoolExecutor:
        executor, last = self._executors[slot], self._tasks[slot]
        if executor is not None and last is not None and isinstance(last.future.exception(), BrokenProcessPool):
            executor.shutdown(wait=True)
            executor = None
        if executor is None:
            spawn = multiprocessing.get_context("spawn")
            executor = ProcessPoolExecutor(1, mp_context=spawn, initializer=_start, initargs=self._start)
            self._executors[slot] = executor
        return executor


def first_done(tasks: Sequence[Task[Result]]) -> Task[Result]:
    """Wait until one of the tasks is done; of several the first in order."""
    done, _ = wait([task.future for task in tasks], return_when=FIRST_COMPLETED)
    return next(task for task in tasks if task.future in done)


def default_workers(n_cases: int) -> int:
    """As many as nnU-Net takes (3), but none that would have nothing to do: starting one takes seconds."""
    return max(0, min(3, n_cases - 1, (os.cpu_count() or 1) - 1))


_shared: Any = None


def _start(content: bytes, n_threads: int) -> None:
    global _shared
    # Ctrl-C reaches the whole group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(n_threads)  # sums are split by it, so another number could change the last digit
    _shared = pickle.loads(content)  # written by the parent a moment ago


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(step: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    return step(_shared, *args, **kwargs)
