"""From rows of the tables to the nouns of the service and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import RowMapping

from segcal.service.model import CalibratorRecord, CaseRecord, Job, JobProgress, NewCase, TokenRecord

_FAILED = 1e6
"""More than any number of flags."""


def job_of(row: RowMapping) -> Job:
    """A row of `jobs`."""
    return Job(
        id=row["id"],
        kind=row["kind"],
        request=row["request"],
        batch=row["batch"],
        state=row["state"],
        submitted_by=row["submitted_by"],
        created=row["created"],
        started=row["started"],
        finished=row["finished"],
        attempts=row["attempts"],
        worker=row["worker"],
        progress=JobProgress(row["stage"], row["done"], row["total"]),
        cancel_requested=bool(row["cancel_requested"]),
        message=row["message"],
        result=row["result"],
    )


def case_of(row: RowMapping) -> CaseRecord:
    """A row of `cases`."""
    case = NewCase(
        case_id=row["case_id"],
        status=row["status"],
        calibrator=row["calibrator"],
        n_flags=row["n_flags"],
        flags=tuple((code, sentence) for code, sentence in row["flags"]),
        expected_dsc=row["expected_dsc"],
        boundary_confidence=row["boundary_confidence"],
        member_dice=row["member_dice"],
        disagreement=row["disagreement"],
        z_free_energy=row["z_free_energy"],
        z_free_energy_std=row["z_free_energy_std"],
        z_confidence=row["z_confidence"],
        numbers=row["numbers"],
        reliability=row["reliability"],
        error=row["error"],
        view=row["view"],
        files=tuple(row["files"]),
    )
    return CaseRecord(row["key"], row["job_id"], row["batch"], row["day"], row["created"], case)


def case_row(case: NewCase, *, number: int, job_id: str, batch: str, now: float) -> dict[str, Any]:
    """What is inserted for a case."""
    scores = [case.z_free_energy, case.z_free_energy_std, case.z_confidence]
    return {
        "job_id": job_id,
        "number": number,
        "batch": batch,
        "day": day_of(now),
        "created": now,
        "case_id": case.case_id,
        "status": case.status,
        "calibrator": case.calibrator,
        "n_flags": case.n_flags,
        "badness": badness(case),
        "expected_dsc": case.expected_dsc,
        "boundary_confidence": case.boundary_confidence,
        "member_dice": case.member_dice,
        "disagreement": case.disagreement,
        "outlyingness": max((abs(z) for z in scores if z is not None), default=None),
        "z_free_energy": case.z_free_energy,
        "z_free_energy_std": case.z_free_energy_std,
        "z_confidence": case.z_confidence,
        "error": case.error,
        "view": case.view,
        "flags": [list(flag) for flag in case.flags],
        "files": list(case.files),
        "numbers": dict(case.numbers),
        "reliability": None if case.reliability is None else dict(case.reliability),
    }


def badness(case: NewCase) -> float:
    """One number that sorts as `FlaggedCase.rank` does: failed, then most flags, then lowest expected DSC, none first.

    One number, because one index then serves the order in both databases, which disagree on where NULL goes.
    """
    flags = _FAILED if case.status == "failed" else float(case.n_flags)
    return flags + (0.75 if case.expected_dsc is None else 0.5 * (1.0 - case.expected_dsc))


def calibrator_of(row: RowMapping) -> CalibratorRecord:
    """A row of `calibrators`."""
    return CalibratorRecord(
        sha256=row["sha256"],
        name=row["name"],
        method=row["method"],
        pooling=row["pooling"],
        kind=row["kind"],
        classes=tuple(row["classes"]),
        created=row["created"],
        retired=row["retired"],
        info=row["info"],
    )


def calibrator_row(record: CalibratorRecord) -> dict[str, Any]:
    """What is inserted for a calibrator."""
    return {
        "sha256": record.sha256,
        "name": record.name,
        "method": record.method,
        "pooling": record.pooling,
        "kind": record.kind,
        "created": record.created,
        "retired": record.retired,
        "classes": list(record.classes),
        "info": dict(record.info),
    }


def token_of(row: RowMapping) -> TokenRecord:
    """A row of `tokens`, without the hash."""
    return TokenRecord(row["id"], row["name"], row["scope"], row["created"], row["expires"], row["revoked"])


def day_of(seconds: float) -> str:
    """The day in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
