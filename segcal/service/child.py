"""The process that does the jobs: `python -m segcal.service.child`, started and watched by a worker.

It knows no database. Lines of JSON come in on stdin, one a job:

    {"job": ID, "request": {...}, "data": DIR, "roots": [DIR, ...], "scheduler": ADDRESS or null}

and go out on what was its stdout:

    {"progress": [stage, done, total]}                      any number of them
    {"done": {...}, "calibrators": [{...}, ...]}            or
    {"failed": message, "retry": whether another attempt may help}

It can be killed at any moment: files appear whole or not at all, and the next attempt begins by clearing away what was
unfinished. Two children never work in one job's folder: it belongs to the one that holds the lock in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from segcal.errors import ClusterAwayError, ClusterError, Interrupted, SegcalError
from segcal.extras import how_to_install
from segcal.io.atomic import remove_unfinished
from segcal.service.files import JOB_FOLDERS, ServiceFiles
from segcal.service.lifeline import die_with_parent
from segcal.service.requests import JobRequest, read_request
from segcal.service.roots import Roots

if TYPE_CHECKING:
    from segcal.case_map import CaseMap
    from segcal.service.work.context import WorkContext
    from segcal.service.work.outcome import Outcome

RunJob: TypeAlias = "Callable[[str, JobRequest, WorkContext], Outcome]"
MakeContext: TypeAlias = "Callable[[Mapping[str, Any], Channel], AbstractContextManager[WorkContext]]"

PROGRESS_EVERY_S = 0.2
STOPPED = 143
"""Exit code after SIGTERM."""
WAITING = "waiting for another process to leave the job's folder"
AWAY = "waiting for the Dask cluster, which does not answer"
AWAY_S = 5.0
"""Between two attempts to reach a cluster that is away."""


def main(run: RunJob | None = None, make_context: MakeContext | None = None) -> None:
    """Do jobs until stdin ends.

    Args:
        run: does one; by default `segcal.service.work.run.run_job`.
        make_context: what it works with, from the job's message.
    """
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the worker, which decides
    signal.signal(signal.SIGTERM, _stop)
    channel = Channel(_own_stdout())
    if run is None:
        from segcal.service.work.run import run_job

        run = run_job
    try:
        for line in sys.stdin:
            channel.send(do_job(json.loads(line), run, make_context or work_context, channel))
    except (KeyboardInterrupt, Interrupted):
        raise SystemExit(STOPPED) from None


class Channel:
    """The way back to the worker; progress from any thread, not more often than anybody can read it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._sent: tuple[str, float] = ("", 0.0)

    def send(self, message: dict[str, Any]) -> None:
        """One line."""
        text = json.dumps(message, allow_nan=False)
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Where the job is; left out when the last word is only a moment old and the stage the same."""
        now = time.monotonic()
        if stage == self._sent[0] and now - self._sent[1] < PROGRESS_EVERY_S and done < total:
            return
        self._sent = (stage, now)
        self.send({"progress": [stage, done, total]})


def do_job(job: Mapping[str, Any], run: RunJob, make_context: MakeContext, channel: Channel) -> dict[str, Any]:
    """One job from its message to the message about its end."""
    files = ServiceFiles(Path(job["data"]))
    folder = files.job(job["job"])
    try:
        with own_folder(folder, channel):
            outcome = _patiently(lambda: _attempt(job, run, make_context, channel), channel)
            message = {"done": outcome.to_json(), "calibrators": _keep_calibrators(outcome, folder, files)}
            json.dumps(message, allow_nan=False)  # a number that is none is this job's failure, not this process's
            return message
    except Interrupted:
        raise
    except SegcalError as error:
        return _failed(str(error), folder, retry=isinstance(error, ClusterError))
    except MemoryError:
        return _failed("there was not enough memory for it; submit fewer or smaller cases", folder)
    except OSError as error:
        traceback.print_exc()
        return _failed(": ".join(str(part) for part in (error.filename, error.strerror or error) if part), folder)
    except Exception as error:
        traceback.print_exc()
        return _failed(f"internal error: {type(error).__name__}: {error}; the worker's log shows where", folder)


def _attempt(job: Mapping[str, Any], run: RunJob, make_context: MakeContext, channel: Channel) -> Outcome:
    with make_context(job, channel) as context:
        remove_unfinished(ServiceFiles(Path(job["data"])).job(job["job"]), JOB_FOLDERS)
        return run(job["job"], read_request(job["request"]), context)


def _patiently(attempt: Callable[[], Outcome], channel: Channel) -> Outcome:
    """Wait for a cluster that cannot be reached, as the worker does for its database: that is no fault of the job.

    The job is running meanwhile, says so, and can be cancelled; it goes on with the files it has.
    """
    said = ""
    while True:
        try:
            return attempt()
        except ClusterAwayError as error:
            if said != (said := str(error)):
                print(f"{AWAY}: {said}", file=sys.stderr, flush=True)
            channel.progress(AWAY, 0, 0)
            time.sleep(AWAY_S)


@contextmanager
def own_folder(folder: Path, channel: Channel) -> Iterator[None]:
    """Have a job's folder for oneself; wait for a child of before that has not noticed yet that it lost the job."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            channel.progress(WAITING, 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def work_context(job: Mapping[str, Any], channel: Channel) -> Iterator[WorkContext]:
    """What a job works with: the data folder, what it may read, where its cases are worked on."""
    from segcal.device import resolve_device
    from segcal.service.work.context import WorkContext

    roots = Roots.of(tuple(Path(root) for root in job["roots"]))
    with _case_map(job["scheduler"]) as case_map:
        device = resolve_device("auto", sums=True)
        yield WorkContext(ServiceFiles(Path(job["data"])), roots, channel.progress, case_map, device)


@contextmanager
def _case_map(scheduler: str | None) -> Iterator[CaseMap]:
    if scheduler is None:
        from segcal.case_map import in_process

        yield in_process
        return
    try:
        from segcal.scale import open_cluster
    except ImportError as error:
        raise ClusterError(f"the worker has a --scheduler but no Dask ({error}): {how_to_install('dask')}") from error
    with open_cluster(scheduler=scheduler) as cases:
        yield cases


def _keep_calibrators(outcome: Outcome, folder: Path, files: ServiceFiles) -> list[dict[str, Any]]:
    if not outcome.calibrators:
        return []
    from segcal.service.calibrator_files import keep_calibrator

    paths = [folder / name for name in outcome.calibrators]
    return [asdict(keep_calibrator(path, path.stem, files, created=time.time())) for path in paths]


def _failed(message: str, folder: Path, *, retry: bool = False) -> dict[str, Any]:
    """The message names files by their place in the job's folder; where that lies is nobody's business."""
    return {"failed": message.replace(f"{folder}/", "").replace(str(folder), "the job's folder"), "retry": retry}


def _own_stdout() -> IO[str]:
    """Keep stdout for the messages; what libraries print goes to stderr, the worker's log."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def _stop(_number: int, _frame: object) -> None:
    # As Ctrl-C: what is open is closed and half-written files are removed on the way out.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
