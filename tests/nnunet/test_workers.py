"""Worker processes: the result comes back, and one that raises or dies names its case and leaves no hang."""

from __future__ import annotations

import os
import signal

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
