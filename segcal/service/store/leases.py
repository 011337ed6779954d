"""Jobs as workers see them: claimed for a while, kept by heartbeats, finished once.

A claim carries a random token. Every later step names it, and touches the job only while the token is the job's: a
worker that was thought dead and had its job given to another one cannot write anything any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Select, and_, delete, insert, select, update

from segcal.service.model import CalibratorRecord, Job, JobProgress, NewCase
from segcal.service.store.queue import NOBODYS, Queue, get_job
from segcal.service.store.rows import calibrator_row, case_row
from segcal.service.store.tables import calibrators as calibrators_table
from segcal.service.store.tables import cases as cases_table
from segcal.service.store.tables import is_queued, jobs


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a worker has, and the proof of it."""

    job: Job
    token: str


class Jobs(Queue):
    """The queue, and the work on it."""

    def claim(self, worker: str, lease_s: float, *, attempts: int = 3) -> Claim | None:
        """The oldest waiting job, for `lease_s` seconds; None when there is none.

        Jobs whose lease ran out are taken back first, as `take_back_lost` does. Two workers never get the same job.
        """
        if not self._anything_to_do():
            return None
        with self._database.write() as connection:
            now = self._database.now(connection)
            _take_back(connection, now, attempts)
            oldest = select(jobs.c.id).where(is_queued).order_by(jobs.c.id).limit(1)
            # Another worker's row is passed over instead of waited for; SQLite has one writer anyway.
            job_id = connection.execute(oldest.with_for_update(skip_locked=True)).scalar()
            if job_id is None:
                return None
            token = secrets.token_hex(16)
            values = {**NOBODYS, "token": token, "lease_until": now + lease_s}
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id)
                .values(state="running", worker=worker, started=now, attempts=jobs.c.attempts + 1, message="", **values)
            )
            return Claim(get_job(connection, job_id), token)

    def renew(
        self, claim: Claim, lease_s: float, progress: JobProgress | None = None
    ) -> Literal["held", "cancel", "lost"]:
        """Keep a job for `lease_s` more seconds and say how far it is.

        Returns:
            "cancel" when somebody asked the job to stop, "lost" when it is no longer this worker's.
        """
        with self._database.write() as connection:
            values: dict[str, Any] = {"lease_until": self._database.now(connection) + lease_s}
            if progress is not None:
                values |= {"stage": progress.stage, "done": progress.done, "total": progress.total}
            if connection.execute(update(jobs).where(_held(claim)).values(values)).rowcount == 0:
                return "lost"
            asked = connection.execute(select(jobs.c.cancel_requested).where(jobs.c.id == claim.job.id)).scalar_one()
            return "cancel" if asked else "held"

    def finish(
        self,
        claim: Claim,
        *,
        message: str,
        result: dict[str, Any],
        cases: Sequence[NewCase] = (),
        calibrators: Sequence[CalibratorRecord] = (),
    ) -> bool:
        """Make a job's outcome visible, all of it at once; False when the job is no longer this worker's.

        May be called again when the answer to the first call was lost on its way.
        """
        with self._database.write() as connection:
            now = self._database.now(connection)
            values = {"state": "done", "finished": now, "lease_until": None, "message": message, "result": result}
            if connection.execute(update(jobs).where(_held(claim)).values(values)).rowcount == 0:
                return _is_ours(connection, claim, "done")
            _write_cases(connection, claim.job, cases, now)
            for record in calibrators:
                self._database.insert_new(connection, calibrators_table, calibrator_row(record))
            return True

    def fail(self, claim: Claim, message: str) -> bool:
        """End a job with the reason; False when it is no longer this worker's."""
        return self._end(claim, "failed", message)

    def stopped(self, claim: Claim) -> bool:
        """End a job that was asked to stop; False when it is no longer this worker's."""
        return self._end(claim, "cancelled", "cancelled while it ran")

    def release(self, claim: Claim) -> bool:
        """Give a job back because the worker is shutting down; the attempt does not count."""
        return self._give_back(claim, message="", attempts=jobs.c.attempts - 1)

    def retry(self, claim: Claim, message: str) -> bool:
        """Give a job back because this attempt came to grief; it counts."""
        return self._give_back(claim, message=message, attempts=jobs.c.attempts)

    def take_back_lost(self, attempts: int) -> int:
        """Look for jobs whose worker was not heard of in time: queued again, or given up after `attempts`.

        Returns:
            how many there were.
        """
        with self._database.write() as connection:
            return _take_back(connection, self._database.now(connection), attempts)

    def _anything_to_do(self) -> bool:
        """A look that takes no lock, so that idle workers are in nobody's way."""
        waiting = select(jobs.c.id).where(is_queued).order_by(jobs.c.id).limit(1)
        with self._database.read() as connection:
            if connection.execute(waiting).first() is not None:
                return True
            lost = select(jobs.c.id).where(_overdue(self._database.now(connection))).limit(1)
            return connection.execute(lost).first() is not None

    def _end(self, claim: Claim, state: str, message: str) -> bool:
        with self._database.write() as connection:
            now = self._database.now(connection)
            values = {"state": state, "finished": now, "lease_until": None}
            ended = update(jobs).where(_held(claim)).values(message=message, **values)
            if connection.execute(ended).rowcount == 0:
                return _is_ours(connection, claim, state)
            if state == "failed":
                _write_cases(connection, claim.job, _failed_case(claim.job, message), now)
            return True

    def _give_back(self, claim: Claim, *, message: str, attempts: Any) -> bool:
        with self._database.write() as connection:
            now = self._database.now(connection)
            asked = and_(_held(claim), jobs.c.cancel_requested)
            stopped = {"state": "cancelled", "finished": now, "lease_until": None, "message": "cancelled while it ran"}
            if connection.execute(update(jobs).where(asked).values(stopped)).rowcount == 1:
                return True
            values = {**NOBODYS, "state": "queued", "message": message, "attempts": attempts}
            return connection.execute(update(jobs).where(_held(claim)).values(values)).rowcount == 1


