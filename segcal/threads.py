"""One thread where sums must not depend on how many there are.

torch splits sums, matrix products and the ends of softmax by the number of threads, so the last digits of a fit
would depend on the machine's settings. A fit therefore runs on one thread; only the unpacking of member files, which
adds nothing up, has threads of its own. The same bytes come out, and on a busy machine it is faster, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]


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
