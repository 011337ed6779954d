"""Which outputs of watched folders became jobs: each exactly once, whoever watches and however often."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select

from segcal.service.model import Job, new_id
from segcal.service.requests import CaseRequest
from segcal.service.store.database import Database
from segcal.service.store.queue import insert_job
from segcal.service.store.tables import watched

WATCHER = "watch"
"""Submitter of the jobs that nobody submitted."""


class Watched:
    """Takes outputs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def known(self, folder: str, case: str, fingerprint: str) -> bool:
        """Whether this output was taken before; a look that takes no lock."""
        with self._database.read() as connection:
            return connection.execute(_row(folder, case, fingerprint)).first() is not None

    def take(
        self, folder: str, case: str, fingerprint: str, request: CaseRequest, *, batch: str, queue_limit: int
    ) -> Job | None:
        """Make the job of an output, unless it was made before: then None. Note and job are one transaction.

        Raises:
            QueueFullError: no job may be added now; the output is not taken, and can be later.
        """
        if self.known(folder, case, fingerprint):
            return None
        with self._database.write() as connection:
            self._database.lock(connection, "submit")
            if connection.execute(_row(folder, case, fingerprint)).first() is not None:
                return None
            job = insert_job(
                self._database,
                connection,
                request,
                batch=batch,
                submitted_by=WATCHER,
                queue_limit=queue_limit,
                job_id=new_id(),
            )
            note = {"folder": folder, "case_name": case, "fingerprint": fingerprint, "job_id": job.id}
            connection.execute(watched.insert().values(taken=job.created, **note))
            return job


def _row(folder: str, case: str, fingerprint: str) -> Select[Any]:
    return select(watched.c.job_id).where(
        watched.c.folder == folder, watched.c.case_name == case, watched.c.fingerprint == fingerprint
    )
