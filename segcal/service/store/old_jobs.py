"""Jobs that were finished long ago: found, and forgotten together with their files.

Files and rows cannot go in one step. The files are set aside, by a rename, within the transaction that removes the
rows; whoever finds files set aside learns here whether that transaction came to be.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import ColumnElement, and_, delete, func, select, update

from segcal.service.model import FINISHED
from segcal.service.store.database import Database
from segcal.service.store.tables import cases, jobs, keys, watched


class OldJobs:
    """Listing and forgetting."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def finished_before(self, moment: float, limit: int = 100) -> list[str]:
        """Ids of jobs that may be forgotten, oldest first."""
        statement = select(jobs.c.id).where(_old(moment)).order_by(jobs.c.id).limit(limit)
        with self._database.read() as connection:
            return [str(job_id) for job_id in connection.scalars(statement)]

    def forget(self, job_id: str, moment: float, set_aside: Callable[[], None]) -> bool:
        """Remove all rows of a job that still is as `finished_before` says; False when it is not.

        That an output of a watched folder was taken stays known, so it is not taken again.

        Args:
            set_aside: moves the job's files out of the way; what it raises leaves the rows as they are.
        """
        with self._database.write() as connection:
            self._database.lock(connection, "prune")
            # For update: somebody may be trying the job again in this moment.
            found = select(jobs.c.id).where(jobs.c.id == job_id, _old(moment)).with_for_update()
            if connection.execute(found).first() is None:
                return False
            set_aside()
            connection.execute(update(watched).where(watched.c.job_id == job_id).values(job_id=None))
            for table in (keys, cases):
                connection.execute(delete(table).where(table.c.job_id == job_id))
            connection.execute(delete(jobs).where(jobs.c.id == job_id))
            return True

    def if_kept(self, job_id: str, put_back: Callable[[], None]) -> bool:
        """Call `put_back` if a job whose files were set aside is still there; whether it is.

        Nobody forgets a job meanwhile.
        """
        with self._database.write() as connection:
            self._database.lock(connection, "prune")
            if connection.execute(select(jobs.c.id).where(jobs.c.id == job_id)).first() is None:
                return False
            put_back()
            return True


def _old(moment: float) -> ColumnElement[bool]:
    # The newest case stays, whatever its age: SQLite would give its number, which people have links to, to the next.
    newest = select(cases.c.job_id).where(cases.c.key == select(func.max(cases.c.key)).scalar_subquery())
    return and_(jobs.c.state.in_(FINISHED), jobs.c.finished < moment, jobs.c.id.not_in(newest))
