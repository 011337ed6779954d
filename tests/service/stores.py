"""Stores to test with: every test runs over SQLite and over PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from segcal.service.model import CalibratorRecord, NewCase, SubmissionKey
from segcal.service.requests import CaseRequest, QaRequest
from segcal.service.store import Store, open_store
from tests.service.postgres import running_postgres

SHA = "a" * 64
REQUEST = QaRequest(calibrator=SHA, manifest="/data/manifest.yaml")
BACKENDS = ("sqlite", "postgresql")


@pytest.fixture(params=BACKENDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a new store."""
    return f"sqlite:///{tmp_path / 'segcal.db'}" if request.param == "sqlite" else running_postgres().new_database()


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """A new store."""
    opened = open_store(store_url)
    yield opened
    opened.close()


def submit(store: Store, *, key: str | None = None, queue_limit: int = 100_000, batch: str = "night") -> str:
    """Put a job in the queue and give its id."""
    named = None if key is None else SubmissionKey("token 1", key)
    return store.jobs.submit(REQUEST, batch=batch, submitted_by="anna", queue_limit=queue_limit, key=named).id


def case_request(case: str) -> CaseRequest:
    """What a watcher asks for."""
    return CaseRequest(calibrator=SHA, case=case, source="/data/out", files=(f"{case}.npz",), fingerprint="f")


def new_case(case_id: str, **values: object) -> NewCase:
    """A case that worked."""
    return NewCase(case_id=case_id, status="ok", calibrator=SHA, **values)  # type: ignore[arg-type]


def calibrator(sha256: str = SHA, *, created: float = 1.0) -> CalibratorRecord:
    """A calibrator's row, without a file."""
    return CalibratorRecord(
        sha256, "night shift", "ts", "logits", "logits", ("background", "front"), created, None, {"method": "ts"}
    )
