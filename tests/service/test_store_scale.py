"""10,000 waiting jobs and as many cases: every look stays a look into an index."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, text

from segcal.service.model import Job, NewCase, new_id
from segcal.service.store import Store, open_store
from segcal.service.store.rows import case_row
from segcal.service.store.tables import cases, jobs
from tests.service.postgres import running_postgres
from tests.service.stores import BACKENDS, REQUEST, SHA

N = 10_000


@pytest.fixture(scope="module", params=BACKENDS)
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with 10,000 jobs waiting, as many done, and 10,000 cases."""
    folder: Path = tmp_path_factory.mktemp("full")
    url = f"sqlite:///{folder / 'segcal.db'}" if request.param == "sqlite" else running_postgres().new_database()
    store = open_store(url)
    _fill(store)
    yield store
    store.close()


def _fill(store: Store) -> None:
    shared = {"kind": "qa", "submitted_by": "", "created": 1.0, "request": REQUEST.model_dump(mode="json")}
    rows: list[dict[str, Any]] = [
        {"id": new_id(), "state": "done" if n < N else "queued", "batch": f"b{n % 50}", "result": {}, **shared}
        for n in range(2 * N)
    ]
    done = Job(rows[0]["id"], "qa", {}, "b0", "done", "", 1.0)
    found = [
        case_row(
            NewCase(f"case {n}", "ok", calibrator=SHA, n_flags=n % 4, expected_dsc=(n % 97) / 97),
            number=n,
            job_id=done.id,
            batch=f"b{n % 50}",
            now=1.7e9 + 86400 * (n // 500),
        )
        for n in range(N)
    ]
    with store._database.write() as connection:
        connection.execute(insert(jobs), rows)
        connection.execute(insert(cases), found)
    if not store._database.is_sqlite:
        with store._database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))


LOOKS: dict[str, Callable[[Store], object]] = {
    "first page": lambda store: store.jobs.page(),
    "page of a state": lambda store: store.jobs.page(state="queued"),
    "page of a batch": lambda store: store.jobs.page(batch="b7"),
    "page of a kind": lambda store: store.jobs.page(kind="fit"),
    "page in the middle": lambda store: store.jobs.page(before=_middle(store)),
    "oldest": lambda store: store.jobs.oldest_queued(),
    "worst cases": lambda store: store.cases.page(),
    "worst of a batch and day": lambda store: store.cases.page(batch="b7", day="2023-11-20"),
    "trend": lambda store: store.cases.trend(calibrator=SHA, limit=500),
    "claim": lambda store: store.jobs.release(store.jobs.claim("worker", 60)),  # type: ignore[arg-type]
}
OF_A_STATE = ("page of a state", "oldest", "claim")
SCANS: dict[str, Callable[[Store], object]] = {
    "counts": lambda store: store.jobs.counts(),
    "days": lambda store: store.cases.days(),
}


def _middle(store: Store) -> str:
    return store.jobs.page(state="queued", limit=1)[0].id


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_uses_an_index_and_sorts_nothing(full: Store, look: str) -> None:
    for plan in _plans(full, LOOKS[look]):
        if full._database.is_sqlite:
            assert "SCAN segcal_jobs\n" not in plan, plan
            assert "SCAN" not in plan or look not in OF_A_STATE, f"walks past jobs of other states:\n{plan}"
            assert "SCAN segcal_cases\n" not in plan, plan
            assert "TEMP B-TREE" not in plan, plan
        else:
            assert "Seq Scan" not in plan, plan
            assert "Filter: ((state" not in plan or "segcal_jobs_queued" in plan, (
                f"walks past jobs of other states:\n{plan}"
            )
            # The few cases of one batch and day may be sorted; PostgreSQL finds them by the other index.
            assert "Sort" not in plan or look == "worst of a batch and day", plan


@pytest.mark.parametrize("look", [*LOOKS, *SCANS])
def test_a_look_takes_milliseconds(full: Store, look: str) -> None:
    """CPU and waiting of the fastest of five; generous, because a scan of everything would take ten times as long."""
    ask = (LOOKS | SCANS)[look]
    ask(full)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        ask(full)
        took.append(time.perf_counter() - began)

    assert min(took) < 0.1


def test_all_pages_together_hold_every_job_once(full: Store) -> None:
    seen: list[str] = []
    before = None
    while page := full.jobs.page(before=before, limit=1000):
        seen += [job.id for job in page]
        before = seen[-1]

    assert len(seen) == len(set(seen)) == 2 * N
    assert seen == sorted(seen, reverse=True)


def _plans(store: Store, ask: Callable[[Store], object]) -> list[str]:
    """How the database would answer each SELECT that a look makes."""
    statements: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, _context: Any, _many: bool) -> None:
        if statement.lstrip().startswith("SELECT") and "segcal_" in statement:
            statements.append((statement, values))

    event.listen(store._database.engine, "before_cursor_execute", note)
    try:
        ask(store)
    finally:
        event.remove(store._database.engine, "before_cursor_execute", note)
    assert statements
    prefix = "EXPLAIN QUERY PLAN " if store._database.is_sqlite else "EXPLAIN "
    with store._database.read() as connection:
        return [
            "\n".join(str(row[-1]) for row in connection.exec_driver_sql(prefix + statement, values)) + "\n"
            for statement, values in statements
        ]
