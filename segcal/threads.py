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
from threading import Lock
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Limits:
    """The process-wide setting. Blocks may nest and overlap in several threads: the first sets it, the last resets."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._depth = 0
        self._before = 1
        self._limits = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
                self._limits.enter_context(threadpool_limits(limits=1))
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._limits.close()
                torch.set_num_threads(self._before)

    def allowed(self) -> int:
        """Threads that torch was allowed before the first block."""
        with self._lock:
            return self._before if self._depth else torch.get_num_threads()


_LIMITS = _Limits()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and BLAS on one thread inside the block; the settings before it come back after it."""
    with _LIMITS:
        yield


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Run independent pieces of work at the same time, each on one thread, and return their results in order.

    As many run at once as torch was allowed threads, so that setting is honoured, and no result depends on it.
    """
    n_threads = min(_LIMITS.allowed(), len(items))
    with one_thread():
        if n_threads < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(n_threads, thread_name_prefix="segcal-work") as executor:
            return list(executor.map(work, items))
