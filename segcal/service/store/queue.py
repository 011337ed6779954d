"""Jobs as their submitters see them: put in, looked at, counted, cancelled, tried again."""

from __future__ import annotations

from typing import Any, get_args

from sqlalchemy import Connection, func, insert, select, update

from segcal.service.errors import KeyReusedError, QueueFullError, UnknownError, WrongStateError
from segcal.service.model import REPEATABLE, Job, JobKind, JobState, SubmissionKey, new_id
from segcal.service.requests import JobRequest
from segcal.service.store.database import Database
from segcal.service.store.rows import job_of
from segcal.service.store.tables import is_queued, jobs, keys

NOBODYS: dict[str, Any] = {"token": None, "lease_until": None, "stage": "", "done": 0, "total": 0}
"""Of a job that no worker has."""

_ANEW: dict[str, Any] = {
    **NOBODYS,
    "state": "queued",
    "attempts": 0,
    "started": None,
    "finished": None,
    "worker": "",
    "cancel_requested": False,
    "message": "",
    "result": {},
}


class Queue:
    """Submission, listing, cancelling and trying again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(
        self,
        request: JobRequest,
        *,
        batch: str,
        submitted_by: str,
        queue_limit: int,
        key: SubmissionKey | None = None,
        job_id: str | None = None,
    ) -> Job:
        """Put a job in the queue; with a `key` that was used before, give the job made then.

        Raises:
            QueueFullError: as many as `queue_limit` are waiting already.
            KeyReusedError: the key belongs to a job with another request.
        """
        with self._database.write() as connection:
            self._database.lock(connection, "submit")
            if key is not None and (known := _by_key(connection, key)) is not None:
                return same_job(known, request, key)
            job = insert_job(
                self._database,
                connection,
                request,
                batch=batch,
                submitted_by=submitted_by,
                queue_limit=queue_limit,
                job_id=job_id,
            )
            if key is not None:
                connection.execute(insert(keys).values(owner=key.owner, key=key.text, job_id=job.id))
            return job

    def by_key(self, key: SubmissionKey) -> Job | None:
        """The job that was submitted under a key; None if none was."""
        with self._database.read() as connection:
            return _by_key(connection, key)

    def get(self, job_id: str) -> Job:
        """One job.

        Raises:
            UnknownError: there is none of that id.
        """
        with self._database.read() as connection:
            return get_job(connection, job_id)

    def page(
        self,
        *,
        state: JobState | None = None,
        kind: JobKind | None = None,
        batch: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """The newest first; the next page starts `before` the last id of this one."""
        statement = select(jobs).order_by(jobs.c.id.desc()).limit(limit)
        if state == "queued":
            statement = statement.where(is_queued)
        for column, value in ((jobs.c.state, state), (jobs.c.kind, kind), (jobs.c.batch, batch)):
            if value is not None:
                statement = statement.where(column == value)
        if before is not None:
            statement = statement.where(jobs.c.id < before)
        with self._database.read() as connection:
            return [job_of(row) for row in connection.execute(statement).mappings()]

    def counts(self) -> dict[JobState, int]:
        """How many there are in every state."""
        statement = select(jobs.c.state, func.count().label("n")).group_by(jobs.c.state)
        with self._database.read() as connection:
            found = {row.state: int(row.n) for row in connection.execute(statement)}
        return {state: found.get(state, 0) for state in get_args(JobState)}

    def oldest_queued(self) -> float | None:
        """When the job that has waited longest was submitted."""
        statement = select(jobs.c.created).where(is_queued).order_by(jobs.c.id).limit(1)
        with self._database.read() as connection:
            found = connection.execute(statement).scalar()
        return None if found is None else float(found)

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop: at once if nobody has begun with it, at its worker's next heartbeat otherwise.

        A job that is finished stays as it is.
        """
        with self._database.write() as connection:
            now = self._database.now(connection)
            waiting = (
                update(jobs)
                .where(jobs.c.id == job_id, jobs.c.state == "queued")
                .values(state="cancelled", cancel_requested=True, finished=now, message="cancelled before it began")
            )
            if connection.execute(waiting).rowcount == 0:
                running = update(jobs).where(jobs.c.id == job_id, jobs.c.state == "running")
                connection.execute(running.values(cancel_requested=True))
            return get_job(connection, job_id)

    def try_again(self, job_id: str, *, queue_limit: int) -> Job:
        """Put a job that failed or was cancelled back into the queue, at its old place and with all its attempts.

        It stays the same job, so what became a job once is still done once. Until it has another end, the row of a case
        that tells of its failure stays in the overview.

        Raises:
            UnknownError: there is none of that id.
            WrongStateError: it waits, runs or is done.
            QueueFullError: as many as `queue_limit` are waiting already.
        """
        with self._database.write() as connection:
            self._database.lock(connection, "submit")
            job = get_job(connection, job_id)
            if job.state not in REPEATABLE:
                raise WrongStateError(
                    f"job {job_id} is {job.state}; only one that failed or was cancelled can be tried again"
                )
            _check_room(connection, queue_limit)
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(_ANEW))
            return get_job(connection, job_id)


def get_job(connection: Connection, job_id: str) -> Job:
    """One job, within a transaction; raises UnknownError."""
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise UnknownError(f"there is no job {job_id!r}")
    return job_of(row)


def insert_job(
    database: Database,
    connection: Connection,
    request: JobRequest,
    *,
    batch: str,
    submitted_by: str,
    queue_limit: int,
    job_id: str | None = None,
) -> Job:
    """Insert a queued job if there is room; the caller holds the lock "submit", so the limit is exact."""
    _check_room(connection, queue_limit)
    values: dict[str, Any] = {
        "id": job_id or new_id(),
        "state": "queued",
        "kind": request.kind,
        "batch": batch,
        "submitted_by": submitted_by,
        "created": database.now(connection),
        "request": request.model_dump(mode="json"),
        "result": {},
    }
    connection.execute(insert(jobs).values(values))
    return get_job(connection, values["id"])


def _check_room(connection: Connection, queue_limit: int) -> None:
    waiting = select(jobs.c.id).where(is_queued).limit(queue_limit).subquery()
    if connection.execute(select(func.count()).select_from(waiting)).scalar_one() >= queue_limit:
        raise QueueFullError(f"{queue_limit:,} jobs are waiting, and no more may; try again when some are done")


def same_job(known: Job, request: JobRequest, key: SubmissionKey) -> Job:
    """The job of a key, if the request that comes with the key now is the one it was made of.

    Raises:
        KeyReusedError: it is another one.
    """
    if dict(known.request) != request.model_dump(mode="json"):
        raise KeyReusedError(
            f"the idempotency key {key.text!r} was used for job {known.id} with another request; take a new key"
        )
    return known


def _by_key(connection: Connection, key: SubmissionKey) -> Job | None:
    named = select(keys.c.job_id).where(keys.c.owner == key.owner, keys.c.key == key.text)
    job_id = connection.execute(named).scalar()
    return None if job_id is None else get_job(connection, job_id)
