"""One thread where sums must not depend on how many there are.

torch splits sums, matrix products and the ends of softmax by the number of threads, so the last digits of a fit
would depend on the machine's settings. A fit therefore runs on one thread; only the unpacking of member files, which
adds nothing up, has threads of its own. The same bytes come out, and on a busy machine it is faster, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and BLAS on one thread inside the block; the settings before it come back after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Run independent pieces of work at the same time, each on one thread, and return their results in order.

    As many run at once as torch was allowed threads, so that setting is honoured, and no result depends on it.
    """
    n_threads = torch.get_num_threads()
    with one_thread():
        if min(n_threads, len(items)) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(n_threads, thread_name_prefix="segcal-work") as executor:
            return list(executor.map(work, items))
