"""How many voxels are worked on at once: as many as a budget of bytes allows, whatever the number of classes.

Work on voxels makes a handful of temporary arrays (class, voxel) at a time. A fixed number of voxels would make them
small for two classes and huge for a hundred. The budget is what one such array may take; few megabytes keep the
temporaries in the cache of a processor, a graphics card likes more. No float32 result on the CPU depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from segcal.errors import ParameterError, UsageError

CHUNK_BYTES = 1 << 22
"""The budget unless `chunk_budget` says otherwise: 131,072 voxels of five classes in float32."""

FEWEST_VOXELS = 1 << 10
"""Smaller chunks cost more in calls than they save in memory; also the least that a budget may ask for."""

MOST_VOXELS = 1 << 17
"""Sums over more voxels than this at once would not be exact in float64 (`segcal.metrics.fixed_point`)."""


class _Budget:
    """The process-wide setting, seen by all threads."""

    def __init__(self) -> None:
        self.taken = Lock()
        self.n_bytes = CHUNK_BYTES


_BUDGET = _Budget()


def chunk_voxels(n_classes: int, *, value_bytes: int = 4) -> int:
    """Voxels of a chunk: the largest power of two whose (class, voxel) array keeps to the budget.

    A power of two, so that chunks begin where a vector register begins: the rounding of a voxel's value must not
    depend on its place in a chunk.

    Args:
        n_classes: values a voxel has.
        value_bytes: size of one of them.
    """
    fitting = max(_BUDGET.n_bytes // (n_classes * value_bytes), 1)
    return min(max(1 << (fitting.bit_length() - 1), FEWEST_VOXELS), MOST_VOXELS)


def chunk_slices(n_voxels: int, step: int) -> Iterator[slice]:
    """Cut flattened voxels into slices of `step`; the last may be shorter."""
    for begin in range(0, n_voxels, step):
        yield slice(begin, min(begin + step, n_voxels))


@contextmanager
def chunk_budget(n_bytes: int) -> Iterator[None]:
    """Let one array of a chunk take at most so many bytes inside the block, in every thread of the process.

    Raises:
        UsageError: another block has not ended yet.
    """
    if n_bytes < 1:
        raise ParameterError(f"a chunk needs a budget of at least one byte, got {n_bytes}")
    if not _BUDGET.taken.acquire(blocking=False):
        # Blocks that overlap could end in any order, and the last to end would leave the budget of another behind.
        raise UsageError(
            f"a chunk_budget of {_BUDGET.n_bytes:,} bytes is in force in this process; put one block around the whole "
            "run, which all threads see"
        )
    _BUDGET.n_bytes = n_bytes
    try:
        yield
    finally:
        _BUDGET.n_bytes = CHUNK_BYTES
        _BUDGET.taken.release()
