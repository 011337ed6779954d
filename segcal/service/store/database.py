"""A connection to SQLite or PostgreSQL: short transactions, no endless waiting, errors in words."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Insert,
    Table,
    create_engine,
    event,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from segcal.service.errors import StoreError

BUSY_SECONDS = 10.0
"""How long a transaction waits for another one before it gives up."""

_LOCK_KEYS = {"schema": 0x5E6CA1_00, "submit": 0x5E6CA1_01, "prune": 0x5E6CA1_02}
_POSTGRES_NAMES = ("postgresql", "postgres", "postgresql+psycopg")
_POSTGRES_OPTIONS = f"-c statement_timeout=30s -c lock_timeout={BUSY_SECONDS:.0f}s"


class Database:
    """Opens transactions on one engine.

    Attributes:
        engine: SQLAlchemy's, with its pool of connections.
        name: the database in messages; never with a password.
    """

    def __init__(self, url: str) -> None:
        parsed = _checked(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self.name = f"{parsed.database}" if self.is_sqlite else f"PostgreSQL {parsed.host or ''}/{parsed.database}"
        self.engine = _sqlite_engine(parsed) if self.is_sqlite else _postgres_engine(parsed)
        self._writer = self.engine.execution_options(segcal_write=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads: one consistent picture in SQLite, waits for nobody."""
        with self._worded(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes; it is all there afterwards, or nothing of it.

        SQLite takes the lock for writing at its beginning, so that two never find out at the end that they cannot
        both go on.
        """
        with self._worded(), self._writer.begin() as connection:
            yield connection

    def lock(self, connection: Connection, name: str) -> None:
        """Keep others out of what has the same name until the transaction ends; in SQLite a writer is alone anyway."""
        if not self.is_sqlite:
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK_KEYS[name])))

    def now(self, connection: Connection) -> float:
        """Seconds since 1970 by the database's clock, the only one that several machines share."""
        if self.is_sqlite:
            return time.time()
        return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())

    def insert_new(self, connection: Connection, table: Table, values: dict[str, Any]) -> bool:
        """Insert a row unless one with a key of its is there; whether it was new."""
        statement: Insert
        if self.is_sqlite:
            statement = sqlite.insert(table).values(values).on_conflict_do_nothing()
        else:
            statement = postgresql.insert(table).values(values).on_conflict_do_nothing()
        # Of an INSERT SQLAlchemy keeps the count only when asked to.
        return connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 1

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()

    @contextmanager
    def _worded(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise StoreError(f"the store ({self.name}) {_reason(error)}") from error


def _checked(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreError(
            "the store's address is no address; give postgresql://user@host/database or sqlite:////path/segcal.db"
        ) from None
    if parsed.drivername in _POSTGRES_NAMES:
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if not parsed.database or parsed.database == ":memory:":
            raise StoreError("the store must be a file that server and workers share; give sqlite:////path/segcal.db")
        return parsed.set(drivername="sqlite+pysqlite")
    raise StoreError(f"the store cannot be {parsed.drivername!r}; segcal keeps it in sqlite or postgresql")


def _sqlite_engine(url: URL) -> Engine:
    path = Path(str(url.database))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # It names patients' cases: for its owner only. SQLite gives its side files the same rights.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreError(f"the store ({path}) cannot be opened: {error.strerror}") from error
    engine = create_engine(
        url, pool_size=8, max_overflow=40, pool_timeout=BUSY_SECONDS, connect_args={"timeout": BUSY_SECONDS}
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own idea of when to begin is off; `_begin` does it
        _use_wal(connection)
        connection.execute("PRAGMA foreign_keys = ON")
        # Every commit reaches the disk before anybody is told of it, also in a power cut.
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("segcal_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _use_wal(connection: Any) -> None:
    """Readers and one writer at once. The switch is kept in the file; SQLite does not wait for a lock to make it."""
    import sqlite3

    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _postgres_engine(url: URL) -> Engine:
    arguments: dict[str, Any] = {"connect_timeout": 5, "application_name": "segcal"}
    if "options" not in url.query:
        arguments["options"] = _POSTGRES_OPTIONS
    given = {key: value for key, value in arguments.items() if key not in url.query}
    return create_engine(
        url, pool_size=8, max_overflow=40, pool_timeout=BUSY_SECONDS, pool_pre_ping=True, connect_args=given
    )


def _reason(error: SQLAlchemyError) -> str:
    """What went wrong, without the statement and its values."""
    # `DBAPIError` prints both; what the driver said is enough.
    said = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    first = (said.strip().splitlines() or [type(error).__name__])[0]
    if "database is locked" in said:
        return f"is busy: another process has been writing for more than {BUSY_SECONDS:.0f} s; try again"
    if "disk is full" in said:
        return "cannot write: the disk is full; free some space"
    if "readonly" in said or "read-only" in said:
        return f"cannot be written to: {first}"
    return f"does not answer as it should: {first}"
