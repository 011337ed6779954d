"""Ctrl-C and SIGTERM while worker processes start and end: heard, but only when it is safe to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def later_stop() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM in this block are heard at its end, once; yields those that wait, for whoever forgets them.

    Python's handlers are replaced, because holding signals back in one thread is not enough: the system then gives them
    to another one, such as those of a BLAS library, and Python hears them all the same.
    """
    if current_thread() is not main_thread():  # where Python hears no signals
        yield []
        return
    heard: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if heard:
            signal.raise_signal(heard[0])


@contextmanager
def deaf_processes() -> Iterator[None]:
    """Processes started by threads that begin in this block, ever, do not hear Ctrl-C: the command does, and ends them.

    A terminal sends it to all processes, and every worker would print a traceback. Threads and processes inherit the
    signals that are held back where they are started.
    """
    resource_tracker.ensure_running()  # first asked for by one of those threads, it would let signals through there
    with later_stop(), _held_back(signal.SIGINT):
        yield


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
