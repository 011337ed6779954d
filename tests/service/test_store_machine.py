"""The life of jobs as a state machine: any order of what users, workers and time can do, beside a plain model."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from segcal.service.errors import WrongStateError
from segcal.service.model import FINISHED, REPEATABLE
from segcal.service.store import Claim, open_store
from tests.service.postgres import running_postgres
from tests.service.stores import case_request, new_case, submit

ATTEMPTS = 2
LONG, OVER = 1000.0, -1.0
"""Leases: one that holds for the whole test, one that is over at once."""


@dataclass
class Expected:
    """What a job has to be."""

    state: str = "queued"
    attempts: int = 0
    asked: bool = False
    holder: str | None = None
    overdue: bool = False
    of_watch: bool = False
    row: str | None = None


class Life(RuleBasedStateMachine):
    """SQLite; `LifeOnPostgres` is the same on the other database."""

    claims = Bundle("claims")
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.store = open_store(self.url())
        self.jobs: dict[str, Expected] = {}
        self.finished_by: dict[str, str] = {}

    def url(self) -> str:
        return f"sqlite:///{Path(self._folder.name) / 'segcal.db'}"

    def teardown(self) -> None:
        self.store.close()
        self._folder.cleanup()

    @rule(target=ids)
    def submit(self) -> str:
        job_id = submit(self.store)
        self.jobs[job_id] = Expected()
        return job_id

    @rule(target=ids)
    def appear(self) -> str:
        """An output of its own in a watched folder; taken again, it is no new one."""
        name = f"case {len(self.jobs)}"
        made, again = (
            self.store.watched.take("/out", name, "f", case_request(name), batch="out", queue_limit=10_000)
            for _ in range(2)
        )
        assert made is not None
        assert again is None
        self.jobs[made.id] = Expected(of_watch=True)
        return made.id

    @rule(target=claims, lease_s=st.sampled_from([LONG, LONG, OVER]))
    def claim(self, lease_s: float) -> Claim | None:
        claim = self.store.jobs.claim("worker", lease_s, attempts=ATTEMPTS)
        if self._waiting() or self._overdue():  # otherwise the look that takes no lock ends it
            self._take_back()
        waiting = self._waiting()
        if claim is None:
            assert not waiting
            return None
        assert claim.job.id == waiting[0]
        job = self.jobs[claim.job.id]
        job.state, job.holder, job.overdue = "running", claim.token, lease_s == OVER
        job.attempts += 1
        assert claim.job.attempts == job.attempts
        return claim

    @rule(claim=claims, lease_s=st.sampled_from([LONG, OVER]))
    def renew(self, claim: Claim | None, lease_s: float) -> None:
        if claim is None:
            return
        answer = self.store.jobs.renew(claim, lease_s)
        job = self._held(claim)
        if job is None:
            assert answer == "lost"
        else:
            assert answer == ("cancel" if job.asked else "held")
            job.overdue = lease_s == OVER

    @rule(claim=claims)
    def finish(self, claim: Claim | None) -> None:
        if claim is None:
            return
        done = self.store.jobs.finish(claim, message="", result={}, cases=[new_case("a")])
        job = self._held(claim)
        again = self.finished_by.get(claim.job.id) == claim.token
        assert done == (job is not None or again)
        if job is not None:
            assert claim.job.id not in self.finished_by
            self.finished_by[claim.job.id] = claim.token
            job.state, job.holder, job.row = "done", None, "ok"

    @rule(claim=consumes(claims), how=st.sampled_from(["fail", "stopped", "release", "retry"]))
    def end_otherwise(self, claim: Claim | None, how: str) -> None:
        if claim is None:
            return
        jobs = self.store.jobs
        told = {
            "fail": lambda: jobs.fail(claim, "reason"),
            "stopped": lambda: jobs.stopped(claim),
            "release": lambda: jobs.release(claim),
            "retry": lambda: jobs.retry(claim, "reason"),
        }[how]()
        job = self._held(claim)
        assert told == (job is not None)
        if job is None:
            return
        job.holder = None
        if how in ("fail", "stopped"):
            job.state = "failed" if how == "fail" else "cancelled"
            self._note_failure(job)
        elif job.asked:
            job.state = "cancelled"
        else:
            job.state = "queued"
            job.attempts -= how == "release"

    @rule(job_id=ids)
    def cancel(self, job_id: str) -> None:
        found = self.store.jobs.cancel(job_id)
        job = self.jobs[job_id]
        if job.state == "queued":
            job.state, job.asked = "cancelled", True
        elif job.state == "running":
            job.asked = True
        assert found.state == job.state

    @rule(job_id=ids)
    def try_again(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if job.state not in REPEATABLE:
            with pytest.raises(WrongStateError):
                self.store.jobs.try_again(job_id, queue_limit=10_000)
            return
        assert self.store.jobs.try_again(job_id, queue_limit=10_000).state == "queued"
        job.state, job.attempts, job.asked = "queued", 0, False

    @rule()
    def time_passes(self) -> None:
        assert self.store.jobs.take_back_lost(ATTEMPTS) == len(self._overdue())
        self._take_back()

    @invariant()
    def every_job_is_where_it_has_to_be(self) -> None:
        found = {job.id: job for job in self.store.jobs.page(limit=1000)}
        assert found.keys() == self.jobs.keys()
        for job_id, job in self.jobs.items():
            assert (found[job_id].state, found[job_id].attempts) == (job.state, job.attempts)
            assert (found[job_id].finished is not None) == (job.state in FINISHED)
        counts = self.store.jobs.counts()
        assert counts["done"] == len(self.finished_by)
        assert sum(counts.values()) == len(self.jobs)

    @invariant()
    def every_case_is_listed_once_with_its_last_end(self) -> None:
        found = sorted((record.job_id, record.case.status) for record in self.store.cases.page(limit=1000))
        assert found == sorted((job_id, job.row) for job_id, job in self.jobs.items() if job.row is not None)
        assert sorted(job_id for job_id, status in found if status == "ok") == sorted(self.finished_by)

    def _waiting(self) -> list[str]:
        return sorted(job_id for job_id, job in self.jobs.items() if job.state == "queued")

    def _overdue(self) -> list[Expected]:
        return [job for job in self.jobs.values() if job.state == "running" and job.overdue]

    def _held(self, claim: Claim) -> Expected | None:
        job = self.jobs[claim.job.id]
        return job if job.state == "running" and job.holder == claim.token else None

    def _take_back(self) -> None:
        for job in self._overdue():
            job.holder, job.overdue = None, False
            job.state = "cancelled" if job.asked else "failed" if job.attempts >= ATTEMPTS else "queued"
            self._note_failure(job)

    def _note_failure(self, job: Expected) -> None:
        if job.of_watch and job.state == "failed":
            job.row = "failed"


class LifeOnPostgres(Life):
    """The same on PostgreSQL."""

    def url(self) -> str:
        return running_postgres().new_database()


TestLifeOnSqlite = Life.TestCase
TestLifeOnSqlite.settings = settings(max_examples=20, stateful_step_count=30)
TestLifeOnPostgres = LifeOnPostgres.TestCase
TestLifeOnPostgres.settings = settings(max_examples=5, stateful_step_count=30)
