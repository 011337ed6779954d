"""What is durable: jobs, cases, calibrators, tokens, outputs that were seen.

Only the server and the workers' supervisors talk to it. SQLite (a file, one machine) or PostgreSQL (several).
"""

from __future__ import annotations

from sqlalchemy import select

from segcal.service.store.calibrator_table import Calibrators
from segcal.service.store.case_table import CaseFilter, CaseOrder, Cases, DayBatch, TrendPoint
from segcal.service.store.database import Database
from segcal.service.store.leases import Claim, Jobs
from segcal.service.store.old_jobs import OldJobs
from segcal.service.store.queue import same_job
from segcal.service.store.tables import schema
from segcal.service.store.token_table import Tokens
from segcal.service.store.versions import prepare
from segcal.service.store.watched import Watched
from segcal.service.store.workers import WorkerRecord, Workers

__all__ = [
    "CaseFilter",
    "CaseOrder",
    "Claim",
    "DayBatch",
    "Store",
    "TrendPoint",
    "WorkerRecord",
    "open_store",
    "same_job",
]


class Store:
    """The parts of one store. Threads may share it; processes open their own.

    Every method raises StoreError when the database cannot be reached, is full or stays locked.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.jobs = Jobs(database)
        self.cases = Cases(database)
        self.calibrators = Calibrators(database)
        self.tokens = Tokens(database)
        self.watched = Watched(database)
        self.workers = Workers(database)
        self.old_jobs = OldJobs(database)

    def ping(self) -> None:
        """Raise StoreError unless the database answers."""
        with self._database.read() as connection:
            connection.execute(select(schema.c.version)).scalar_one()

    def now(self) -> float:
        """Seconds since 1970 by the clock that leases and times of this store go by."""
        with self._database.read() as connection:
            return self._database.now(connection)

    def close(self) -> None:
        """Give all connections back."""
        self._database.close()


def open_store(url: str) -> Store:
    """Open a store, with its tables made or brought up to date; safe when several processes start at once.

    Args:
        url: sqlite:////path/segcal.db or postgresql://user:password@host/database.

    Raises:
        StoreError: it cannot be reached, or its tables are of a version this segcal does not know.
    """
    database = Database(url)
    try:
        prepare(database)
    except BaseException:
        database.close()
        raise
    return Store(database)
