"""A child whose jobs behave as their request's manifest says: a stand-in for the work, not for the process around it.

`/fake/NAME` or `/fake/NAME/ARGUMENT`; started as the real one is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import ClusterAwayError, ClusterError, DataError
from segcal.io.atomic import atomic_write
from segcal.service.child import main
from segcal.service.files import ServiceFiles
from segcal.service.model import NewCase
from segcal.service.work.outcome import Outcome

STEPS = 20


@dataclass(frozen=True)
class Given:
    """What a fake job works with."""

    files: ServiceFiles
    progress: Callable[[str, int, int], None]


@contextmanager
def given(job: Any, channel: Any) -> Iterator[Given]:
    """Without torch."""
    yield Given(ServiceFiles(Path(job["data"])), channel.progress)


def run(job_id: str, request: Any, context: Any) -> Outcome:
    """Do what the manifest's name says."""
    _, name, *argument = request.manifest.strip("/").split("/")
    folder = context.files.job(job_id)
    with (folder / "attempts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    outcome = {
        "ok": lambda: None,
        "steps": lambda: _steps(folder / "out", context.progress, float(argument[0])),
        "stubborn": _stubborn,
        "crash": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "crash-once": lambda: _crash_once(folder),
        "exit": lambda: os._exit(7),
        "fail": lambda: _raise(DataError(f"{folder / 'in' / 'case.npz'}: no voxel of it is labelled")),
        "bug": lambda: _raise(ZeroDivisionError("a slip")),
        "cluster": lambda: _raise(ClusterError("nobody answers")),
        "away": lambda: _raise(ClusterAwayError("nobody is there")),
        "memory": _grow,
        "noise": lambda: os.write(1, b'{"done": "not this"}\n'),
        "nan": lambda: None,
    }[name]()
    del outcome
    result = {"share": float("nan") if name == "nan" else 0.5}
    return Outcome("1 case", result, (NewCase("case", "ok", n_flags=1, flags=(("low", "low"),), expected_dsc=0.5),))


def _steps(out: Path, progress: Any, seconds: float) -> None:
    """Files one after the other, none of them again; half of the time is spent with one half-written."""
    for step in range(STEPS):
        path = out / f"{step}.txt"
        if not path.exists():
            with atomic_write(path) as temporary:
                temporary.write_text(f"{step}")
                time.sleep(seconds / STEPS / 2)
                temporary.write_text(f"step {step}\n")
            time.sleep(seconds / STEPS / 2)
        progress("steps", step + 1, STEPS)


def _stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _crash_once(folder: Path) -> None:
    if len((folder / "attempts").read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _grow() -> None:
    kept = []
    while True:
        kept.append(b"x" * (8 << 20))
        time.sleep(0.01)


def _raise(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    main(run, given)
