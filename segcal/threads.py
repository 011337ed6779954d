"""One thread where results must not depend on how many there are.

torch splits sums, matrix products and the ends of softmax by the number of threads, so the last digits of a fit or a
map would depend on the machine's settings. Everything therefore computes on one thread, and independent pieces of work
(members, pipelines) run side by side. The same bytes come out, and it is faster: threads that share one small
operation mostly wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Lock, local
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Limits:
    """The setting of BLAS, which is the process's, and that of torch, which every thread has for itself.

    Blocks may nest and overlap in several threads. The first limits BLAS and the last releases it; torch is limited in
    each thread that enters, because OpenMP takes the number of threads from the one that asks.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._depth = 0
        self._before = 1
        self._limits = ExitStack()
        self._own = _Own()

    def __enter__(self) -> None:
        with self._lock:
            own = torch.get_num_threads()
            if self._depth == 0:
                self._before = own
                self._limits.enter_context(threadpool_limits(limits=1))
            self._depth += 1
            self._own.before.append(own)
            torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            own = self._own.before.pop()
            if self._depth == 0:
                self._limits.close()
            # The last one also sets what threads that begin later will find.
            torch.set_num_threads(own if self._depth else self._before)

    def allowed(self) -> int:
        """Threads that torch was allowed before the first block."""
        with self._lock:
            return self._before if self._depth else torch.get_num_threads()


class _Own(local):
    """What each thread found when it entered its blocks."""

    def __init__(self) -> None:
        self.before: list[int] = []


_LIMITS = _Limits()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and BLAS on one thread inside the block; the settings before it come back after it."""
    with _LIMITS:
        yield


def allowed_threads() -> int:
    """Threads that may compute at once: what torch was given, by OMP_NUM_THREADS, else one a core.

    Reading ahead and decoding members beside each other keep to it too; with one nothing starts a thread.
    """
    return _LIMITS.allowed()


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Run independent pieces of work at the same time, each on one thread, and return their results in order.

    As many run at once as torch was allowed threads, so that setting is honoured, and no result depends on it.
    """
    n_threads = min(allowed_threads(), len(items))
    with one_thread():
        if n_threads < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(n_threads, thread_name_prefix="segcal-work") as executor:
            return list(executor.map(one_thread()(work), items))
