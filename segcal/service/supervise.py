"""Workers as processes: one that runs until it is told to stop, and several that a server keeps alive."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from segcal.service.api.log import log_to
from segcal.service.child_process import CHILD_COMMAND
from segcal.service.settings import Limits, ServiceSettings
from segcal.service.store import open_store
from segcal.service.worker import End, Worker

log = logging.getLogger("segcal.service.workers")

WORKER_COMMAND = (sys.executable, "-m", "segcal.service.supervise")
STOP_SECONDS = 30.0
_LONG_LIFE_S = 60.0
_LONGEST_PAUSE_S = 30.0


def run_worker(
    settings: ServiceSettings, stop: threading.Event, child_command: Sequence[str] = CHILD_COMMAND
) -> Counter[End]:
    """Work in this process until `stop` is set, or SIGTERM or SIGINT comes; the job at hand is given back.

    Returns:
        how many attempts came to which end.

    Raises:
        StoreError: the store cannot be opened.
    """

    def on_signal(_number: int, _frame: object) -> None:
        # In a thread, because the main thread may be inside the event that is to be set, and would wait for itself.
        threading.Thread(target=stop.set, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    store = open_store(settings.url)
    try:
        return Worker(settings, store, child_command=child_command).run(stop)
    finally:
        store.close()


class LocalWorkers:
    """A number of worker processes, started again when they die; they stop when this process does, however it ends.

    Args:
        settings: of the service.
        n: how many.
        command: what a worker is started by.
    """

    def __init__(self, settings: ServiceSettings, n: int, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._settings = settings
        self._seats = [_Seat() for _ in range(n)]
        self._command = command
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="segcal-local-workers", daemon=True)

    @property
    def pids(self) -> list[int]:
        """Of the workers that run now."""
        running = (seat.process for seat in self._seats)
        return [process.pid for process in running if process is not None and process.poll() is None]

    def start(self) -> None:
        """Start them."""
        self._look_after()
        self._keeper.start()

    def stop(self, patience_s: float = STOP_SECONDS) -> None:
        """End them; jobs at hand go back to the queue. Those that do not end in time are killed."""
        self._stop.set()
        if self._keeper.ident is not None:
            self._keeper.join()
        processes = [seat.process for seat in self._seats if seat.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + patience_s
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)

    def _keep(self) -> None:
        while not self._stop.wait(0.5):
            try:
                self._look_after()
            except OSError as error:  # no memory or no process to be had just now
                log.error("a worker cannot be started: %s; tried again", error)

    def _look_after(self) -> None:
        for number, seat in enumerate(self._seats):
            if seat.process is not None and seat.process.poll() is not None:
                log.warning("worker %d ended with code %d; it is started again", number, seat.process.returncode)
                _close(seat.process)
                seat.process = None
                seat.postpone()
            if seat.process is None and time.monotonic() >= seat.not_before:
                seat.process, seat.started = self._start_one(), time.monotonic()

    def _start_one(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in the server's terminal reaches the server only, which then ends them in order.
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        assert process.stdin is not None
        with suppress(OSError):  # dead already; found out at the next look
            process.stdin.write(_settings_line(self._settings))
            process.stdin.flush()
        return process


@dataclass
class _Seat:
    """The place of one worker: whoever sits there now, and when the next one may."""

    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    not_before: float = 0.0
    pause_s: float = field(default=0.5)

    def postpone(self) -> None:
        """After an early death wait longer each time, so that a worker that cannot start does not keep us busy."""
        lived = time.monotonic() - self.started
        self.pause_s = 0.5 if lived > _LONG_LIFE_S else min(2 * self.pause_s, _LONGEST_PAUSE_S)
        self.not_before = time.monotonic() + self.pause_s


def _settings_line(settings: ServiceSettings) -> bytes:
    """On stdin, not as arguments: the store's address may hold a password, and arguments are for all to see."""
    values = {
        "data": str(settings.data.absolute()),
        "store_url": settings.url,
        "roots": [str(root) for root in settings.roots],
        "scheduler": settings.scheduler,
        "limits": asdict(settings.limits),
    }
    return json.dumps(values).encode() + b"\n"


def _read_settings(line: bytes) -> ServiceSettings:
    values: dict[str, Any] = json.loads(line)
    return ServiceSettings(
        data=Path(values["data"]),
        store_url=values["store_url"],
        roots=tuple(Path(root) for root in values["roots"]),
        scheduler=values["scheduler"],
        limits=Limits(**values["limits"]),
    )


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()


def main() -> None:
    """A worker of `LocalWorkers`: settings come on stdin, and its end means that the server is gone."""
    log_to()
    settings = _read_settings(sys.stdin.buffer.readline())
    stop = threading.Event()

    def wait_for_end() -> None:
        while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the interpreter ends
            pass
        stop.set()

    threading.Thread(target=wait_for_end, name="segcal-server-gone", daemon=True).start()
    run_worker(settings, stop)


if __name__ == "__main__":
    main()
