"""The store as the first version made it, with jobs, tokens and keys in it."""

from __future__ import annotations

_REQUEST = '{"batch":"","calibrator":"a","cases":null,"folder":null,"kind":"qa","manifest":"/data/m.yaml"}'

_TABLES = (
    "CREATE TABLE segcal_schema (version INTEGER NOT NULL, PRIMARY KEY (version))",
    "CREATE TABLE segcal_calibrators (sha256 VARCHAR(64) NOT NULL, name TEXT NOT NULL, method TEXT NOT NULL, "
    "pooling TEXT NOT NULL, kind TEXT NOT NULL, created FLOAT NOT NULL, retired FLOAT, classes TEXT NOT NULL, "
    "info TEXT NOT NULL, PRIMARY KEY (sha256))",
    "CREATE TABLE segcal_jobs (id VARCHAR(40) NOT NULL, state VARCHAR(16) NOT NULL, kind VARCHAR(16) NOT NULL, "
    "batch TEXT NOT NULL, submitted_by TEXT NOT NULL, key TEXT, created FLOAT NOT NULL, started FLOAT, finished FLOAT, "
    "attempts INTEGER NOT NULL, worker TEXT NOT NULL, token VARCHAR(64), lease_until FLOAT, stage TEXT NOT NULL, "
    "done INTEGER NOT NULL, total INTEGER NOT NULL, cancel_requested BOOLEAN NOT NULL, message TEXT NOT NULL, "
    "request TEXT NOT NULL, result TEXT NOT NULL, PRIMARY KEY (id), "
    "CONSTRAINT segcal_jobs_key UNIQUE (submitted_by, key))",
    "CREATE INDEX segcal_jobs_state ON segcal_jobs (state, id)",
    "CREATE TABLE segcal_tokens (id VARCHAR(16) NOT NULL, name TEXT NOT NULL, scope VARCHAR(8) NOT NULL, "
    "hash VARCHAR(64) NOT NULL, created FLOAT NOT NULL, expires FLOAT, revoked FLOAT, PRIMARY KEY (id))",
    "CREATE TABLE segcal_workers (name TEXT NOT NULL, seen FLOAT NOT NULL, job_id VARCHAR(40), PRIMARY KEY (name))",
    "CREATE TABLE segcal_cases (key {serial} NOT NULL, job_id VARCHAR(40) NOT NULL, number INTEGER NOT NULL, "
    "batch TEXT NOT NULL, day VARCHAR(10) NOT NULL, created FLOAT NOT NULL, case_id TEXT NOT NULL, "
    "status VARCHAR(8) NOT NULL, calibrator VARCHAR(64), n_flags INTEGER NOT NULL, badness FLOAT NOT NULL, "
    "expected_dsc FLOAT, boundary_confidence FLOAT, member_dice FLOAT, disagreement FLOAT, outlyingness FLOAT, "
    "z_free_energy FLOAT, z_free_energy_std FLOAT, z_confidence FLOAT, error TEXT NOT NULL, view TEXT, "
    "flags TEXT NOT NULL, files TEXT NOT NULL, numbers TEXT NOT NULL, reliability TEXT, PRIMARY KEY (key), "
    "CONSTRAINT segcal_cases_once UNIQUE (job_id, number), FOREIGN KEY (job_id) REFERENCES segcal_jobs (id))",
    "CREATE TABLE segcal_watched (folder TEXT NOT NULL, case_name TEXT NOT NULL, fingerprint VARCHAR(64) NOT NULL, "
    "job_id VARCHAR(40) NOT NULL, taken FLOAT NOT NULL, PRIMARY KEY (folder, case_name, fingerprint), "
    "FOREIGN KEY (job_id) REFERENCES segcal_jobs (id))",
)

# The name anna was given to a second token after the first was revoked; each job is from the time 20.
_TOKENS = (("anna_then", "anna", 10, 30), ("anna_now", "anna", 40, "NULL"), ("bert", "bert", 10, "NULL"))
_JOBS = (("1", "anna", "'k'"), ("2", "bert", "'k'"), ("3", "", "'k'"), ("4", "anna", "NULL"))


def first_tables(*, sqlite: bool) -> list[str]:
    """Statements that make and fill it."""
    return [
        *(table.format(serial="INTEGER" if sqlite else "SERIAL") for table in _TABLES),
        "INSERT INTO segcal_schema VALUES (1)",
        *(
            f"INSERT INTO segcal_tokens VALUES ('{token}', '{name}', 'submit', '{'0' * 64}', {made}, NULL, {revoked})"
            for token, name, made, revoked in _TOKENS
        ),
        *(
            f"INSERT INTO segcal_jobs VALUES ('{digit * 24}', 'queued', 'qa', '', '{name}', {key}, 20, NULL, NULL, 0, "
            f"'', NULL, NULL, '', 0, 0, {'0' if sqlite else 'FALSE'}, '', '{_REQUEST}', '{{}}')"
            for digit, name, key in _JOBS
        ),
        f"INSERT INTO segcal_watched VALUES ('/out', 'a', 'f', '{'4' * 24}', 20)",
    ]
