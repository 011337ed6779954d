"""What runs inside a worker: one case at a time, on one thread, with the versions of whoever asked for it."""

from __future__ import annotations

import pickle
import platform
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from distributed import get_worker
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

import segcal
from segcal.errors import ClusterError, LostCaseError, MissingFileError
from segcal.io.atomic import written_while

MEMORY_ADVICE = "give each worker more memory (fewer workers on a machine)"
SAME_ENVIRONMENT = "Start scheduler and workers from the same environment."


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What is asked of the workers.

    Attributes:
        work: the function.
        versions: it has to run with.
        elsewhere: the workers may be on other machines, which may not see the same files.
    """

    work: Callable[[Any], Any]
    versions: Mapping[str, str]
    elsewhere: bool


@dataclass(frozen=True, slots=True)
class Raised:
    """What the work raised, as a result: told of an error, Dask shows its text to whoever opens a dashboard or a log.

    It names the case, and in some clinics a case is named after its patient.
    """

    error: Exception


@cache
def versions() -> dict[str, str]:
    """Whatever the last digits of a result, or the bytes of a packed map, depend on, in this process."""
    packages = {name: version(name) for name in ("torch", "numpy", "scipy", "numba", "edt", "isal")}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"segcal": segcal.__version__, **packages, "python": python}


def difference(expected: Mapping[str, str], found: Mapping[str, str], who: str) -> str | None:
    """In words, how a worker's versions differ from those of the process that asks; None if they do not."""
    apart = [name for name in expected if found.get(name) != expected[name]]
    if not apart:
        return None
    theirs = ", ".join(f"{name} {found.get(name, 'missing')}" for name in apart)
    ours = ", ".join(f"{name} {expected[name]}" for name in apart)
    return (
        f"worker {who} runs {theirs}, this process {ours}: results could differ from those of one machine. "
        f"{SAME_ENVIRONMENT}"
    )


def open_job(pickled: bytes) -> Job:
    """The first task of a run; lost with its worker, it is simply done again on another one."""
    try:
        job = pickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        raise ClusterError(
            f"worker {get_worker().address} has not what is to be done ({error}). {SAME_ENVIRONMENT}"
        ) from error
    assert isinstance(job, Job)
    return job


def run_item(job: Job, item: Any) -> Any:
    """One case: its result, or what was `Raised`."""
    try:
        return _run_item(job, item)
    except Exception as error:
        return Raised(_portable(error))


def _run_item(job: Job, item: Any) -> Any:
    _one_thread_for_good()
    worker = get_worker()
    who, task = worker.address, worker.get_current_task()

    def wanted() -> bool:
        """Dask cannot stop what runs: it forgets the task, or notes that it was cancelled."""
        state = worker.state.tasks.get(task)
        return state is not None and state.state != "cancelled"

    if (apart := difference(job.versions, versions(), who)) is not None:
        raise ClusterError(apart)
    try:
        with written_while(wanted):
            return job.work(item)
    except MissingFileError as error:
        if not job.elsewhere:
            raise
        hint = f"So worker {who} sees it: is the folder on a file system that every worker sees under the same path?"
        raise MissingFileError(f"{error} {hint}") from error
    except MemoryError as error:
        raise LostCaseError(f"{item}: worker {who} ran out of memory; {MEMORY_ADVICE}.") from error


def _portable(error: Exception) -> Exception:
    """As it arrives in another process; where it was raised becomes a note, for `--debug`."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(where)
    return error


@cache
def _one_thread_for_good() -> None:
    """A worker is one of many on its machine, and sums depend on the number of threads (docs/adr/0005)."""
    torch.set_num_threads(1)
    threadpool_limits(limits=1)
