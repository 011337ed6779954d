"""Which workers are there, by their own word."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select, update

from segcal.service.store.database import Database
from segcal.service.store.tables import workers

_FORGOTTEN_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker: its name, when it was last heard of, and the job it had then."""

    name: str
    seen: float
    job_id: str | None


class Workers:
    """Heartbeats and who sent them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def beat(self, name: str, job_id: str | None = None) -> None:
        """Say that a worker is alive."""
        with self._database.write() as connection:
            values = {"seen": self._database.now(connection), "job_id": job_id}
            if not self._database.insert_new(connection, workers, {"name": name, **values}):
                connection.execute(update(workers).where(workers.c.name == name).values(values))

    def leave(self, name: str) -> None:
        """Say that a worker ends; those that ended without a word are forgotten after a week."""
        with self._database.write() as connection:
            old = workers.c.seen < self._database.now(connection) - _FORGOTTEN_S
            connection.execute(delete(workers).where((workers.c.name == name) | old))

    def alive(self, within_s: float = 60.0) -> list[WorkerRecord]:
        """Those heard of in the last seconds, by name."""
        with self._database.read() as connection:
            since = self._database.now(connection) - within_s
            statement = select(workers).where(workers.c.seen >= since).order_by(workers.c.name)
            return [WorkerRecord(row.name, row.seen, row.job_id) for row in connection.execute(statement)]
