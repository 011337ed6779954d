"""Makes the tables, or brings those of an earlier version up to date; refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import insert, inspect, select, text, update

from segcal.service.errors import StoreError
from segcal.service.store.database import Database
from segcal.service.store.tables import VERSION, metadata, schema

MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    # Keys of submissions belong to a token, no longer to its name. Those of before are given to every token of the name
    # that was valid then, as they had been. SQLite cannot drop the old column, so it stays, unused.
    1: (
        "CREATE TABLE segcal_keys (owner VARCHAR(16) NOT NULL, key TEXT NOT NULL, job_id VARCHAR(40) NOT NULL, "
        "PRIMARY KEY (owner, key), FOREIGN KEY (job_id) REFERENCES segcal_jobs (id))",
        "INSERT INTO segcal_keys (owner, key, job_id) SELECT '', key, id FROM segcal_jobs "
        "WHERE key IS NOT NULL AND submitted_by = ''",
        "INSERT INTO segcal_keys (owner, key, job_id) SELECT t.id, j.key, j.id FROM segcal_jobs j "
        "JOIN segcal_tokens t ON t.name = j.submitted_by AND t.created <= j.created "
        "AND (t.revoked IS NULL OR t.revoked >= j.created) WHERE j.key IS NOT NULL",
        "CREATE INDEX segcal_keys_job ON segcal_keys (job_id)",
        # A watched output stays known when its job is removed. SQLite changes no column in place.
        "ALTER TABLE segcal_watched RENAME TO segcal_watched_1",
        "CREATE TABLE segcal_watched (folder TEXT NOT NULL, case_name TEXT NOT NULL, fingerprint VARCHAR(64) NOT NULL, "
        "job_id VARCHAR(40), taken FLOAT NOT NULL, PRIMARY KEY (folder, case_name, fingerprint), "
        "FOREIGN KEY (job_id) REFERENCES segcal_jobs (id))",
        "INSERT INTO segcal_watched (folder, case_name, fingerprint, job_id, taken) "
        "SELECT folder, case_name, fingerprint, job_id, taken FROM segcal_watched_1",
        "DROP TABLE segcal_watched_1",
        "CREATE INDEX segcal_watched_job ON segcal_watched (job_id)",
    ),
}
"""SQL steps from a version to the next one, good for both databases."""


def prepare(database: Database) -> None:
    """Leave the tables of `VERSION` behind. Safe when several processes start at once: one does it, others wait.

    Raises:
        StoreError: the tables are of a later version, or of an earlier one that cannot be brought up to date.
    """
    if _version(database) == VERSION:
        return
    with database.write() as connection:
        database.lock(connection, "schema")
        found = connection.execute(select(schema.c.version)).scalar() if _has_schema(connection) else None
        if found is None:
            metadata.create_all(connection)
            connection.execute(insert(schema).values(version=VERSION))
            return
        for version in range(int(found), VERSION):
            if version not in MIGRATIONS:
                break
            for step in MIGRATIONS[version]:
                connection.execute(text(step))
            connection.execute(update(schema).values(version=version + 1))
        reached = connection.execute(select(schema.c.version)).scalar_one()
        if reached != VERSION:
            raise StoreError(_refusal(database, int(found)))


def _version(database: Database) -> int | None:
    with database.read() as connection:
        if not _has_schema(connection):
            return None
        found = connection.execute(select(schema.c.version)).scalar()
    return None if found is None else int(found)


def _has_schema(connection: object) -> bool:
    inspector = inspect(connection)
    return bool(inspector is not None and inspector.has_table(schema.name))


def _refusal(database: Database, found: int) -> str:
    if found > VERSION:
        return (
            f"the store ({database.name}) was made by a later segcal (tables {found}, this one knows {VERSION}); "
            "install that version, or restore the back-up made before the upgrade"
        )
    return (
        f"the store ({database.name}) was made by an earlier segcal (tables {found}, this one needs {VERSION}) and "
        "cannot be brought up to date by this version; start the versions in between once, or begin with a new store"
    )
