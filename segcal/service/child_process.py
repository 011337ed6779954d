"""The worker's side of its child: start it, give it a job, hear of it, end it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from segcal.service.lifeline import resident_bytes

CHILD_COMMAND = (sys.executable, "-m", "segcal.service.child")
STOP_SECONDS = 10.0
"""From the request to stop to the kill."""


class ChildProcess:
    """A running child. Its messages are read by a thread of their own, so that nobody waits for them without end."""

    def __init__(self, command: Sequence[str] = CHILD_COMMAND) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # The child asks Linux to be killed with the *thread* that started it: a worker starts it where it runs.
        self._process = subprocess.Popen(
            [*command, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        self._reader = threading.Thread(target=self._read, name="segcal-child-messages", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """Its memory."""
        return resident_bytes(self.pid)

    def alive(self) -> bool:
        """Whether it can be given a job."""
        return self._process.poll() is None

    def send(self, job: Mapping[str, Any]) -> None:
        """Give it a job; if it has died meanwhile, `receive` tells."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Its next message; {"died": why} when there will be none, None when nothing came in time."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return {"died": self._end_in_words()} if message is None else message

    def stop(self, patience_s: float = STOP_SECONDS) -> None:
        """Ask it to end, which removes half-written files; kill it if it does not."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._clean_up()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._clean_up()

    def _clean_up(self) -> None:
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                break  # cut off by a kill in the middle of a line
            self._messages.put(message)
        self._messages.put(None)

    def _end_in_words(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "was killed, as Linux does when memory runs out"
        if code < 0:
            return f"was ended by signal {signal.Signals(-code).name}"
        return f"ended unexpectedly with code {code}; the worker's log shows more"
