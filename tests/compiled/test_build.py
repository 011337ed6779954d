"""How loops are compiled: without waiting for the lock, and also where nothing can be kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segcal.compiled.build import compiled

ROOT = Path(__file__).resolve().parents[2]

ONLY_READABLE = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []  # as in a read-only container without a home
import numpy as np
from segcal.compiled.build import compiled
def doubled(values):
    for i in range(values.size):
        values[i] *= 2
values = np.array([1, 2])
compiled(doubled)(values)
print(values.tolist())
"""


@compiled
def long_loop(values: NDArray[np.float64], n_times: int) -> float:
    total = 0.0
    for _ in range(n_times):
        for i in range(values.size):
            total += values[i]  # one after the other: half a second for 10^9 of them, and more
    return total


def test_other_threads_run_beside_a_loop() -> None:
    values = np.ones(1000)
    long_loop(values, 1)
    thread = threading.Thread(target=long_loop, args=(values, 500_000))
    thread.start()
    n_turns = 0
    while thread.is_alive():
        n_turns += 1
    assert n_turns > 1000  # with the interpreter lock held there would be none until the end


def test_loops_also_run_where_nothing_can_be_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONLY_READABLE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "[2, 4]", done.stderr
