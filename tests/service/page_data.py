"""A data folder with something on every page: real results of one job, and days of cases before it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import update

from segcal.service.calibrator_files import import_calibrator
from segcal.service.files import ServiceFiles
from segcal.service.model import CalibratorRecord, JobProgress, NewCase
from segcal.service.requests import QaRequest
from segcal.service.settings import ServiceSettings
from segcal.service.store import Claim, Store, open_store
from segcal.service.store.tables import cases as case_table
from tests.service.real_results import Results

DAY_S = 86_400.0
N_DAYS, N_DAILY = 6, 12


@dataclass(frozen=True)
class Filled:
    """What is in the folder.

    Attributes:
        data: the folder.
        calibrator: of all cases.
        other: a retired one that no case has.
        job_id: of the real results.
        failed_id: of a job that failed.
        broken: case that could not be read.
    """

    data: Path
    calibrator: CalibratorRecord
    other: CalibratorRecord
    job_id: str
    failed_id: str
    broken: str


def open_data(data: Path) -> Store:
    """The store of a data folder, beside the server that has it open too."""
    data.mkdir(parents=True, exist_ok=True)
    return open_store(ServiceSettings(data).url)


def claim_next(store: Store) -> Claim:
    """Be the worker of the oldest waiting job."""
    claim = store.jobs.claim("a worker of the test", 600.0)
    assert claim is not None
    return claim


def fill(data: Path, results: Results, folder: Path) -> Filled:
    """Put the results of a job, which lie in `data` already, into its store, and history before them."""
    store = open_data(data)
    try:
        calibrator, other = _calibrators(store, data, results, folder)
        for day in range(N_DAYS, 0, -1):
            _day(store, calibrator.sha256, results.outcome.cases, day)
        failed = _submit(store, calibrator.sha256, "night")
        store.jobs.fail(claim_next(store), "all 3 cases failed; the first: case_7.npz is truncated, export it again")
        _finish(store, results)
        broken = "broken & <b>bold</b>"
        _submit(store, calibrator.sha256, "evening")
        place = "../department_of_radiology/member_0_of_the_ensemble/hippocampus"
        message = f"{broken}: {place}/broken.npz is truncated; export it again"
        unread = NewCase(broken, "failed", calibrator.sha256, error=message)
        bare = NewCase("without_layers", "ok", calibrator.sha256, expected_dsc=0.9, boundary_confidence=0.95)
        store.jobs.finish(claim_next(store), message="1 of 2 cases failed", result={}, cases=[unread, bare])
    finally:
        store.close()
    return Filled(data, calibrator, other, results.job_id, failed, broken)


def _calibrators(store: Store, data: Path, results: Results, folder: Path) -> tuple[CalibratorRecord, CalibratorRecord]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cms_ap.safetensors"
    results.fitted.save(path)
    used = import_calibrator(path, "cms_ap of spring", ServiceFiles(data), store)
    path.unlink()
    info = results.fitted.info.model_copy(update={"seed": 7, "warnings": ("few cases: only `8` were given",)})
    replace(results.fitted, info=info).save(path)
    other = import_calibrator(path, "cms_ap of winter", ServiceFiles(data), store)
    return used, store.calibrators.retire(other.sha256)


def _submit(store: Store, calibrator: str, batch: str) -> str:
    request = QaRequest(calibrator=calibrator, manifest="/data/manifest.yaml")
    return store.jobs.submit(request, batch=batch, submitted_by="anna", queue_limit=10_000).id


def _finish(store: Store, results: Results) -> None:
    store.jobs.submit(
        results.request, batch=results.request.batch, submitted_by="anna", queue_limit=10_000, job_id=results.job_id
    )
    claim = claim_next(store)
    store.jobs.renew(claim, 600.0, JobProgress("layers", 5, 6))
    outcome = results.outcome
    assert store.jobs.finish(claim, message=outcome.message, result=outcome.result, cases=outcome.cases)


def _day(store: Store, calibrator: str, like: tuple[NewCase, ...], days_ago: int) -> None:
    """Cases of a night some days ago, whose numbers scatter around those of real ones and slowly get worse."""
    chance = random.Random(days_ago)
    drift = (N_DAYS - days_ago) * 0.35
    found = []
    for k in range(N_DAILY):
        case = chance.choice(like)
        expected = min(0.99, (case.expected_dsc or 0.85) + chance.gauss(0, 0.02) - 0.006 * drift)
        score = chance.gauss(drift, 1.0) if k else 14.0 + drift
        flags = tuple(
            flag
            for flag, wanted in (
                (("low_expected_dsc", f"expected DSC {expected:.3f} < 0.8"), expected < 0.8),
                (
                    ("unusual_free_energy_mean", f"mean free energy is {score:+.1f} robust standard deviations away"),
                    abs(score) > 3.5,
                ),
            )
            if wanted
        )
        found.append(
            replace(
                case,
                case_id=f"night_{days_ago}_{k:02d}",
                view=None,
                files=(),
                flags=flags,
                n_flags=len(flags),
                expected_dsc=expected,
                boundary_confidence=min(0.99, (case.boundary_confidence or 0.93) + chance.gauss(0, 0.01)),
                z_free_energy=score,
                z_free_energy_std=chance.gauss(0, 1),
                z_confidence=chance.gauss(-drift / 2, 1),
            )
        )
    job_id = _submit(store, calibrator, "night")
    assert store.jobs.finish(claim_next(store), message=f"{N_DAILY} cases", result={}, cases=found)
    created = store.now() - days_ago * DAY_S
    values = {"created": created, "day": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%d")}
    with store._database.write() as connection:
        connection.execute(update(case_table).where(case_table.c.job_id == job_id).values(values))
