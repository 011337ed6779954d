"""Old jobs are removed with their files: nothing else, nothing twice, and nothing is left between by a kill."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import update

from segcal.service import prune
from segcal.service.errors import UnknownError
from segcal.service.files import ServiceFiles
from segcal.service.model import SubmissionKey
from segcal.service.prune import DAY_S, Pruner
from segcal.service.store import Store
from segcal.service.store.tables import jobs
from tests.service.page_data import open_data
from tests.service.running import running_service
from tests.service.stores import case_request, new_case, submit
from tests.service.workers import wait_until

KEEP_DAYS = 30


class Killed(BaseException):
    """The process died."""


@pytest.fixture
def files(tmp_path: Path) -> ServiceFiles:
    found = ServiceFiles(tmp_path / "data")
    found.data.mkdir()
    return found


def made(store: Store, files: ServiceFiles, *, days: float, end: str = "finish") -> str:
    """A job with a file that ended so many days ago."""
    job_id = submit(store, key=f"k{days}{end}")
    folder = files.job(job_id) / "out"
    folder.mkdir(parents=True)
    (folder / "map.npz").write_text(job_id)
    end_job(store, days, end)
    return job_id


def end_job(store: Store, days: float, end: str = "finish") -> None:
    claim = store.jobs.claim("worker", 1000.0)
    assert claim is not None
    if end == "finish":
        store.jobs.finish(claim, message="", result={}, cases=[new_case("a")])
    elif end == "fail":
        store.jobs.fail(claim, "reason")
    with store._database.write() as connection:
        old = update(jobs).where(jobs.c.id == claim.job.id, jobs.c.finished.is_not(None))
        connection.execute(old.values(finished=store.now() - days * DAY_S))


def pruned(store: Store, files: ServiceFiles) -> int:
    return Pruner(store, files, KEEP_DAYS).prune(threading.Event())


def folders(files: ServiceFiles) -> set[str]:
    return {path.name for place in ("jobs", "pruned") for path in (files.data / place).glob("*")}


def test_jobs_beyond_their_time_go_with_files_cases_and_keys_and_others_stay(store: Store, files: ServiceFiles) -> None:
    old = [made(store, files, days=31), made(store, files, days=400, end="fail")]
    cancelled = submit(store)
    store.jobs.cancel(cancelled)
    recent = made(store, files, days=29)
    running = made(store, files, days=0, end="")
    queued = submit(store)

    assert pruned(store, files) == 2
    assert pruned(store, files) == 0

    assert {job.id for job in store.jobs.page()} == {cancelled, recent, running, queued}
    assert folders(files) == {recent, running}
    assert [record.job_id for record in store.cases.page()] == [recent]
    assert store.jobs.by_key(SubmissionKey("token 1", "k31finish")) is None
    for job_id in old:
        with pytest.raises(UnknownError):
            store.jobs.get(job_id)


def test_a_watched_output_whose_job_was_removed_is_not_taken_again(store: Store, files: ServiceFiles) -> None:
    def take() -> bool:
        return store.watched.take("/out", "a", "f", case_request("a"), batch="out", queue_limit=9) is not None

    assert take()
    end_job(store, days=31, end="fail")
    made(store, files, days=1)

    assert pruned(store, files) == 1
    assert not take()
    assert store.watched.known("/out", "a", "f")


def test_a_job_that_is_tried_again_stays_however_old_it_is(store: Store, files: ServiceFiles) -> None:
    job_id = made(store, files, days=400, end="fail")
    store.jobs.try_again(job_id, queue_limit=9)

    assert pruned(store, files) == 0
    assert folders(files) == {job_id}


def test_the_number_of_a_case_is_never_given_to_another_one(store: Store, files: ServiceFiles) -> None:
    for days in (40, 39, 38):
        made(store, files, days=days)
    keys = {record.key for record in store.cases.page()}

    assert pruned(store, files) == 2  # the newest case stays
    made(store, files, days=0)

    assert store.cases.page(sort="newest")[0].key not in keys


@pytest.mark.parametrize("moment", ["before the rows are gone", "before the files are gone"])
@pytest.mark.parametrize("meanwhile", ["nothing", "tried again"])
def test_a_kill_leaves_no_files_without_rows_and_takes_none_from_a_job(
    store: Store, files: ServiceFiles, monkeypatch: pytest.MonkeyPatch, moment: str, meanwhile: str
) -> None:
    job_id, recent = made(store, files, days=31, end="fail"), made(store, files, days=0)

    def killed(*_arguments: object, **_options: object) -> None:
        raise Killed

    target = (prune, "flush_folder") if moment == "before the rows are gone" else (prune.shutil, "rmtree")
    with monkeypatch.context() as patch:
        patch.setattr(*target, killed)
        with pytest.raises(Killed):
            pruned(store, files)
    assert (files.pruned / job_id / "out" / "map.npz").exists()

    if moment == "before the files are gone":
        assert pruned(store, files) == 0
        assert folders(files) == {recent}
    elif meanwhile == "nothing":
        assert pruned(store, files) == 1
        assert folders(files) == {recent}
    else:
        store.jobs.try_again(job_id, queue_limit=9)
        assert pruned(store, files) == 0
        assert (files.job(job_id) / "out" / "map.npz").read_text() == job_id
        assert folders(files) == {job_id, recent}


def test_several_servers_that_remove_and_people_who_try_again_do_not_meet(store: Store, files: ServiceFiles) -> None:
    """Every job is either removed whole, or queued with its files."""
    ids = [made(store, files, days=31 + n, end="fail") for n in range(20)]
    made(store, files, days=0)

    def try_again(job_id: str) -> None:
        with suppress(UnknownError):
            store.jobs.try_again(job_id, queue_limit=100)

    with ThreadPoolExecutor(4) as pool:
        removing = [pool.submit(pruned, store, files) for _ in range(2)]
        list(pool.map(try_again, ids[::-1]))
        n_removed = sum(each.result() for each in removing)
    kept = {job.id for job in store.jobs.page(state="queued")}

    assert n_removed + len(kept) == 20
    assert {job_id for job_id in folders(files) if job_id in ids} == kept
    assert all((files.job(job_id) / "out" / "map.npz").exists() for job_id in kept)


def test_the_command_removes_old_jobs_while_it_serves(tmp_path: Path) -> None:
    store, files = open_data(tmp_path / "data"), ServiceFiles(tmp_path / "data")
    old, recent = made(store, files, days=3), made(store, files, days=1)

    with running_service(tmp_path, "--keep-days", "2", workers=0):
        wait_until(lambda: folders(files) == {recent})

    assert [job.id for job in store.jobs.page()] == [recent] != [old]
    store.close()
