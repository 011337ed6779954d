"""The tables of the store, the same in SQLite and in PostgreSQL, and the indexes that keep it quick when it is full."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    literal_column,
    text,
)

VERSION = 2
"""Of the tables below. A change to them needs the next number and its steps in `versions.MIGRATIONS`."""


class PlainText(TypeDecorator[str]):
    """Text that any database takes: NUL and halves of surrogate pairs, as file names have them, become escapes."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """See the class."""
        if value is None:
            return None
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


class JsonText(TypeDecorator[Any]):
    """A JSON value as ASCII text; NaN and infinities are refused, because readers elsewhere do not know them."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """See the class."""
        return None if value is None else json.dumps(value, allow_nan=False, separators=(",", ":"))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """See the class."""
        return None if value is None else json.loads(value)


metadata = MetaData()

_QUEUED = "state = 'queued'"

schema = Table("segcal_schema", metadata, Column("version", Integer, primary_key=True, autoincrement=False))

jobs = Table(
    "segcal_jobs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("batch", PlainText, nullable=False),
    Column("submitted_by", PlainText, nullable=False),
    Column("created", Float(53), nullable=False),
    Column("started", Float(53)),
    Column("finished", Float(53)),
    Column("attempts", Integer, nullable=False, default=0),
    Column("worker", PlainText, nullable=False, default=""),
    Column("token", String(64)),
    Column("lease_until", Float(53)),
    Column("stage", PlainText, nullable=False, default=""),
    Column("done", Integer, nullable=False, default=0),
    Column("total", Integer, nullable=False, default=0),
    Column("cancel_requested", Boolean, nullable=False, default=False),
    Column("message", PlainText, nullable=False, default=""),
    Column("request", JsonText, nullable=False),
    Column("result", JsonText, nullable=False),
    # The queue: the oldest that waits, how many wait, pages of one state.
    Index("segcal_jobs_state", "state", "id"),
    # PostgreSQL believes that waiting jobs lie among the others and walks the primary key to the first one, past
    # everything that was ever done, unless they have an index of their own.
    Index("segcal_jobs_queued", "id", postgresql_where=text(_QUEUED)).ddl_if(dialect="postgresql"),
    Index("segcal_jobs_kind", "kind", "id"),
    Index("segcal_jobs_batch", "batch", "id"),
)

is_queued = jobs.c.state == literal_column("'queued'")
"""As text and not as a value, so that PostgreSQL sees that the index of waiting jobs fits."""

# What lists and sorts stands first: SQLite then need not walk over the long JSON texts of a row.
cases = Table(
    "segcal_cases",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("job_id", String(40), ForeignKey("segcal_jobs.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("batch", PlainText, nullable=False),
    Column("day", String(10), nullable=False),
    Column("created", Float(53), nullable=False),
    Column("case_id", PlainText, nullable=False),
    Column("status", String(8), nullable=False),
    Column("calibrator", String(64)),
    Column("n_flags", Integer, nullable=False),
    Column("badness", Float(53), nullable=False),
    Column("expected_dsc", Float(53)),
    Column("boundary_confidence", Float(53)),
    Column("member_dice", Float(53)),
    Column("disagreement", Float(53)),
    Column("outlyingness", Float(53)),
    Column("z_free_energy", Float(53)),
    Column("z_free_energy_std", Float(53)),
    Column("z_confidence", Float(53)),
    Column("error", PlainText, nullable=False),
    Column("view", PlainText),
    Column("flags", JsonText, nullable=False),
    Column("files", JsonText, nullable=False),
    Column("numbers", JsonText, nullable=False),
    Column("reliability", JsonText),
    # A job's cases are written once, whatever else goes wrong.
    UniqueConstraint("job_id", "number", name="segcal_cases_once"),
    Index("segcal_cases_worst", "badness", "key"),
    Index("segcal_cases_batch", "batch", "day", "badness", "key"),
    Index("segcal_cases_calibrator", "calibrator", "key"),
    # Covers the overview by day: its sums are made from the index alone.
    Index("segcal_cases_day", "day", "batch", "job_id", "status", "n_flags", "expected_dsc"),
)

calibrators = Table(
    "segcal_calibrators",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("name", PlainText, nullable=False),
    Column("method", PlainText, nullable=False),
    Column("pooling", PlainText, nullable=False),
    Column("kind", PlainText, nullable=False),
    Column("created", Float(53), nullable=False),
    Column("retired", Float(53)),
    Column("classes", JsonText, nullable=False),
    Column("info", JsonText, nullable=False),
)

tokens = Table(
    "segcal_tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", PlainText, nullable=False),
    Column("scope", String(8), nullable=False),
    Column("hash", String(64), nullable=False),
    Column("created", Float(53), nullable=False),
    Column("expires", Float(53)),
    Column("revoked", Float(53)),
)

watched = Table(
    "segcal_watched",
    metadata,
    Column("folder", PlainText, primary_key=True),
    Column("case_name", PlainText, primary_key=True),
    Column("fingerprint", String(64), primary_key=True),
    # None once the job was removed because of its age; the output stays taken.
    Column("job_id", String(40), ForeignKey("segcal_jobs.id")),
    Column("taken", Float(53), nullable=False),
    Index("segcal_watched_job", "job_id"),
)

keys = Table(
    "segcal_keys",
    metadata,
    Column("owner", String(16), primary_key=True),
    Column("key", PlainText, primary_key=True),
    Column("job_id", String(40), ForeignKey("segcal_jobs.id"), nullable=False),
    Index("segcal_keys_job", "job_id"),
)

workers = Table(
    "segcal_workers",
    metadata,
    Column("name", PlainText, primary_key=True),
    Column("seen", Float(53), nullable=False),
    Column("job_id", String(40)),
)
