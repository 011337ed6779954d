"""A worker: takes jobs from the store, has its child do them, and keeps hold of them meanwhile.

It may die at any moment. Its child dies with it, its lease runs out, and another worker takes the job up again.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from segcal.service.child_process import CHILD_COMMAND, ChildProcess
from segcal.service.errors import StoreError
from segcal.service.model import CalibratorRecord, JobProgress
from segcal.service.settings import ServiceSettings
from segcal.service.store import Claim, Store
from segcal.service.work.outcome import Outcome

log = logging.getLogger("segcal.service.worker")

End: TypeAlias = Literal["done", "failed", "again", "cancelled", "lost", "released"]
"""What became of an attempt at a job."""

Answer = TypeVar("Answer")

IDLE_SECONDS = 1.0
TICK_SECONDS = 0.5
RENEW_SECONDS = 1.0
"""Between heartbeats, which also show the progress and learn of a cancellation; less where the lease is short."""


class Worker:
    """Does one job after the other.

    Args:
        settings: of the service; data, roots, scheduler and limits matter here.
        store: where the jobs are.
        name: of this worker in the store; host, process and a random part by default.
        child_command: what the child is started by.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        store: Store,
        *,
        name: str | None = None,
        child_command: Sequence[str] = CHILD_COMMAND,
    ) -> None:
        self._settings = settings
        self._store = store
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        self._command = child_command
        self._child: ChildProcess | None = None
        self._paused = False
        self._beat = -float("inf")
        self._stop = threading.Event()

    def run(self, stop: threading.Event) -> Counter[End]:
        """Work until told to stop; the job at hand is then given back to the queue.

        Returns:
            how many attempts came to which end.
        """
        ends: Counter[End] = Counter()
        self._stop = stop
        log.info("worker %s is ready", self.name)
        try:
            while not stop.is_set():
                claim = self._next_claim()
                if claim is None:
                    stop.wait(IDLE_SECONDS)
                else:
                    ends[self._work(claim, stop)] += 1
        finally:
            self._end_child(kill=False)
            self._try("say goodbye", lambda: self._store.workers.leave(self.name))
        return ends

    def _next_claim(self) -> Claim | None:
        limits = self._settings.limits
        self._show_up(None)
        if self._disk_is_full():
            return None
        return self._try(
            "ask for a job",
            lambda: self._store.jobs.claim(self.name, limits.lease_seconds, attempts=limits.attempts),
        )

    def _work(self, claim: Claim, stop: threading.Event) -> End:
        """One attempt at a job, to whatever end."""
        job = claim.job
        log.info("job %s (%s): attempt %d", job.id, job.kind, job.attempts)
        self._beat = -float("inf")  # shown with its job at the first heartbeat
        child = self._ready_child()
        child.send(
            {
                "job": job.id,
                "request": dict(job.request),
                "data": str(self._settings.data.absolute()),
                "roots": [str(root) for root in self._settings.roots],
                "scheduler": self._settings.scheduler,
            }
        )
        end = self._follow(claim, child, stop)
        log.info("job %s: %s", job.id, end)
        return end

    def _follow(self, claim: Claim, child: ChildProcess, stop: threading.Event) -> End:
        """Listen to the child, keep the lease, heed requests to stop."""
        lease_s = self._settings.limits.lease_seconds
        every_s = min(RENEW_SECONDS, lease_s / 6)
        held_until, renewed = time.monotonic() + lease_s, time.monotonic()
        progress: JobProgress | None = None
        while True:
            message = child.receive(min(TICK_SECONDS, every_s))
            if message is not None and "progress" in message:
                progress = JobProgress(*message["progress"])
            elif message is not None and "died" in message and stop.wait(TICK_SECONDS):
                # Whoever ends the worker may have told its child too; that is no fault of the job.
                return self._leave("released", lambda: self._store.jobs.release(claim))
            elif message is not None:
                return self._conclude(claim, message)
            if stop.is_set():
                return self._leave("released", lambda: self._store.jobs.release(claim))
            if self._too_large(child):
                return self._leave("failed", lambda: self._store.jobs.fail(claim, self._too_large_text()))
            now = time.monotonic()
            if now - renewed < every_s:
                continue
            renewed = now
            answer = self._try("renew the lease", partial(self._store.jobs.renew, claim, lease_s, progress))
            self._show_up(claim.job.id)
            if answer == "held":
                held_until = now + lease_s
            elif answer == "cancel":
                return self._leave("cancelled", lambda: self._store.jobs.stopped(claim))
            elif answer == "lost" or now > held_until:
                # Another worker has the job, or will soon: nothing more is written, neither files nor rows.
                self._end_child(kill=True)
                return "lost"

    def _conclude(self, claim: Claim, message: dict[str, Any]) -> End:
        """What the child said last, brought into the store."""
        jobs, limits = self._store.jobs, self._settings.limits
        if "done" in message:
            outcome = Outcome.from_json(message["done"])
            found = [_calibrator(values) for values in message["calibrators"]]
            finish = partial(jobs.finish, claim, message=outcome.message, result=dict(outcome.result))
            return "done" if self._insist(partial(finish, cases=outcome.cases, calibrators=found)) else "lost"
        died = "died" in message
        if died:
            self._end_child(kill=True)
        reason = f"the process that did it {message['died']}" if died else str(message["failed"])
        if not died and not message["retry"]:
            return "failed" if self._insist(lambda: jobs.fail(claim, reason)) else "lost"
        if claim.job.attempts < limits.attempts:
            return "again" if self._insist(lambda: jobs.retry(claim, f"{reason}; it is tried again")) else "lost"
        text = f"given up after {claim.job.attempts} attempts: {reason}"
        return "failed" if self._insist(lambda: jobs.fail(claim, text)) else "lost"

    def _leave(self, end: End, tell: Callable[[], bool]) -> End:
        """End the child first, so that the job's folder is quiet before others hear of the job."""
        self._end_child(kill=end == "failed")
        return end if self._insist(tell) else "lost"

    def _insist(self, tell: Callable[[], bool]) -> bool:
        """Tell the store, again and again until it answers; whether the job was still this worker's.

        However late: nobody but the holder of the claim can end the job, so hours of work are not thrown away because
        the database was away for longer than the lease. A worker that is to end has no more patience than that.
        """
        patience_ends = time.monotonic() + self._settings.limits.lease_seconds
        while True:
            told = self._try("report the end of a job", tell)
            if told is not None:
                return told
            if self._stop.is_set() and time.monotonic() > patience_ends:
                return False
            time.sleep(1.0)

    def _try(self, what: str, ask: Callable[[], Answer]) -> Answer | None:
        """The store's answer; None when it cannot be reached, which may pass."""
        try:
            return ask()
        except StoreError as error:
            log.warning("could not %s: %s", what, error)
            return None

    def _show_up(self, job_id: str | None) -> None:
        if time.monotonic() - self._beat >= 5.0:
            self._beat = time.monotonic()
            self._try("show up", lambda: self._store.workers.beat(self.name, job_id))

    def _disk_is_full(self) -> bool:
        try:
            full = shutil.disk_usage(self._settings.data).free < self._settings.limits.free_disk_bytes
        except OSError:  # a shared folder that is away for a while
            full = True
        if full != self._paused:
            state = "nearly full or not there: no job is begun" if full else "there is room again"
            log.warning("disk of %s: %s", self._settings.data, state)
        self._paused = full
        return full

    def _too_large(self, child: ChildProcess) -> bool:
        limit = self._settings.limits.job_memory_bytes
        return limit is not None and child.resident_bytes > limit

    def _too_large_text(self) -> str:
        limit = self._settings.limits.job_memory_bytes or 0
        return (
            f"ended because it needed more than the {limit / (1 << 30):.3g} GiB of memory a job may have here; "
            "submit fewer or smaller cases, or have --memory-limit raised"
        )

    def _ready_child(self) -> ChildProcess:
        limit = self._settings.limits.job_memory_bytes
        if self._child is not None and limit is not None and self._child.resident_bytes > limit / 2:
            self._end_child(kill=False)  # what earlier jobs left behind must not count against the next one
        if self._child is None or not self._child.alive():
            self._end_child(kill=True)
            self._child = ChildProcess(self._command)
        return self._child

    def _end_child(self, *, kill: bool) -> None:
        if self._child is not None:
            self._child.kill() if kill else self._child.stop()
            self._child = None


def _calibrator(values: dict[str, Any]) -> CalibratorRecord:
    return CalibratorRecord(**{**values, "classes": tuple(values["classes"])})
