"""Workers to test with, in threads and in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from segcal.service.model import FINISHED, Job
from segcal.service.requests import QaRequest
from segcal.service.settings import Limits, ServiceSettings
from segcal.service.store import Store
from segcal.service.worker import Worker
from tests.service.stores import SHA

FAKE_CHILD = (sys.executable, str(Path(__file__).with_name("fake_child.py")))
REPOSITORY = Path(__file__).resolve().parents[2]
_STARTED: list[subprocess.Popen[bytes]] = []


def settings_of(
    data: Path, url: str, *, lease_s: float = 30.0, memory_bytes: int | None = None, attempts: int = 3
) -> ServiceSettings:
    """A service's settings with a lease that tests can wait for."""
    limits = Limits(lease_seconds=lease_s, free_disk_bytes=0, job_memory_bytes=memory_bytes, attempts=attempts)
    return ServiceSettings(data=data, store_url=url, limits=limits)


def submit_fake(store: Store, what: str) -> str:
    """A job for `fake_child.py`."""
    request = QaRequest(calibrator=SHA, manifest=f"/fake/{what}")
    return store.jobs.submit(request, batch="night", submitted_by="", queue_limit=1000).id


@contextmanager
def working(settings: ServiceSettings, store: Store) -> Iterator[threading.Event]:
    """A worker in a thread, with the fake child; gives the event that stops it."""
    stop = threading.Event()
    worker = Worker(settings, store, child_command=FAKE_CHILD)
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def worker_process(settings: ServiceSettings) -> subprocess.Popen[bytes]:
    """A worker in a process of its own, with the fake child."""
    code = (
        "import sys, threading\nfrom pathlib import Path\n"
        "from segcal.service.supervise import run_worker\nfrom tests.service.workers import FAKE_CHILD, settings_of\n"
        "_, data, url, lease, attempts = sys.argv\n"
        "settings = settings_of(Path(data), url, lease_s=float(lease), attempts=int(attempts))\n"
        "run_worker(settings, threading.Event(), child_command=FAKE_CHILD)\n"
    )
    limits = settings.limits
    arguments = [str(settings.data), settings.url, str(limits.lease_seconds), str(limits.attempts)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=REPOSITORY)
    _STARTED.append(process)
    return process


def end_started_workers() -> None:
    """Kill those that a test which failed left behind."""
    while _STARTED:
        process = _STARTED.pop()
        process.kill()
        process.wait()


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Look again and again until something is the case."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def finished(store: Store, job_id: str, timeout_s: float = 60.0) -> Job:
    """The job once it has come to an end."""
    wait_until(lambda: store.jobs.get(job_id).state in FINISHED, timeout_s)
    return store.jobs.get(job_id)


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be buried."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
