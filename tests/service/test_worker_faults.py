"""Real processes, killed with SIGKILL at bad moments: the job is done once, whole, and nothing is left over."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from segcal.service.files import ServiceFiles
from segcal.service.requests import ApplyRequest
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store
from segcal.service.supervise import LocalWorkers
from tests.processes import heed_interrupts
from tests.service.fake_child import STEPS
from tests.service.real_results import store_calibrator
from tests.service.work_data import calibrator, labelled_cases
from tests.service.workers import (
    REPOSITORY,
    end_started_workers,
    finished,
    is_running,
    settings_of,
    submit_fake,
    wait_until,
    worker_process,
)

BOTH = pytest.mark.parametrize(
    "store_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
"""What is killed here knows no difference between them; the store's own tests run over both at all times."""


@pytest.fixture
def settings(tmp_path: Path, store_url: str) -> ServiceSettings:
    return settings_of(tmp_path / "data", store_url, lease_s=1.5, attempts=100)


@pytest.fixture(autouse=True)
def _data(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "data").mkdir()
    yield
    end_started_workers()
    assert not list((tmp_path / "data").rglob(".segcal-*")), "a half-written file was left behind"


def children(settings: ServiceSettings, job_id: str) -> list[int]:
    """Those that began with a job, in order."""
    path = ServiceFiles(settings.data).job(job_id) / "attempts"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def written(settings: ServiceSettings, job_id: str) -> dict[str, str]:
    """What a job of steps wrote."""
    out = ServiceFiles(settings.data).job(job_id) / "out"
    return {path.name: path.read_text() for path in out.iterdir()} if out.exists() else {}


def has_shown_up(store: Store, pid: int) -> bool:
    """Whether a worker has begun to work."""
    return any(worker.name.split(":")[1] == str(pid) for worker in store.workers.alive())


ALL_STEPS = {f"{step}.txt": f"step {step}\n" for step in range(STEPS)}


@BOTH
def test_a_job_whose_worker_was_killed_is_finished_by_the_next_one(settings: ServiceSettings, store: Store) -> None:
    job_id = submit_fake(store, "steps/2")
    first = worker_process(settings)
    wait_until(lambda: len(written(settings, job_id)) > 3)
    (child,) = children(settings, job_id)

    first.kill()
    first.wait()
    wait_until(lambda: not is_running(child))
    assert store.jobs.get(job_id).state == "running"  # nobody could tell the store
    second = worker_process(settings)
    job = finished(store, job_id)
    second.terminate()

    assert second.wait(30) == 0
    assert (job.state, job.attempts) == ("done", 2)
    assert written(settings, job_id) == ALL_STEPS
    assert len(store.cases.of_job(job_id)) == 1


@BOTH
def test_a_job_whose_child_was_killed_is_finished_by_the_same_worker(settings: ServiceSettings, store: Store) -> None:
    job_id = submit_fake(store, "steps/2")
    worker = worker_process(settings)
    wait_until(lambda: len(written(settings, job_id)) > 3)

    os.kill(children(settings, job_id)[0], signal.SIGKILL)
    job = finished(store, job_id)
    worker.terminate()

    assert worker.wait(30) == 0
    assert (job.state, job.attempts) == ("done", 2)
    assert written(settings, job_id) == ALL_STEPS
    assert len(store.cases.of_job(job_id)) == 1


@BOTH
def test_a_worker_that_was_only_asleep_cannot_spoil_what_another_one_does(
    settings: ServiceSettings, store: Store
) -> None:
    """SIGSTOP, as when a virtual machine is suspended: its child goes on, its lease runs out, it wakes up too late."""
    job_id = submit_fake(store, "steps/6")
    asleep = worker_process(settings)
    wait_until(lambda: len(written(settings, job_id)) > 1)
    os.kill(asleep.pid, signal.SIGSTOP)
    other = worker_process(settings)
    wait_until(lambda: store.jobs.get(job_id).attempts == 2)

    os.kill(asleep.pid, signal.SIGCONT)
    job = finished(store, job_id)
    for process in (asleep, other):
        process.terminate()
        assert process.wait(30) == 0

    assert job.state == "done"
    assert written(settings, job_id) == ALL_STEPS
    assert len(store.cases.of_job(job_id)) == 1


@pytest.mark.slow
def test_workers_killed_again_and_again_lose_no_job_and_do_none_twice(settings: ServiceSettings, store: Store) -> None:
    """Two workers at a time, one of them or a child killed at random moments until everything is done."""
    moments = random.Random(7)
    ids = [submit_fake(store, "steps/1") for _ in range(8)]
    workers = [worker_process(settings) for _ in range(2)]
    deadline = time.monotonic() + 240
    kills = 0
    while store.jobs.counts()["done"] < len(ids):
        assert time.monotonic() < deadline
        time.sleep(moments.uniform(0.3, 2.5))
        if kills < 12:
            victim = moments.randrange(2)
            workers[victim].kill()
            workers[victim].wait()
            workers[victim] = worker_process(settings)
            kills += 1
    for process in workers:
        # One that was just started dies of a signal before it heeds it, as any process does.
        wait_until(partial(has_shown_up, store, process.pid))
        process.terminate()
        assert process.wait(30) == 0

    assert kills > 3
    for job_id in ids:
        assert written(settings, job_id) == ALL_STEPS
        assert len(store.cases.of_job(job_id)) == 1


