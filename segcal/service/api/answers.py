"""What the API answers with: one model a noun, times as RFC 3339 in UTC, undefined numbers as null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from segcal.service.model import (
    FINISHED,
    CalibratorRecord,
    CaseRecord,
    Job,
    JobKind,
    JobState,
    NewCase,
)
from segcal.service.store import DayBatch, TrendPoint


class Progress(BaseModel):
    """How far a running job has come."""

    stage: str
    done: int
    total: int


class JobAnswer(BaseModel):
    """A job."""

    id: str = Field(description="Sorts by age.", examples=["019a95c1b2d3a1b2c3d4e5f6"])
    kind: JobKind
    batch: str
    state: JobState
    submitted_by: str = Field(description="Name of the token; empty without one.")
    created: datetime
    started: datetime | None
    finished: datetime | None
    attempts: int
    worker: str
    progress: Progress
    cancel_requested: bool
    message: str = Field(description="Why it failed, or one line about what was done.")
    request: dict[str, Any] = Field(description="What was asked for.")
    result: dict[str, Any] = Field(description="Numbers about the outcome; empty before it is done.")

    @classmethod
    def of(cls, job: Job) -> JobAnswer:
        return cls(
            id=job.id,
            kind=job.kind,
            batch=job.batch,
            state=job.state,
            submitted_by=job.submitted_by,
            created=moment(job.created),
            started=None if job.started is None else moment(job.started),
            finished=None if job.finished is None else moment(job.finished),
            attempts=job.attempts,
            worker=job.worker,
            progress=Progress(stage=job.progress.stage, done=job.progress.done, total=job.progress.total),
            cancel_requested=job.cancel_requested,
            message=job.message,
            request=finite(job.request),
            result=finite(job.result),
        )

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED


class JobsAnswer(BaseModel):
    """A page of jobs, newest first."""

    jobs: list[JobAnswer]
    next: str | None = Field(description="`before` of the next page; null at the end.")


class CountsAnswer(BaseModel):
    """How many jobs are in each state."""

    queued: int
    running: int
    done: int
    failed: int
    cancelled: int


class ResultFile(BaseModel):
    """A file that a job left."""

    path: str = Field(description="Below /v1/jobs/{id}/results/.", examples=["qa/qa.csv"])
    size: int
    modified: datetime


class ResultsAnswer(BaseModel):
    """The files of a finished job."""

    job: str
    state: JobState
    files: list[ResultFile]


class CalibratorAnswer(BaseModel):
    """A calibrator; its file lies under its hash."""

    sha256: str
    name: str
    method: str
    pooling: str
    kind: str
    classes: list[str]
    created: datetime
    retired: datetime | None = Field(description="Since when no new job takes it.")
    info: dict[str, Any] = Field(description="All of its metadata: what it was fitted on, with which settings.")

    @classmethod
    def of(cls, record: CalibratorRecord) -> CalibratorAnswer:
        return cls(
            sha256=record.sha256,
            name=record.name,
            method=record.method,
            pooling=record.pooling,
            kind=record.kind,
            classes=list(record.classes),
            created=moment(record.created),
            retired=None if record.retired is None else moment(record.retired),
            info=finite(record.info),
        )


class CalibratorUse(CalibratorAnswer):
    """A calibrator and where it was used."""

    n_cases: int
    batches: list[str] = Field(description="The latest first.")


class CalibratorsAnswer(BaseModel):
    """The calibrators, newest first."""

    calibrators: list[CalibratorAnswer]


class FlagAnswer(BaseModel):
    """A reason to look at a case."""

    code: str
    text: str


class CaseAnswer(BaseModel):
    """A case that a job looked at."""

    key: int
    job: str
    batch: str
    day: str = Field(description="When its job finished, UTC.", examples=["2026-03-01"])
    created: datetime
    case: str
    status: Literal["ok", "failed"]
    calibrator: str | None
    flags: list[FlagAnswer]
    expected_dsc: float | None
    boundary_confidence: float | None
    member_dice: float | None
    disagreement: float | None
    z_free_energy: float | None
    z_free_energy_std: float | None
    z_confidence: float | None
    error: str
    layers: bool = Field(description="Whether there are layers to look at.")

    @classmethod
    def of(cls, record: CaseRecord) -> CaseAnswer:
        return cls(**_case_values(record))


class CaseDetail(CaseAnswer):
    """Everything about a case."""

    numbers: dict[str, Any]
    reliability: dict[str, Any] | None = Field(description="With labels: tables (3, 15) before and after.")
    files: list[str] = Field(description="Below /v1/jobs/{job}/results/.")

    @classmethod
    def of(cls, record: CaseRecord) -> CaseDetail:
        case = record.case
        return cls(
            **_case_values(record),
            numbers=finite(case.numbers),
            reliability=None if case.reliability is None else finite(case.reliability),
            files=list(case.files),
        )


class CasesAnswer(BaseModel):
    """A page of cases."""

    cases: list[CaseAnswer]
    total: int = Field(description="How many cases fit the filters.")


class BatchAnswer(BaseModel):
    """One batch on one day."""

    day: str
    batch: str
    n_cases: int
    n_flagged: int
    n_failed: int
    mean_expected_dsc: float | None
    job: str = Field(description="The latest job it came from.")

    @classmethod
    def of(cls, found: DayBatch) -> BatchAnswer:
        return cls(
            day=found.day,
            batch=found.batch,
            n_cases=found.n_cases,
            n_flagged=found.n_flagged,
            n_failed=found.n_failed,
            mean_expected_dsc=found.mean_expected_dsc,
            job=found.job_id,
        )


class BatchesAnswer(BaseModel):
    """Batches by day, newest first."""

    batches: list[BatchAnswer]


class TrendAnswerPoint(BaseModel):
    """One case of the trend."""

    key: int
    case: str
    created: datetime
    day: str
    n_flags: int
    expected_dsc: float | None
    boundary_confidence: float | None
    z_free_energy: float | None
    z_free_energy_std: float | None
    z_confidence: float | None

    @classmethod
    def of(cls, point: TrendPoint) -> TrendAnswerPoint:
        values = {each.name: getattr(point, each.name) for each in fields(point)}
        return cls(**{**values, "case": values.pop("case_id"), "created": moment(point.created)})


class TrendAnswer(BaseModel):
    """The last cases, oldest first."""

    points: list[TrendAnswerPoint]


class HealthAnswer(BaseModel):
    """The process is alive."""

    status: Literal["alive"] = "alive"


class ReadyAnswer(BaseModel):
    """Whether work is taken in and done."""

    ready: bool
    reasons: list[str] = Field(description="Why not; empty when ready.", examples=[["no worker was heard of"]])


def moment(seconds: float) -> datetime:
    """A time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def finite(value: Any) -> Any:
    """The same JSON value with NaN and infinities as null, which JSON has no form for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _case_values(record: CaseRecord) -> dict[str, Any]:
    case = record.case
    same = set(CaseAnswer.model_fields) & {each.name for each in fields(NewCase)} - {"flags"}
    return {
        **{name: finite(getattr(case, name)) for name in same},
        "key": record.key,
        "job": record.job_id,
        "batch": record.batch,
        "day": record.day,
        "created": moment(record.created),
        "case": case.case_id,
        "flags": [FlagAnswer(code=code, text=text) for code, text in case.flags],
        "layers": case.view is not None,
    }
