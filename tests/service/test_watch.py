"""Watched folders: every complete output becomes one job, exactly one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from segcal.service.errors import IntakePausedError
from segcal.service.settings import WatchSettings
from segcal.service.store import Store, open_store
from segcal.service.watch import Watcher
from tests.service.stores import SHA, calibrator
from tests.service.workers import REPOSITORY, wait_until


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "predictions"
    made.mkdir()
    return made


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'segcal.db'}")
    yield opened
    opened.close()


def watcher(folder: Path, store: Store, clock: Clock, *, queue_limit: int = 1000, **options: object) -> Watcher:
    settings = WatchSettings(folder, SHA, settle_seconds=10.0, poll_seconds=0.01)
    return Watcher(settings, store, queue_limit=queue_limit, clock=clock, **options)  # type: ignore[arg-type]


def write_output(folder: Path, case: str, *, seed: int = 0, ending: str = ".nii.gz") -> None:
    """An output as nnU-Net leaves it; nobody opens the two small files here."""
    values = np.random.default_rng(seed).random((2, 3, 4, 5)).astype(np.float32)
    np.savez(folder / f"{case}.npz", probabilities=values)  # of the same size for every seed
    (folder / f"{case}.pkl").write_bytes(b"properties")
    (folder / f"{case}{ending}").write_bytes(b"segmentation")


def settle(watching: Watcher, clock: Clock) -> int:
    """Two looks with the settling time between them; how many jobs that made."""
    made = watching.look()
    clock.now += 10.0
    return made + watching.look()


def jobs_of(store: Store) -> list[str]:
    """Cases that have a job, each as often as it has one."""
    return sorted(str(job.request["case"]) for job in store.jobs.page(limit=1000))


def test_a_complete_output_becomes_one_job_once_it_has_settled(
    folder: Path,
    store: Store,
    clock: Clock,
) -> None:
    write_output(folder, "case_1")
    watching = watcher(folder, store, clock)

    assert watching.look() == 0
    clock.now += 9.9
    assert watching.look() == 0
    clock.now += 0.1
    assert watching.look() == 1
    clock.now += 100
    assert watching.look() == 0

    (job,) = store.jobs.page()
    assert (job.kind, job.batch, job.submitted_by) == ("case", "predictions", "watch")
    assert job.request["files"] == ["case_1.npz", "case_1.pkl", "case_1.nii.gz"]
    assert job.request["source"] == str(folder)
    assert job.request["calibrator"] == SHA


def test_an_output_is_taken_once_across_restarts_and_also_after_a_touch(
    folder: Path,
    store_url: str,
    clock: Clock,
) -> None:
    write_output(folder, "case_1")
    for _ in range(3):
        opened = open_store(store_url)
        settle(watcher(folder, opened, clock), clock)
        os.utime(folder / "case_1.npz")
        assert jobs_of(opened) == ["case_1"]
        opened.close()


def test_a_new_prediction_of_the_same_case_is_a_new_job(folder: Path, lite: Store, clock: Clock) -> None:
    watching = watcher(folder, lite, clock)
    write_output(folder, "case_1", seed=0)
    assert settle(watching, clock) == 1

    write_output(folder, "case_1", seed=1)

    assert settle(watching, clock) == 1
    assert jobs_of(lite) == ["case_1", "case_1"]


def test_two_watchers_at_once_take_each_output_once(folder: Path, store_url: str) -> None:
    """Two processes, many outputs; a barrier in the folder lets both begin together."""
    for number in range(30):
        write_output(folder, f"case_{number:02d}", seed=number)
    open_store(store_url).close()
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from segcal.service.settings import WatchSettings\nfrom segcal.service.store import open_store\n"
        "from segcal.service.watch import Watcher\n"
        "folder = Path(sys.argv[1])\nstore = open_store(sys.argv[2])\n"
        "watching = Watcher(WatchSettings(folder, 'a' * 64, settle_seconds=0.0), store, queue_limit=1000)\n"
        "(folder / sys.argv[3]).touch()\n"
        "while not (folder / 'ready_a').exists() or not (folder / 'ready_b').exists(): time.sleep(0.001)\n"
        "print(watching.look())\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), store_url, name],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for name in ("ready_a", "ready_b")
    ]
    taken = [int(process.communicate(timeout=60)[0]) for process in processes]

    assert sum(taken) == 30
    opened = open_store(store_url)
    assert jobs_of(opened) == [f"case_{number:02d}" for number in range(30)]
    opened.close()


def test_an_output_that_is_still_being_written_is_left_alone(folder: Path, lite: Store, clock: Clock) -> None:
    watching = watcher(folder, lite, clock)
    write_output(folder, "case_1")
    for number in range(5):
        assert watching.look() == 0
        clock.now += 9.0
        with (folder / "case_1.nii.gz").open("ab") as file:
            file.write(f"more {number}".encode())
    assert jobs_of(lite) == []

    assert settle(watching, clock) == 1


@pytest.mark.parametrize("absent", [".npz", ".pkl", ".nii.gz"])
def test_an_output_that_lacks_a_file_waits_for_it(folder: Path, lite: Store, clock: Clock, absent: str) -> None:
    watching = watcher(folder, lite, clock)
    write_output(folder, "case_1")
    content = (folder / f"case_1{absent}").read_bytes()
    (folder / f"case_1{absent}").unlink()
    assert settle(watching, clock) == 0

    (folder / f"case_1{absent}").write_bytes(content)

    assert settle(watching, clock) == 1


def test_a_truncated_archive_is_not_taken_until_it_is_whole(
    folder: Path, lite: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watcher(folder, lite, clock)
    write_output(folder, "case_1")
    content = (folder / "case_1.npz").read_bytes()
    (folder / "case_1.npz").write_bytes(content[:-30])
    assert settle(watching, clock) == 0
    assert settle(watching, clock) == 0
    assert caplog.text.count("is not a whole archive") == 1

    (folder / "case_1.npz").write_bytes(content)

    assert settle(watching, clock) == 1


def test_the_ending_of_dataset_json_decides_which_file_is_the_segmentation(
    folder: Path, lite: Store, clock: Clock
) -> None:
    (folder / "dataset.json").write_text(json.dumps({"file_ending": ".mha"}))
    watching = watcher(folder, lite, clock)
    write_output(folder, "case_1", ending=".png")
    assert settle(watching, clock) == 0

    write_output(folder, "case_1", ending=".mha")

    assert settle(watching, clock) == 1
    assert lite.jobs.page()[0].request["files"][-1] == "case_1.mha"


def test_temporary_files_and_other_names_are_reported_once_and_passed_over(
    folder: Path, lite: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".segcal-1-case", "-rf", "a\nb", "case\udcff"):
        write_output(folder, name)
    write_output(folder, "case_1")
    watching = watcher(folder, lite, clock)

    for _ in range(3):
        settle(watching, clock)

    assert jobs_of(lite) == ["case_1"]
    assert caplog.text.count("is passed over") == 4


def test_a_folder_may_vanish_and_come_back(
    folder: Path, lite: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    write_output(folder, "case_1")
    watching = watcher(folder, lite, clock)
    assert settle(watching, clock) == 1

    away = folder.rename(folder.with_name("away"))
    settle(watching, clock)
    assert caplog.text.count("cannot be read") == 1
    away.rename(folder)
    write_output(folder, "case_2", seed=2)

    assert settle(watching, clock) == 1
    assert jobs_of(lite) == ["case_1", "case_2"]


def test_a_full_queue_lets_outputs_wait_and_loses_none(folder: Path, lite: Store, clock: Clock) -> None:
    for number in range(3):
        write_output(folder, f"case_{number}", seed=number)
    watching = watcher(folder, lite, clock, queue_limit=2)

    assert settle(watching, clock) == 2
    claim = lite.jobs.claim("w", 60)
    assert claim is not None

    assert watching.look() == 1
    assert jobs_of(lite) == ["case_0", "case_1", "case_2"]


def test_while_intake_is_paused_outputs_wait(folder: Path, lite: Store, clock: Clock) -> None:
    paused = threading.Event()
    paused.set()

    def check() -> None:
        if paused.is_set():
            raise IntakePausedError("the disk is nearly full")

    write_output(folder, "case_1")
    watching = watcher(folder, lite, clock, check_intake=check)
    assert settle(watching, clock) == 0

    paused.clear()

    assert watching.look() == 1


def test_an_output_nobody_may_read_is_in_no_ones_way(
    folder: Path, lite: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_output(folder, "case_1")
    write_output(folder, "case_2", seed=2)
    real = Path.open

    def refusing(path: Path, *arguments: object, **options: object) -> object:
        if path.name == "case_1.pkl":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refusing)

    assert settle(watcher(folder, lite, clock), clock) == 1
    assert jobs_of(lite) == ["case_2"]
    assert "case_1 cannot be read (Permission denied)" in caplog.text


def test_it_runs_until_it_is_told_to_stop(folder: Path, lite: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = WatchSettings(folder, SHA, settle_seconds=0.0, poll_seconds=0.01)
    stop = threading.Event()
    thread = threading.Thread(target=Watcher(settings, lite, queue_limit=10).run, args=(stop,))
    thread.start()

    write_output(folder, "case_1")
    wait_until(lambda: jobs_of(lite) == ["case_1"])

    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_link_that_leads_nowhere_is_in_no_ones_way(folder: Path, lite: Store, clock: Clock) -> None:
    (folder / "loop").symlink_to("loop")
    write_output(folder, "a")
    assert settle(watcher(folder, lite, clock), clock) == 1


def test_no_output_is_taken_with_a_retired_calibrator(folder: Path, lite: Store, clock: Clock) -> None:
    lite.calibrators.add(calibrator())
    lite.calibrators.retire(SHA)
    write_output(folder, "a")
    watching = watcher(folder, lite, clock)
    assert settle(watching, clock) == 0
    assert jobs_of(lite) == []


def test_an_internal_error_does_not_end_the_watch(
    folder: Path, lite: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_output(folder, "a")
    watching = watcher(folder, lite, clock)
    with monkeypatch.context() as broken:
        broken.setattr(lite.watched, "known", lambda *_: 1 / 0)
        assert settle(watching, clock) == 0
    assert settle(watching, clock) == 1
