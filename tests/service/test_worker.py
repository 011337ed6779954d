"""A worker with a real child process: every end a job can come to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from segcal.service.files import ServiceFiles
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store, open_store
from segcal.service.store.tables import jobs
from tests.service.fake_child import STEPS
from tests.service.workers import FAKE_CHILD, finished, is_running, settings_of, submit_fake, wait_until, working


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}")


@pytest.fixture
def store(settings: ServiceSettings) -> Iterator[Store]:
    opened = open_store(settings.url)
    yield opened
    opened.close()


def attempts_of(settings: ServiceSettings, job_id: str) -> list[int]:
    """Ids of the children that began with a job."""
    path = ServiceFiles(settings.data).job(job_id) / "attempts"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_jobs_are_done_in_order_by_one_child(settings: ServiceSettings, store: Store) -> None:
    ids = [submit_fake(store, "ok"), submit_fake(store, "noise"), submit_fake(store, "ok")]

    with working(settings, store):
        ended = [finished(store, job_id) for job_id in ids]
        alive = store.workers.alive()

    assert [job.state for job in ended] == ["done"] * 3
    assert {job.message for job in ended} == {"1 case"}
    assert [job.finished for job in ended] == sorted(job.finished or 0 for job in ended)
    assert len({pid for job_id in ids for pid in attempts_of(settings, job_id)}) == 1
    assert [record.case.expected_dsc for job_id in ids for record in store.cases.of_job(job_id)] == [0.5] * 3
    assert len(alive) == 1
    assert store.workers.alive() == []


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("fail", "in/case.npz: no voxel of it is labelled"),
        ("bug", "internal error: ZeroDivisionError: a slip"),
        ("nan", "internal error: ValueError: Out of range float values"),
    ],
)
def test_a_job_that_cannot_be_done_fails_with_its_reason_and_no_place_of_the_service(
    settings: ServiceSettings, store: Store, what: str, expected: str
) -> None:
    job_id = submit_fake(store, what)

    with working(settings, store):
        job = finished(store, job_id)

    assert job.state == "failed"
    assert expected in job.message
    assert str(settings.data) not in job.message
    assert job.attempts == 1
    assert store.cases.of_job(job_id) == []


def test_a_job_that_killed_its_child_once_is_done_by_the_next(settings: ServiceSettings, store: Store) -> None:
    job_id = submit_fake(store, "crash-once")

    with working(settings, store):
        job = finished(store, job_id)

    assert (job.state, job.attempts, len(attempts_of(settings, job_id))) == ("done", 2, 2)
    assert len(store.cases.of_job(job_id)) == 1


@pytest.mark.parametrize(
    ("what", "reason"), [("crash", "was killed"), ("exit", "ended unexpectedly with code 7"), ("cluster", "nobody")]
)
def test_a_poisonous_job_is_given_up_and_the_next_one_done(
    settings: ServiceSettings, store: Store, what: str, reason: str
) -> None:
    poison, harmless = submit_fake(store, what), submit_fake(store, "ok")

    with working(settings, store):
        job = finished(store, poison)
        assert finished(store, harmless).state == "done"

    assert (job.state, job.attempts) == ("failed", 3)
    assert job.message.startswith("given up after 3 attempts")
    assert reason in job.message


def test_a_job_waits_for_a_cluster_that_is_away_and_can_be_cancelled_meanwhile(
    settings: ServiceSettings, store: Store
) -> None:
    job_id = submit_fake(store, "away")

    with working(settings, store):
        wait_until(lambda: "waiting for the Dask cluster" in store.jobs.get(job_id).progress.stage)
        store.jobs.cancel(job_id)
        job = finished(store, job_id)

    assert (job.state, job.attempts) == ("cancelled", 1)
    assert attempts_of(settings, job_id)


def test_a_running_job_shows_its_progress_and_can_be_cancelled(tmp_path: Path, store: Store) -> None:
    settings = settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}", lease_s=1.0)
    job_id = submit_fake(store, "steps/60")

    with working(settings, store):
        wait_until(lambda: store.jobs.get(job_id).progress.done > 0)
        assert store.jobs.get(job_id).progress.total == STEPS
        assert store.jobs.cancel(job_id).state == "running"
        job = finished(store, job_id)
        assert finished(store, submit_fake(store, "ok")).state == "done"

    assert job.state == "cancelled"
    assert not list(tmp_path.rglob(".segcal-*"))


def test_a_child_that_does_not_heed_the_request_to_stop_is_killed(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segcal.service.child_process.ChildProcess.stop.__defaults__", (0.2,))
    settings = settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}", lease_s=1.0)
    job_id = submit_fake(store, "stubborn")

    with working(settings, store):
        wait_until(lambda: bool(attempts_of(settings, job_id)))
        store.jobs.cancel(job_id)
        job = finished(store, job_id)

    assert job.state == "cancelled"
    assert not is_running(attempts_of(settings, job_id)[0])


def test_a_job_beyond_the_memory_limit_is_ended_with_words(tmp_path: Path, store: Store) -> None:
    settings = settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}", memory_bytes=256 << 20)
    job_id = submit_fake(store, "memory")

    with working(settings, store):
        job = finished(store, job_id)

    assert (job.state, job.attempts) == ("failed", 1)
    assert "more than the 0.25 GiB of memory" in job.message


def test_a_worker_that_is_stopped_gives_its_job_back_uncounted(settings: ServiceSettings, store: Store) -> None:
    job_id = submit_fake(store, "steps/60")

    with working(settings, store):
        wait_until(lambda: bool(attempts_of(settings, job_id)))

    job = store.jobs.get(job_id)
    assert (job.state, job.attempts) == ("queued", 0)
    assert not is_running(attempts_of(settings, job_id)[0])


def test_a_worker_that_lost_its_job_ends_its_child_and_writes_nothing(tmp_path: Path, store: Store) -> None:
    settings = settings_of(tmp_path, f"sqlite:///{tmp_path / 'segcal.db'}", lease_s=60.0)
    job_id = submit_fake(store, "steps/60")

    with working(settings, store):
        wait_until(lambda: bool(attempts_of(settings, job_id)))
        # As another worker's claim does when the lease ran out: the token is another one.
        with store._database.write() as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(token="of-another"))
        pid = attempts_of(settings, job_id)[0]
        wait_until(lambda: not is_running(pid), 20)

    job = store.jobs.get(job_id)
    assert job.state == "running"  # as the other worker has it
    assert store.cases.of_job(job_id) == []


def test_no_job_is_begun_while_the_disk_is_nearly_full(settings: ServiceSettings, store: Store) -> None:
    full = replace(settings, limits=replace(settings.limits, free_disk_bytes=1 << 62))
    job_id = submit_fake(store, "ok")

    with working(full, store):
        wait_until(lambda: bool(store.workers.alive()))
        time.sleep(0.5)

    assert store.jobs.get(job_id).state == "queued"


def test_a_child_never_outlives_a_worker_that_was_killed(tmp_path: Path) -> None:
    """The process in the middle gives a child work that says nothing for minutes, and is killed with SIGKILL."""
    code = (
        "import json, sys, time\nfrom segcal.service.child_process import ChildProcess\n"
        "child = ChildProcess(sys.argv[2:])\nchild.send(json.loads(sys.argv[1]))\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    middle = subprocess.Popen(
        [sys.executable, "-c", code, _job_line(tmp_path, "stubborn"), *FAKE_CHILD], stdout=subprocess.PIPE, text=True
    )
    assert middle.stdout is not None
    pid = int(middle.stdout.readline())
    wait_until((tmp_path / "jobs" / "j1" / "attempts").exists)

    middle.kill()
    middle.wait()
    middle.stdout.close()

    wait_until(lambda: not is_running(pid))


def test_a_second_child_waits_until_the_first_has_left_the_folder(tmp_path: Path) -> None:
    line = _job_line(tmp_path, "steps/2") + "\n"
    command = [*FAKE_CHILD, str(os.getpid())]
    first, second = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    assert first.stdin
    assert second.stdin
    assert second.stdout
    first.stdin.write(line)
    first.stdin.flush()
    wait_until(lambda: (tmp_path / "jobs" / "j1" / "attempts").exists())

    second.stdin.write(line)
    second.stdin.flush()

    assert "waiting for another process" in second.stdout.readline()
    first.send_signal(signal.SIGTERM)
    second_out, _ = second.communicate(timeout=60)
    first.communicate()
    assert '"done"' in second_out
    assert first.returncode == 143
    attempts = [int(text) for text in (tmp_path / "jobs" / "j1" / "attempts").read_text().split()]
    assert attempts == [first.pid, second.pid]


def _job_line(data: Path, what: str) -> str:
    """What a worker sends to its child."""
    request = {"kind": "qa", "calibrator": "a" * 64, "manifest": f"/fake/{what}"}
    return json.dumps({"job": "j1", "data": str(data), "roots": [], "scheduler": None, "request": request})
