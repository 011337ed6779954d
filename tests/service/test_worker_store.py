"""A worker whose store goes away for a while, and the command that starts one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from segcal.service.errors import StoreError
from segcal.service.files import ServiceFiles
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store, open_store
from segcal_cli import main
from tests.processes import heed_interrupts
from tests.service.workers import finished, is_running, settings_of, submit_fake, wait_until, working


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}", lease_s=3.0)


@pytest.fixture
def store(settings: ServiceSettings) -> Iterator[Store]:
    opened = open_store(settings.url)
    yield opened
    opened.close()


def failing(real: Callable[..., Any], n_failures: int) -> Callable[..., Any]:
    """A method that cannot reach the store so many times."""
    left = [n_failures]

    def method(*arguments: Any, **options: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise StoreError("the store does not answer")
        return real(*arguments, **options)

    return method


@pytest.mark.parametrize("method", ["claim", "finish"])
def test_a_worker_waits_for_a_store_that_comes_back(
    settings: ServiceSettings, store: Store, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with working(settings, store):
        monkeypatch.setattr(store.jobs, method, failing(getattr(store.jobs, method), 2))
        job = finished(store, submit_fake(store, "ok"))

    assert (job.state, job.attempts) == ("done", 1)
    assert len(store.cases.of_job(job.id)) == 1


def test_a_job_outlasts_heartbeats_that_were_lost(
    settings: ServiceSettings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.jobs, "renew", failing(store.jobs.renew, 2))
    with working(settings, store):
        job = finished(store, submit_fake(store, "steps/4"))

    assert (job.state, job.attempts) == ("done", 1)


def test_a_worker_that_cannot_reach_the_store_for_a_whole_lease_ends_its_child(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have the job by then."""
    settings = settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}", lease_s=1.0)
    job_id = submit_fake(store, "steps/60")
    attempts = ServiceFiles(settings.data).job(job_id) / "attempts"
    renew = store.jobs.renew

    def away_once_begun(*arguments: Any, **options: Any) -> Any:  # to start a process may take longer than the lease
        if attempts.exists():
            raise StoreError("the store does not answer")
        return renew(*arguments, **options)

    monkeypatch.setattr(store.jobs, "renew", away_once_begun)
    with working(settings, store) as stop:
        wait_until(attempts.exists)
        first = int(attempts.read_text().split()[0])
        wait_until(lambda: not is_running(first), 20)
        stop.set()

    assert store.cases.of_job(job_id) == []


def test_memory_that_earlier_jobs_left_behind_does_not_count_against_the_next(tmp_path: Path, store: Store) -> None:
    """With a limit of a few MiB the idle child is above its half, so that every job gets a new one."""
    ids = [submit_fake(store, "ok") for _ in range(2)]
    probe = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, segcal.service.child as c; print(open('/proc/self/statm').read().split()[1])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    idle = int(probe.stdout) * os.sysconf("SC_PAGE_SIZE")
    settings = settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}", memory_bytes=int(1.5 * idle))
    with working(settings, store):
        states = [finished(store, job_id).state for job_id in ids]

    files = ServiceFiles(settings.data)
    pids = {(files.job(job_id) / "attempts").read_text() for job_id in ids}
    assert states == ["done", "done"]
    assert len(pids) == 2


class TestCommand:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--data", "/absent"], "--data /absent: no such folder"),
            (["--data", ".", "--root", "/absent"], "--root /absent: no such folder"),
            (["--data", ".", "--memory-limit", "much"], "expected a size such as 512M"),
            (["--data", ".", "--store", "mysql://x/y"], "cannot be 'mysql'"),
        ],
    )
    def test_wrong_options_are_told_in_words(self, options: list[str], words: str) -> None:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            result = CliRunner().invoke(main.app, ["worker", *options])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

        assert result.exit_code in (1, 2)
        assert words in result.stderr

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_ends_well_when_asked_to_and_says_what_it_did(
        self, settings: ServiceSettings, store: Store, number: int
    ) -> None:
        command = [sys.executable, "-c", "from segcal_cli.main import run; run()", "worker", "--json", "--quiet"]
        process = subprocess.Popen(
            [*command, "--data", str(settings.data), "--min-free-disk", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        )
        wait_until(lambda: len(store.workers.alive()) == 1)
        began = time.monotonic()
        process.send_signal(number)
        out, error = process.communicate(timeout=30)

        assert (process.returncode, out, error) == (0, '{"jobs": {}}\n', "")
        assert time.monotonic() - began < 20
        assert store.workers.alive() == []