def _held(claim: Claim) -> Any:
    return and_(jobs.c.id == claim.job.id, jobs.c.state == "running", jobs.c.token == claim.token)


def _overdue(now: float) -> Any:
    return and_(jobs.c.state == "running", jobs.c.lease_until < now)


def _is_ours(connection: Connection, claim: Claim, state: str) -> bool:
    """Whether this very claim brought the job to `state` already."""
    ours: Select[Any] = select(jobs.c.id).where(
        jobs.c.id == claim.job.id, jobs.c.state == state, jobs.c.token == claim.token
    )
    return connection.execute(ours).first() is not None


def _write_cases(connection: Connection, job: Job, found: Sequence[NewCase], now: float) -> None:
    """What is known of a job's cases now, instead of what it failed with before it was tried again."""
    connection.execute(delete(cases_table).where(cases_table.c.job_id == job.id))
    rows = [case_row(case, number=i, job_id=job.id, batch=job.batch, now=now) for i, case in enumerate(found)]
    if rows:
        connection.execute(insert(cases_table), rows)


def _failed_case(job: Job, message: str) -> list[NewCase]:
    """The row of a case whose job came to nothing: in the overview of its day it must not be missing."""
    if job.kind != "case":
        return []
    return [NewCase(job.request["case"], "failed", job.request["calibrator"], error=message)]


def _take_back(connection: Connection, now: float, attempts: int) -> int:
    lost = select(jobs.c.id, jobs.c.attempts, jobs.c.cancel_requested, jobs.c.worker).where(_overdue(now))
    rows = connection.execute(lost.with_for_update(skip_locked=True)).all()
    for job_id, tried, asked, worker in rows:
        values: dict[str, Any] = {**NOBODYS, "state": "queued"}
        if asked:
            values |= {"state": "cancelled", "finished": now, "message": "cancelled; its worker had died"}
        elif tried >= attempts:
            text = _given_up(tried, worker)
            values |= {"state": "failed", "finished": now, "message": text}
            job = get_job(connection, job_id)
            _write_cases(connection, job, _failed_case(job, text), now)
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(values))
    return len(rows)


def _given_up(tried: int, worker: str) -> str:
    times = "once" if tried == 1 else f"{tried} times"
    return (
        f"given up: its worker died {times} while at it (last: {worker}). Most often memory ran out: look into the "
        "worker's log, give it more memory or smaller cases, then try the job again."
    )
