"""Worker processes: the result comes back, and one that raises or dies names its case and leaves no hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from segcal.errors import CaseError, DataError
from segcal.nnunet.workers import Workers, default_workers, first_done


def add(shared: int, value: int) -> int:
    """A step that works."""
    return shared + value


def refuse(shared: int) -> int:
    """A step that fails with an error of ours."""
    raise DataError(f"case_b: {shared} is wrong")


def die(shared: int) -> int:
    """A step whose process the system kills."""
    os.kill(os.getpid(), signal.SIGKILL)
    return shared


def test_one_process_after_another_failure_still_works() -> None:
    """An error of ours comes back as itself; a killed process names its case and is replaced."""
    with Workers(1, 40) as workers:
        assert workers.submit("case_a", add, 2).result() == 42
        refused = workers.submit("case_b", refuse)
        with pytest.raises(DataError, match="case_b: 40 is wrong"):
            refused.result()
        killed = workers.submit("case_c", die)
        with pytest.raises(CaseError, match=r"case_c: the worker process .* died.*-nps"):
            killed.result()
        again = workers.submit("case_d", add, 3)
        assert first_done([again]).result() == 43


SLEEPER = """
from segcal.nnunet.workers import Workers
from tests.nnunet.test_workers import own_id_then_sleep
if __name__ == "__main__":
    import sys
    Workers(1, sys.argv[1]).submit("case_a", own_id_then_sleep).result()
"""


def own_id_then_sleep(shared: str) -> None:
    """A step that says where it runs and takes very long."""
    Path(shared).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the state of a process from /proc")
def test_a_worker_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    parent = subprocess.Popen([sys.executable, tmp_path / "sleeper.py", tmp_path / "pid"], env=environment)
    try:
        _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    finally:
        parent.kill()
        parent.wait()
    worker = int((tmp_path / "pid").read_text())
    _until(lambda: not _is_alive(worker))


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for a minute")


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_more_tasks_than_processes_are_taken() -> None:
    """The bound on cases in memory: there is no queue in front of the processes."""
    with Workers(0, 40) as workers, pytest.raises(StopIteration):
        workers.submit("case_a", add, 2)


@pytest.mark.parametrize(("cores", "n_cases", "expected"), [(8, 100, 3), (8, 2, 1), (8, 1, 0), (2, 100, 1), (1, 9, 0)])
def test_default_is_that_of_nnunet_where_there_is_work_for_it(
    cores: int, n_cases: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_workers(n_cases) == expected
