"""How loops are compiled: without waiting for the lock, and also where nothing can be kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from segcal.compiled.build import _Files, compiled

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


KEPT = """
import sys
import numpy as np
from segcal.compiled import build
from segcal.compiled.winners import find_differing
build._sources = lambda: sys.argv[1]
found = np.empty(2, np.int64)
probs = np.array([0.9, 0.2, 0.1, 0.8], np.float32)
print(find_differing(probs, 2, 2, np.array([0, 0], np.uint8), found), sum(find_differing.stats.cache_hits.values()))
"""


def run_kept(tmp_path: Path, sources: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", KEPT, sources],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.strip() or done.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled loops, as a first run leaves it."""
    folder = tmp_path_factory.mktemp("kept")
    assert run_kept(folder, "a") == "1 0"
    return folder


@pytest.fixture
def kept(filled: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(filled, tmp_path / "kept"))


def test_code_of_earlier_runs_is_used_until_any_loop_changes(kept: Path) -> None:
    assert run_kept(kept, "a") == "1 1"
    assert run_kept(kept, "b") == "1 0"


@pytest.mark.parametrize("content", [b"", Random(1).randbytes(3000)], ids=["empty", "random"])
def test_a_damaged_cache_costs_a_compilation_and_nothing_else(kept: Path, content: bytes) -> None:
    damaged = list(kept.rglob("*.nbc"))
    assert damaged
    for path in damaged:
        path.write_bytes(content)
    assert run_kept(kept, "a") == "1 0"
    assert run_kept(kept, "a") == "1 1"


def test_a_run_that_ends_while_it_keeps_code_leaves_none_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By version, signature or processor: what is found under a key was put there under it, and whole."""
    before, now = (_Files(str(tmp_path), "loop-1.py311", stamp) for stamp in (1, 2))  # type: ignore[no-untyped-call]
    before.save(("float32",), "old")
    assert before.load(("float32",)) == "old"
    with monkeypatch.context() as patched:
        patched.setattr(_Files, "_save_data", lambda *_: sys.exit("no time left"))
        for key in ("float32",), ("float64",):
            with pytest.raises(SystemExit):
                now.save(key, "new")
    assert now.load(("float32",)) is now.load(("float64",)) is None
    assert before.load(("float64",)) is None
