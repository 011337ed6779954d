"""`segcal serve` as users start it: a process, a socket, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from segcal.service.api.connections import ImpatientProtocol
from segcal.service.api.server import listen
from tests.processes import heed_interrupts

START_S, ANSWER_S, END_S = 90.0, 60.0, 40.0


@dataclass(frozen=True)
class Service:
    """A running `segcal serve`.

    Attributes:
        url: where it answers.
        data: its data folder.
        root: a folder that jobs may read from.
        log: file of what it prints on stderr.
    """

    url: str
    data: Path
    root: Path
    log: Path
    process: subprocess.Popen[str]

    def client(self) -> httpx.Client:
        """A client that is as patient as a machine with much to do may ask for."""
        return httpx.Client(base_url=self.url, timeout=ANSWER_S)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and give the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)


@contextmanager
def running_service(folder: Path, *arguments: str, workers: int = 1) -> Iterator[Service]:
    """Start a service whose data lie below `folder`, wait until it answers, end it at last."""
    data, root, log = folder / "data", folder / "root", folder / "log.jsonl"
    root.mkdir(exist_ok=True)
    command = [str(Path(sys.executable).with_name("segcal")), "serve", "--data", str(data), "--root", str(root)]
    options = ["--port", "0", "--workers", str(workers), "--min-free-disk", "1M", *arguments]
    told = folder / "stdout.txt"
    with log.open("a") as stderr, told.open("w") as stdout:
        process = subprocess.Popen(
            [*command, *options],
            stdout=stdout,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=heed_interrupts,
        )
    try:
        yield Service(_address(process, told, log), data, root, log, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """An app of this process behind a real socket; gives its address."""
    with listen("127.0.0.1", 0) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, http=ImpatientProtocol, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def _address(process: subprocess.Popen[str], told: Path, log: Path) -> str:
    """The address it prints when it answers."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if "\n" in (text := told.read_text()):
            line = text.splitlines()[0]
            assert line.startswith("segcal serves http://"), line
            return line.split()[-1]
        assert process.poll() is None, f"it ended with {process.returncode}: {log.read_text()}"
        time.sleep(0.05)
    raise AssertionError(f"it did not start within {START_S:g} s: {log.read_text()}")
