"""The calibrators the service knows; their files lie under their hash."""

from __future__ import annotations

from sqlalchemy import func, select, update

from segcal.service.errors import UnknownError
from segcal.service.model import CalibratorRecord
from segcal.service.store.database import Database
from segcal.service.store.rows import calibrator_of, calibrator_row
from segcal.service.store.tables import calibrators, cases


class Calibrators:
    """Adding, listing and retiring."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, record: CalibratorRecord) -> bool:
        """Make a calibrator known; False when it was already, and stays as it was."""
        with self._database.write() as connection:
            return self._database.insert_new(connection, calibrators, calibrator_row(record))

    def get(self, sha256: str) -> CalibratorRecord:
        """One calibrator.

        Raises:
            UnknownError: there is none of that hash.
        """
        with self._database.read() as connection:
            statement = select(calibrators).where(calibrators.c.sha256 == sha256)
            row = connection.execute(statement).mappings().one_or_none()
        if row is None:
            raise UnknownError(f"there is no calibrator {sha256!r}")
        return calibrator_of(row)

    def retire(self, sha256: str) -> CalibratorRecord:
        """Let no new job take it; jobs that have it go on. When it was retired first is kept."""
        with self._database.write() as connection:
            active = update(calibrators).where(calibrators.c.sha256 == sha256, calibrators.c.retired.is_(None))
            connection.execute(active.values(retired=self._database.now(connection)))
        return self.get(sha256)

    def n_cases(self, sha256: str) -> int:
        """How many cases it was used for."""
        statement = select(func.count()).select_from(cases).where(cases.c.calibrator == sha256)
        with self._database.read() as connection:
            return int(connection.execute(statement).scalar_one())

    def batches(self, sha256: str, limit: int = 50) -> list[str]:
        """In which batches it was used, the latest first."""
        latest = func.max(cases.c.key)
        statement = select(cases.c.batch).where(cases.c.calibrator == sha256).group_by(cases.c.batch)
        with self._database.read() as connection:
            return [str(batch) for batch in connection.scalars(statement.order_by(latest.desc()).limit(limit))]

    def list(self, *, with_retired: bool = True) -> list[CalibratorRecord]:
        """All of them, newest first."""
        statement = select(calibrators).order_by(calibrators.c.created.desc(), calibrators.c.sha256)
        if not with_retired:
            statement = statement.where(calibrators.c.retired.is_(None))
        with self._database.read() as connection:
            return [calibrator_of(row) for row in connection.execute(statement).mappings()]
