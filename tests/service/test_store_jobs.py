"""The queue and its leases, over SQLite and PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from segcal.service.errors import KeyReusedError, QueueFullError, UnknownError, WrongStateError
from segcal.service.model import JobProgress, SubmissionKey
from segcal.service.requests import QaRequest
from segcal.service.store import Claim, Store, open_store
from tests.service.stores import REQUEST, SHA, calibrator, case_request, new_case, submit
from tests.service.workers import REPOSITORY, wait_until


def claimed(store: Store, lease_s: float = 60.0) -> Claim:
    """The oldest job, which must be there."""
    claim = store.jobs.claim("worker", lease_s)
    assert claim is not None
    return claim


def expire(store: Store, claim: Claim) -> None:
    """Let the lease of a claim be over."""
    assert store.jobs.renew(claim, -1.0) != "lost"


def test_a_job_comes_back_as_it_was_submitted(store: Store) -> None:
    job = store.jobs.get(submit(store))

    assert (job.kind, job.state, job.batch, job.submitted_by) == ("qa", "queued", "night", "anna")
    assert job.request == REQUEST.model_dump(mode="json")
    assert (job.attempts, job.started, job.finished, job.message, job.result) == (0, None, None, "", {})
    assert abs(job.created - time.time()) < 60
    with pytest.raises(UnknownError, match="no job 'x'"):
        store.jobs.get("x")


def test_the_same_key_gives_the_same_job_to_its_token_only_whatever_the_name(store: Store) -> None:
    first = submit(store, key="k")

    assert submit(store, key="k") == first
    key, others = SubmissionKey("token 1", "k"), SubmissionKey("token 2", "k")
    assert store.jobs.by_key(key) == store.jobs.get(first)
    assert store.jobs.by_key(others) is None
    other = store.jobs.submit(REQUEST, batch="", submitted_by="anna", queue_limit=10, key=others)
    assert other.id != first
    assert submit(store) != submit(store)
    changed = QaRequest(calibrator=SHA, manifest="/data/other.yaml")
    with pytest.raises(KeyReusedError, match="used for job"):
        store.jobs.submit(changed, batch="", submitted_by="anna", queue_limit=10, key=key)


def test_a_key_submitted_by_many_at_once_makes_one_job(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: submit(store, key="k"), range(24)))

    assert len(set(ids)) == 1
    assert store.jobs.counts()["queued"] == 1


def test_a_full_queue_refuses_exactly_those_beyond_the_limit(store: Store) -> None:
    def attempt(_: int) -> bool:
        try:
            submit(store, queue_limit=10)
        except QueueFullError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        accepted = list(pool.map(attempt, range(30)))

    assert sum(accepted) == 10
    assert store.jobs.counts()["queued"] == 10
    claimed(store)
    submit(store, queue_limit=10)  # a running job does not wait


def test_jobs_are_claimed_oldest_first_and_each_once(store: Store) -> None:
    ids = [submit(store) for _ in range(3)]

    claims = [claimed(store) for _ in ids]

    assert [claim.job.id for claim in claims] == sorted(ids)
    assert store.jobs.claim("worker", 60) is None
    job = claims[0].job
    assert (job.state, job.attempts, job.worker) == ("running", 1, "worker")
    assert job.started is not None


def test_many_threads_never_get_the_same_job(store: Store) -> None:
    ids = {submit(store) for _ in range(60)}
    start = threading.Barrier(8)

    def take(number: int) -> list[str]:
        start.wait()
        taken = []
        while (claim := store.jobs.claim(f"worker {number}", 60)) is not None:
            taken.append(claim.job.id)
        return taken

    with ThreadPoolExecutor(8) as pool:
        taken = [job_id for each in pool.map(take, range(8)) for job_id in each]

    assert sorted(taken) == sorted(ids)


def test_many_processes_never_get_the_same_job(store: Store, store_url: str) -> None:
    ids = {submit(store) for _ in range(60)}
    code = (
        "import sys\nfrom segcal.service.store import open_store\nstore = open_store(sys.argv[1])\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "while (claim := store.jobs.claim('worker', 60)) is not None:\n"
        "    print(claim.job.id)\n"
        "    assert store.jobs.finish(claim, message='', result={})\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, store_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    taken = [line for process in processes for line in process.communicate("go\n", timeout=120)[0].split()]

    assert [process.returncode for process in processes] == [0] * 3
    assert sorted(taken) == sorted(ids)
    assert store.jobs.counts()["done"] == 60


def test_a_lease_is_kept_by_renewing_and_shows_progress(store: Store) -> None:
    submit(store)
    claim = claimed(store, lease_s=1.0)
    ends = store.now() + 1.0

    for done in range(4):
        assert store.jobs.renew(claim, 60, JobProgress("apply", done, 4)) == "held"
    wait_until(lambda: store.now() > ends)

    assert store.jobs.claim("other", 60) is None
    assert store.jobs.get(claim.job.id).progress == JobProgress("apply", 3, 4)
    assert store.jobs.renew(claim, 60) == "held"
    assert store.jobs.get(claim.job.id).progress == JobProgress("apply", 3, 4)


def test_a_job_whose_lease_ran_out_goes_to_another_and_the_first_can_do_nothing(store: Store) -> None:
    submit(store)
    lost = claimed(store, lease_s=0.0)
    time.sleep(0.01)

    second = store.jobs.claim("other", 60)

    assert second is not None
    assert (second.job.id, second.job.attempts) == (lost.job.id, 2)
    assert store.jobs.renew(lost, 60, JobProgress("late", 1, 1)) == "lost"
    assert not store.jobs.finish(lost, message="", result={}, cases=[new_case("a")], calibrators=[calibrator()])
    assert not store.jobs.fail(lost, "late")
    assert not store.jobs.release(lost)
    assert not store.jobs.retry(lost, "late")
    assert not store.jobs.stopped(lost)
    assert store.cases.count() == 0
    assert store.calibrators.list() == []
    job = store.jobs.get(lost.job.id)
    assert (job.state, job.worker, job.progress) == ("running", "other", JobProgress())
    assert store.jobs.finish(second, message="", result={}, cases=[new_case("a")])
    assert not store.jobs.finish(lost, message="", result={})
    assert store.cases.count() == 1


def test_a_job_whose_worker_dies_every_time_is_given_up_with_words(store: Store) -> None:
    job_id = submit(store)
    for _ in range(3):
        assert store.jobs.get(job_id).state == "queued"
        expire(store, claimed(store))
        assert store.jobs.take_back_lost(3) == 1

    job = store.jobs.get(job_id)
    assert job.state == "failed"
    assert "its worker died 3 times" in job.message
    assert "try the job again" in job.message
    assert job.finished is not None
    assert store.jobs.take_back_lost(3) == 0
    assert store.jobs.claim("worker", 60) is None


def test_claiming_gives_up_lost_jobs_by_itself(store: Store) -> None:
    job_id = submit(store)
    expire(store, claimed(store))

    assert store.jobs.claim("other", 60, attempts=1) is None

    assert store.jobs.get(job_id).state == "failed"


def test_a_running_job_is_not_taken_back(store: Store) -> None:
    submit(store)
    claim = claimed(store)

    assert store.jobs.take_back_lost(1) == 0
    assert store.jobs.renew(claim, 60) == "held"


def test_finishing_shows_everything_at_once(store: Store) -> None:
    submit(store)
    claim = claimed(store)
    found = [new_case("b", expected_dsc=0.5, numbers={"x": None}), new_case("a")]

    assert store.jobs.finish(claim, message="2 cases", result={"n": 2}, cases=found, calibrators=[calibrator()])

    job = store.jobs.get(claim.job.id)
    assert (job.state, job.message, job.result) == ("done", "2 cases", {"n": 2})
    assert job.finished is not None
    assert [record.case for record in store.cases.of_job(job.id)] == found
    assert store.calibrators.list() == [calibrator()]


def test_finishing_twice_with_the_same_claim_is_told_as_success_and_writes_once(store: Store) -> None:
    """The answer to a commit may be lost on its way; the worker then asks again."""
    submit(store)
    claim = claimed(store)

    for _ in range(2):
        assert store.jobs.finish(claim, message="", result={}, cases=[new_case("a")])

    assert store.cases.count() == 1


def test_when_a_result_cannot_be_stored_nothing_of_it_is(store: Store) -> None:
    submit(store)
    claim = claimed(store)

    with pytest.raises(Exception, match="Out of range float"):
        store.jobs.finish(
            claim, message="", result={}, cases=[new_case("a"), new_case("b", numbers={"x": float("inf")})]
        )

    assert store.cases.count() == 0
    assert store.jobs.get(claim.job.id).state == "running"


def test_text_that_a_database_does_not_take_is_stored_escaped(store: Store) -> None:
    submit(store)

    assert store.jobs.fail(claimed(store), "name \0 and \udcff and é")

    assert store.jobs.page()[0].message == "name \\x00 and \\udcff and é"


def test_a_queued_job_is_cancelled_at_once_and_never_claimed(store: Store) -> None:
    job_id = submit(store)

    job = store.jobs.cancel(job_id)

    assert (job.state, job.cancel_requested) == ("cancelled", True)
    assert store.jobs.claim("worker", 60) is None
    assert store.jobs.cancel(job_id) == job
    with pytest.raises(UnknownError):
        store.jobs.cancel("x")


def test_a_running_job_hears_of_its_cancellation_when_it_renews(store: Store) -> None:
    submit(store)
    claim = claimed(store)

    assert store.jobs.cancel(claim.job.id).state == "running"

    assert store.jobs.renew(claim, 60) == "cancel"
    assert store.jobs.stopped(claim)
    job = store.jobs.get(claim.job.id)
    assert (job.state, job.message) == ("cancelled", "cancelled while it ran")
    assert store.jobs.cancel(job.id).state == "cancelled"


@pytest.mark.parametrize("end", ["release", "retry", "expire"])
def test_a_cancelled_job_that_is_given_back_does_not_run_again(store: Store, end: str) -> None:
    submit(store)
    claim = claimed(store)
    store.jobs.cancel(claim.job.id)

    if end == "release":
        assert store.jobs.release(claim)
    elif end == "retry":
        assert store.jobs.retry(claim, "killed")
    else:
        expire(store, claim)

    assert store.jobs.claim("other", 60) is None
    assert store.jobs.get(claim.job.id).state == "cancelled"


def test_a_finished_job_cannot_be_cancelled(store: Store) -> None:
    submit(store)
    claim = claimed(store)
    store.jobs.finish(claim, message="", result={})

    job = store.jobs.cancel(claim.job.id)

    assert (job.state, job.cancel_requested) == ("done", False)


def test_a_job_given_back_on_shutdown_keeps_its_attempts_one_that_failed_does_not(store: Store) -> None:
    job_id = submit(store)

    assert store.jobs.release(claimed(store))
    assert store.jobs.get(job_id).attempts == 0
    assert store.jobs.retry(claimed(store), "killed")
    job = store.jobs.get(job_id)
    assert (job.state, job.attempts, job.message) == ("queued", 1, "killed")
    assert claimed(store).job.message == ""


def test_an_output_is_taken_once_however_many_watch(store: Store) -> None:
    def take(case: str) -> bool:
        job = store.watched.take("/out", case, "f", case_request(case), batch="out", queue_limit=1000)
        return job is not None

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, [f"case {n // 4}" for n in range(40)]))

    assert sum(taken) == 10
    assert store.jobs.counts()["queued"] == 10
    assert store.watched.known("/out", "case 1", "f")
    assert not store.watched.known("/out", "case 1", "g")


def test_an_output_that_finds_the_queue_full_is_not_marked_as_taken(store: Store) -> None:
    submit(store)
    with pytest.raises(QueueFullError):
        store.watched.take("/out", "a", "f", case_request("a"), batch="", queue_limit=1)

    assert not store.watched.known("/out", "a", "f")
    assert store.watched.take("/out", "a", "f", case_request("a"), batch="", queue_limit=2) is not None


def test_counts_and_the_oldest_waiting_job(store: Store) -> None:
    assert store.jobs.oldest_queued() is None
    ids = [submit(store) for _ in range(5)]
    store.jobs.finish(claimed(store), message="", result={})
    store.jobs.fail(claimed(store), "")
    store.jobs.cancel(ids[2])
    claimed(store)

    assert store.jobs.counts() == {"queued": 1, "running": 1, "done": 1, "failed": 1, "cancelled": 1}
    assert store.jobs.oldest_queued() == store.jobs.get(ids[4]).created


def test_pages_follow_each_other_newest_first_and_filter(store: Store) -> None:
    ids = sorted((submit(store, batch=f"batch {n % 2}") for n in range(7)), reverse=True)

    first = store.jobs.page(limit=3)
    second = store.jobs.page(limit=3, before=first[-1].id)

    assert [job.id for job in first + second] == ids[:6]
    claim = claimed(store)
    assert [job.id for job in store.jobs.page(state="running")] == [claim.job.id]
    assert {job.batch for job in store.jobs.page(batch="batch 1")} == {"batch 1"}
    assert len(store.jobs.page(batch="batch 1")) == 3
    assert store.jobs.page(kind="fit") == []
    assert len(store.jobs.page(kind="qa")) == 7


def test_the_clock_is_shared_and_true(store: Store) -> None:
    assert abs(store.now() - time.time()) < 60


def test_workers_are_seen_while_they_show_up(store: Store) -> None:
    store.workers.beat("a")
    store.workers.beat("b", "job")
    store.workers.beat("a", "other job")

    assert [(w.name, w.job_id) for w in store.workers.alive()] == [("a", "other job"), ("b", "job")]
    assert store.workers.alive(within_s=-1.0) == []
    store.workers.leave("a")
    assert [w.name for w in store.workers.alive()] == ["b"]


def test_what_is_submitted_is_there_after_closing_and_opening(store: Store, store_url: str) -> None:
    job_id = submit(store)
    store.close()

    again = open_store(store_url)

    assert again.jobs.get(job_id).state == "queued"
    again.close()


def test_a_case_whose_job_failed_is_listed_as_failed(store: Store) -> None:
    store.watched.take("/out", "a", "f", case_request("a"), batch="out", queue_limit=10)
    claim = claimed(store)
    assert store.jobs.fail(claim, "truncated")
    assert store.jobs.fail(claim, "truncated")  # said again, because the first answer was lost
    found = store.cases.page()
    assert [(row.case.case_id, row.case.status, row.case.error) for row in found] == [("a", "failed", "truncated")]


def test_a_case_whose_worker_died_too_often_is_listed_as_failed(store: Store) -> None:
    store.watched.take("/out", "a", "f", case_request("a"), batch="out", queue_limit=10)
    assert store.jobs.claim("w", -1.0, attempts=1) is not None
    assert store.jobs.take_back_lost(1) == 1
    assert [(row.case.case_id, row.case.status) for row in store.cases.page()] == [("a", "failed")]


@pytest.mark.parametrize("end", ["fail", "cancel", "cancel while running"])
def test_a_job_tried_again_is_the_same_job_with_all_its_attempts(store: Store, end: str) -> None:
    job_id, later = submit(store), submit(store)
    before = store.jobs.get(job_id)
    if end == "cancel":
        store.jobs.cancel(job_id)
    else:
        claim = claimed(store)
        store.jobs.renew(claim, 60, JobProgress("apply", 1, 2))
        if end == "fail":
            assert store.jobs.fail(claim, "truncated")
        else:
            store.jobs.cancel(job_id)
            assert store.jobs.stopped(claim)

    assert store.jobs.try_again(job_id, queue_limit=10) == before

    again = claimed(store)
    assert (again.job.id, again.job.attempts, again.job.cancel_requested) == (job_id, 1, False)
    assert store.jobs.finish(again, message="", result={})
    assert claimed(store).job.id == later


def test_only_a_job_that_failed_or_was_cancelled_can_be_tried_again(store: Store) -> None:
    job_id = submit(store)
    with pytest.raises(WrongStateError, match=r"is queued; only one that failed or was cancelled"):
        store.jobs.try_again(job_id, queue_limit=10)
    claim = claimed(store)
    with pytest.raises(WrongStateError, match="is running"):
        store.jobs.try_again(job_id, queue_limit=10)
    store.jobs.finish(claim, message="", result={}, cases=[new_case("a")])
    with pytest.raises(WrongStateError, match="is done"):
        store.jobs.try_again(job_id, queue_limit=10)
    assert store.cases.count() == 1
    with pytest.raises(UnknownError):
        store.jobs.try_again("x", queue_limit=10)


def test_jobs_tried_again_by_many_at_once_keep_to_the_limit_of_the_queue(store: Store) -> None:
    ids = [submit(store) for _ in range(6)]
    for job_id in ids:
        store.jobs.cancel(job_id)

    def attempt(job_id: str) -> str:
        try:
            return store.jobs.try_again(job_id, queue_limit=4).state
        except (QueueFullError, WrongStateError) as error:
            return type(error).__name__

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(attempt, ids * 2))

    assert found.count("queued") == store.jobs.counts()["queued"] == 4


def test_a_watched_output_tried_again_is_listed_once_whatever_becomes_of_it(store: Store) -> None:
    def listed() -> list[tuple[str, str, str]]:
        return [(row.job_id, row.case.status, row.case.error) for row in store.cases.page()]

    job = store.watched.take("/out", "a", "f", case_request("a"), batch="out", queue_limit=10)
    assert job is not None
    store.jobs.fail(claimed(store), "truncated")

    store.jobs.try_again(job.id, queue_limit=10)
    assert listed() == [(job.id, "failed", "truncated")]  # it is not missing meanwhile
    assert store.watched.take("/out", "a", "f", case_request("a"), batch="out", queue_limit=10) is None
    store.jobs.fail(claimed(store), "still truncated")
    assert listed() == [(job.id, "failed", "still truncated")]

    store.jobs.try_again(job.id, queue_limit=10)
    store.jobs.cancel(job.id)
    assert listed() == [(job.id, "failed", "still truncated")]

    store.jobs.try_again(job.id, queue_limit=10)
    store.jobs.finish(claimed(store), message="", result={}, cases=[new_case("a")])
    assert listed() == [(job.id, "ok", "")]
    assert [each.id for each in store.jobs.page()] == [job.id]


def test_a_worker_that_lost_its_job_cannot_end_it_after_it_is_tried_again(store: Store) -> None:
    job_id = submit(store)
    late = claimed(store, -1.0)
    assert store.jobs.take_back_lost(1) == 1
    store.jobs.try_again(job_id, queue_limit=10)

    assert not store.jobs.fail(late, "too late")
    assert not store.jobs.finish(late, message="", result={}, cases=[new_case("a")])
    assert store.jobs.get(job_id).state == "queued"
    assert store.cases.count() == 0