@BOTH
def test_a_worker_asked_to_end_gives_its_job_back_and_ends_well(settings: ServiceSettings, store: Store) -> None:
    job_id = submit_fake(store, "steps/60")
    worker = worker_process(settings)
    wait_until(lambda: bool(children(settings, job_id)))

    worker.terminate()

    assert worker.wait(30) == 0
    job = store.jobs.get(job_id)
    assert (job.state, job.attempts) == ("queued", 0)
    assert not is_running(children(settings, job_id)[0])
    assert store.workers.alive() == []


LOCAL_WORKER = (
    sys.executable,
    "-c",
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from segcal.service import supervise, worker\nfrom tests.service.workers import FAKE_CHILD\n"
    "supervise.run_worker.__defaults__ = (FAKE_CHILD,)\nsupervise.main()",
    str(REPOSITORY),
)


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
class TestLocalWorkers:
    def test_a_worker_that_died_is_started_again(self, settings: ServiceSettings, store: Store) -> None:
        workers = LocalWorkers(settings, 2, LOCAL_WORKER)
        workers.start()
        try:
            wait_until(lambda: len(store.workers.alive()) == 2)
            first = workers.pids
            os.kill(first[0], signal.SIGKILL)
            wait_until(lambda: len(workers.pids) == 2 and first[0] not in workers.pids)
            job = finished(store, submit_fake(store, "ok"))
        finally:
            workers.stop()

        assert job.state == "done"
        assert workers.pids == []
        assert not any(is_running(pid) for pid in first)

    def test_workers_and_their_children_end_when_the_server_was_killed(
        self, settings: ServiceSettings, store: Store
    ) -> None:
        job_id = submit_fake(store, "steps/60")
        code = (
            "import json, sys, time\nfrom pathlib import Path\n"
            "from segcal.service.supervise import LocalWorkers\nfrom tests.service.workers import settings_of\n"
            "workers = LocalWorkers(settings_of(Path(sys.argv[1]), sys.argv[2]), 1, json.loads(sys.argv[3]))\n"
            "workers.start()\nprint(workers.pids[0], flush=True)\ntime.sleep(600)\n"
        )
        command = [sys.executable, "-c", code, str(settings.data), settings.url, json.dumps(LOCAL_WORKER)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        wait_until(lambda: bool(children(settings, job_id)))

        server.kill()
        server.wait()
        server.stdout.close()

        wait_until(lambda: not is_running(worker))
        assert not is_running(children(settings, job_id)[0])
        job = store.jobs.get(job_id)
        assert (job.state, job.attempts) == ("queued", 0)


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
class TestRealWork:
    """`segcal worker` as users start it, with the real child and the real work."""

    def test_a_killed_apply_job_ends_with_the_bytes_of_one_that_was_left_alone(
        self, settings: ServiceSettings, store: Store, tmp_path: Path
    ) -> None:
        manifest = labelled_cases(tmp_path / "root", [f"case_{n:02d}" for n in range(8)])
        sha256 = store_calibrator(calibrator(), settings.data)
        request = ApplyRequest(calibrator=sha256, manifest=str(manifest.path))
        killed, left_alone = (
            store.jobs.submit(request, batch="b", submitted_by="", queue_limit=9).id for _ in range(2)
        )
        out = ServiceFiles(settings.data).job(killed) / "out"
        first = self._start(settings, tmp_path / "root")
        wait_until(lambda: len(list(out.glob("**/case_*.npz"))) >= 2, 120)

        first.kill()
        first.wait()
        assert store.jobs.get(killed).state == "running"
        second = self._start(settings, tmp_path / "root")
        jobs = [finished(store, job_id, 180) for job_id in (killed, left_alone)]
        second.send_signal(signal.SIGTERM)

        assert second.wait(30) == 0
        assert [job.state for job in jobs] == ["done", "done"], [job.message for job in jobs]
        assert [job.attempts for job in jobs] == [2, 1]
        assert jobs[0].message == jobs[1].message
        assert _hashes(settings, killed) == _hashes(settings, left_alone)
        assert len(_hashes(settings, killed)) > 24
        rows = [[record.case for record in store.cases.of_job(job_id)] for job_id in (killed, left_alone)]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 8

    def _start(self, settings: ServiceSettings, root: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "from segcal_cli.main import run; run()", "worker", "--quiet"]
        options = ["--data", str(settings.data), "--store", settings.url, "--root", str(root), "--lease", "1.5"]
        return subprocess.Popen([*command, *options, "--min-free-disk", "0"], preexec_fn=heed_interrupts)


def _hashes(settings: ServiceSettings, job_id: str) -> dict[str, str]:
    """Every file of a job but its lock; run.json without how long things took."""
    folder = ServiceFiles(settings.data).job(job_id)
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "lock":
            content = path.read_bytes()
            if path.name == "run.json":
                content = re.sub(rb'"seconds": \{[^}]*\}', b"", content)
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found
