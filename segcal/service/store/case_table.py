"""The cases that jobs looked at: the overview, its filters and orders, the trend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from sqlalchemy import ColumnElement, Select, case, func, select

from segcal.service.errors import UnknownError
from segcal.service.model import CaseRecord
from segcal.service.store.database import Database
from segcal.service.store.rows import case_of
from segcal.service.store.tables import cases

CaseOrder: TypeAlias = Literal[
    "worst", "newest", "case", "expected_dsc", "boundary_confidence", "disagreement", "outlyingness"
]
"""`worst`: failed, then most flags, then lowest expected DSC. Numbers: lowest first, undefined ones last."""


class CaseFilter(TypedDict, total=False):
    """Which cases; what is None, empty or absent does not matter."""

    batch: str | None
    day: str | None
    calibrator: str | None
    flagged: bool | None
    status: Literal["ok", "failed"] | None
    search: str


@dataclass(frozen=True, slots=True)
class DayBatch:
    """One batch on one day.

    Attributes:
        day: "YYYY-MM-DD" in UTC.
        batch: its name.
        n_cases, n_flagged, n_failed: of how many cases, with flags, without a result.
        mean_expected_dsc: over the cases that have one; None without any.
        job_id: the latest of the jobs it came from.
    """

    day: str
    batch: str
    n_cases: int
    n_flagged: int
    n_failed: int
    mean_expected_dsc: float | None
    job_id: str


@dataclass(frozen=True, slots=True)
class TrendPoint:
    """What the trend shows of a case; see `NewCase`."""

    key: int
    case_id: str
    created: float
    day: str
    n_flags: int
    expected_dsc: float | None
    boundary_confidence: float | None
    z_free_energy: float | None
    z_free_energy_std: float | None
    z_confidence: float | None


class Cases:
    """Reads the cases; they are written by `Jobs.finish` only."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, key: int) -> CaseRecord:
        """One case.

        Raises:
            UnknownError: there is none of that number.
        """
        found = self._records(select(cases).where(cases.c.key == key))
        if not found:
            raise UnknownError(f"there is no case {key}")
        return found[0]

    def page(
        self,
        *,
        sort: CaseOrder = "worst",
        descending: bool = False,
        limit: int = 50,
        offset: int = 0,
        **wanted: Unpack[CaseFilter],
    ) -> list[CaseRecord]:
        """A part of the cases that fit; `descending` turns the order of `sort` round."""
        statement = select(cases).where(*_conditions(wanted)).order_by(*_order(sort, descending))
        return self._records(statement.limit(limit).offset(offset))

    def count(self, **wanted: Unpack[CaseFilter]) -> int:
        """How many fit."""
        with self._database.read() as connection:
            statement = select(func.count()).select_from(cases).where(*_conditions(wanted))
            return int(connection.execute(statement).scalar_one())

    def worst_first(self, *, batch: str, day: str, limit: int) -> list[tuple[int, str]]:
        """Number and name of the cases of a batch on a day, in the order of `worst`; without their numbers, so fast."""
        wanted = _conditions({"batch": batch, "day": day})
        statement = select(cases.c.key, cases.c.case_id).where(*wanted).order_by(*_order("worst", False))
        with self._database.read() as connection:
            return [(int(row.key), str(row.case_id)) for row in connection.execute(statement.limit(limit))]

    def of_job(self, job_id: str) -> list[CaseRecord]:
        """All cases of a job, in the order the job gave them."""
        return self._records(select(cases).where(cases.c.job_id == job_id).order_by(cases.c.number))

    def days(self, limit: int = 60) -> list[DayBatch]:
        """The last `limit` batches by day; newest day first, within a day the one with the latest job first."""
        statement = (
            select(
                cases.c.day,
                cases.c.batch,
                func.count(),
                func.sum(case((cases.c.n_flags > 0, 1), else_=0)),
                func.sum(case((cases.c.status == "failed", 1), else_=0)),
                func.avg(cases.c.expected_dsc),
                func.max(cases.c.job_id),
            )
            .group_by(cases.c.day, cases.c.batch)
            .order_by(cases.c.day.desc(), cases.c.batch.desc())
            .limit(limit)
        )
        with self._database.read() as connection:
            found = [DayBatch(*row) for row in connection.execute(statement)]
        return sorted(found, key=lambda entry: (entry.day, entry.job_id), reverse=True)

    def trend(self, *, calibrator: str | None = None, batch: str | None = None, limit: int = 500) -> list[TrendPoint]:
        """The last `limit` cases that worked, oldest first."""
        conditions = _conditions({"batch": batch, "calibrator": calibrator, "status": "ok"})
        columns = [cases.c[name] for name in TrendPoint.__dataclass_fields__]
        statement = select(*columns).where(*conditions).order_by(cases.c.key.desc()).limit(limit)
        with self._database.read() as connection:
            return [TrendPoint(*row) for row in connection.execute(statement)][::-1]

    def _records(self, statement: Select[Any]) -> list[CaseRecord]:
        with self._database.read() as connection:
            return [case_of(row) for row in connection.execute(statement).mappings()]


def _conditions(wanted: CaseFilter) -> list[ColumnElement[bool]]:
    """For a WHERE."""
    pairs = [(cases.c[name], wanted.get(name)) for name in ("batch", "day", "calibrator", "status")]
    found: list[ColumnElement[bool]] = [column == value for column, value in pairs if value is not None]
    flagged = wanted.get("flagged")
    if flagged is not None:
        found.append(cases.c.n_flags > 0 if flagged else cases.c.n_flags == 0)
    if search := wanted.get("search"):
        # As it is written, too: SQLite, and PostgreSQL in the locale "C", know small letters from a to z only.
        name = cases.c.case_id
        small = func.lower(name).contains(search.lower(), autoescape=True)
        found.append(small | name.contains(search, autoescape=True))
    return found


def _order(sort: CaseOrder, descending: bool) -> list[ColumnElement[Any]]:
    if sort == "worst":
        columns: list[ColumnElement[Any]] = [cases.c.badness.desc(), cases.c.key.desc()]
        turned: list[ColumnElement[Any]] = [cases.c.badness, cases.c.key]
    elif sort == "newest":
        columns, turned = [cases.c.key.desc()], [cases.c.key]
    elif sort == "case":
        columns, turned = [cases.c.case_id, cases.c.key], [cases.c.case_id.desc(), cases.c.key.desc()]
    else:
        number = cases.c[sort]
        columns = [number.asc().nulls_last(), cases.c.key]
        turned = [number.desc().nulls_last(), cases.c.key.desc()]
    return turned if descending else columns
