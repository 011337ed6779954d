"""Opening a store: new, known, later, earlier, several at once, locked, full, out of reach."""

from __future__ import annotations

import sqlite3
import stat
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import inspect, update

from segcal.service.errors import StoreError
from segcal.service.model import SubmissionKey
from segcal.service.store import Store, open_store, versions
from segcal.service.store.database import Database
from segcal.service.store.tables import VERSION, schema
from tests.service.first_tables import first_tables
from tests.service.stores import new_case, submit


def set_version(store: Store, version: int) -> None:
    with store._database.write() as connection:
        connection.execute(update(schema).values(version=version))


def test_a_store_of_a_later_version_is_refused_with_the_way_out(store: Store, store_url: str) -> None:
    set_version(store, VERSION + 1)

    with pytest.raises(StoreError, match=r"made by a later segcal .* install that version"):
        open_store(store_url)


def test_a_store_of_an_earlier_version_without_a_way_up_is_refused(store: Store, store_url: str) -> None:
    set_version(store, 0)

    with pytest.raises(StoreError, match=r"made by an earlier segcal .* versions in between"):
        open_store(store_url)


def test_a_store_of_an_earlier_version_is_brought_up_to_date_and_keeps_its_jobs(
    store: Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store)
    set_version(store, VERSION - 2)
    steps: Mapping[int, tuple[str, ...]] = {
        VERSION - 2: ("CREATE TABLE segcal_new (id INTEGER)",),
        VERSION - 1: ("INSERT INTO segcal_new VALUES (7)", "ALTER TABLE segcal_new ADD COLUMN more INTEGER"),
    }
    monkeypatch.setattr(versions, "MIGRATIONS", steps)

    for _ in range(2):  # the second time there is nothing to do
        again = open_store(store_url)
        assert again.jobs.get(job_id).state == "queued"
        with again._database.read() as connection:
            assert [c["name"] for c in inspect(connection).get_columns("segcal_new")] == ["id", "more"]
        again.close()


@pytest.fixture
def first_version(store_url: str) -> str:
    """The address of a store as the first version made and filled it."""
    database = Database(store_url)
    with database.write() as connection:
        for statement in first_tables(sqlite=database.is_sqlite):
            connection.exec_driver_sql(statement)
    database.close()
    return store_url


def test_a_store_of_the_first_version_is_brought_up_to_date_with_its_keys(first_version: str) -> None:
    store = open_store(first_version)
    found = {
        (owner, text): None if (job := store.jobs.by_key(SubmissionKey(owner, text))) is None else job.id
        for owner in ("", "anna_then", "anna_now", "bert")
        for text in ("k", "other")
    }
    assert {pair: job for pair, job in found.items() if job is not None} == {
        ("", "k"): "3" * 24,
        ("anna_then", "k"): "1" * 24,
        ("bert", "k"): "2" * 24,
    }
    assert submit(store, key="k") == submit(store, key="k")
    assert store.jobs.counts()["queued"] == 5
    assert store.watched.known("/out", "a", "f")
    store.close()


def test_the_tables_of_an_upgraded_store_are_those_of_a_new_one(first_version: str, tmp_path: Path) -> None:
    """But for the column of keys, which SQLite cannot drop."""

    def columns(url: str) -> dict[str, set[str]]:
        opened = open_store(url)
        with opened._database.read() as connection:
            inspector = inspect(connection)
            found = {name: {c["name"] for c in inspector.get_columns(name)} for name in inspector.get_table_names()}
        opened.close()
        return found

    new, upgraded = columns(f"sqlite:///{tmp_path / 'new.db'}"), columns(first_version)
    upgraded["segcal_jobs"].remove("key")
    assert upgraded == new


def test_an_upgrade_that_fails_half_way_leaves_the_store_as_it_was(
    store: Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_version(store, VERSION - 1)
    steps = {VERSION - 1: ("CREATE TABLE segcal_new (id INTEGER)", "INSERT INTO segcal_absent VALUES (1)")}
    monkeypatch.setattr(versions, "MIGRATIONS", steps)

    with pytest.raises(StoreError):
        open_store(store_url)

    with store._database.read() as connection:
        assert not inspect(connection).has_table("segcal_new")
    assert versions._version(store._database) == VERSION - 1


def test_servers_and_workers_that_start_at_once_make_one_schema(store_url: str) -> None:
    """Each with an engine of its own, as processes have; only the moment is made to coincide."""
    together = threading.Barrier(8)

    def start(_: int) -> None:
        together.wait()
        open_store(store_url).close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(8)))

    opened = open_store(store_url)
    with opened._database.read() as connection:
        assert len(connection.execute(schema.select()).all()) == 1
    opened.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "no address"),
        ("mysql://host/db", "cannot be 'mysql'"),
        ("sqlite://", "must be a file"),
        ("sqlite:///:memory:", "must be a file"),
        ("sqlite:////proc/no/segcal.db", "cannot be opened"),
        ("postgresql://u:geheim@127.0.0.1:1/db", "PostgreSQL 127.0.0.1/db"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused_with_words_and_without_the_password(url: str, words: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(url)

    assert words in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "segcal.db"
    path.write_bytes(b"no database at all, only some text that is long enough to have a header" * 10)

    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite:///{path}")


def test_a_database_that_stays_locked_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segcal.service.store.database.BUSY_SECONDS", 0.3)
    url = f"sqlite:///{tmp_path / 'segcal.db'}"
    store = open_store(url)
    job_id = submit(store)
    other = sqlite3.connect(tmp_path / "segcal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    began = time.monotonic()
    with pytest.raises(StoreError, match=r"is busy: .* try again"):
        submit(store)
    assert time.monotonic() - began < 10
    assert store.jobs.get(job_id).state == "queued"  # readers do not wait for the writer

    other.execute("ROLLBACK")
    other.close()
    assert submit(store) != job_id
    store.close()


def test_a_full_disk_is_an_error_and_leaves_the_store_usable(tmp_path: Path) -> None:
    """SQLite's own limit on pages gives the error of a full disk."""
    store = open_store(f"sqlite:///{tmp_path / 'segcal.db'}")
    submit(store)
    claim = store.jobs.claim("worker", 60)
    assert claim is not None
    with store._database.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")  # never below what is in use

    with pytest.raises(StoreError, match="disk is full; free some space"):
        store.jobs.finish(claim, message="x" * 100_000, result={}, cases=[new_case("a")])

    with store._database.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert store.cases.count() == 0
    assert store.jobs.finish(claim, message="", result={}, cases=[new_case("a")])
    assert store.cases.count() == 1
    store.close()


def test_a_store_in_a_file_is_for_its_owner_only_and_survives_a_power_cut(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'deep' / 'segcal.db'}")
    submit(store)

    for path in (tmp_path / "deep").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    with store._database.read() as connection:
        settings = [connection.exec_driver_sql(f"PRAGMA {n}").scalar() for n in ("journal_mode", "synchronous")]
        assert settings == ["wal", 2]
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    store.close()


def test_ping_tells_when_the_tables_are_gone(store: Store) -> None:
    store.ping()
    with store._database.write() as connection:
        connection.execute(schema.delete())

    with pytest.raises(StoreError, match="does not answer as it should"):
        store.ping()
