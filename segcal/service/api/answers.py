"""What the API answers with: one model a noun, times as RFC 3339 in UTC, undefined numbers as null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, Field

from segcal.service.model import (
    FINISHED,
    CalibratorRecord,
    CaseRecord,
    Job,
    JobKind,
    JobState,
)
from segcal.service.store import DayBatch, TrendPoint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TIMES = frozenset({"created", "started", "finished", "retired"})
"""Fields that are seconds since 1970 in the service and moments in its answers."""


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
        return cls(**{**_shared(cls, job), "progress": Progress(**asdict(job.progress))})

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
        return cls(**_shared(cls, record))


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
    def of(cls, record: CaseRecord) -> Self:
        case = record.case
        values = {
            **_shared(cls, case),
            **_shared(cls, record),
            "job": record.job_id,
            "case": case.case_id,
            "flags": [FlagAnswer(code=code, text=text) for code, text in case.flags],
            "layers": case.view is not None,
        }
        return cls(**values)


class CaseDetail(CaseAnswer):
    """Everything about a case."""

    numbers: dict[str, Any]
    reliability: dict[str, Any] | None = Field(description="With labels: tables (3, 15) before and after.")
    files: list[str] = Field(description="Below /v1/jobs/{job}/results/.")


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
        return cls(**_shared(cls, found), job=found.job_id)


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
        return cls(**_shared(cls, point), case=point.case_id)


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


def _shared(model: type[BaseModel], noun: DataclassInstance) -> dict[str, Any]:
    """What a noun of the service has under the names of an answer's fields, as JSON can say it."""
    names = model.model_fields.keys() & {each.name for each in fields(noun)}
    return {name: _said(name, getattr(noun, name)) for name in names}


def _said(name: str, value: Any) -> Any:
    return moment(value) if name in _TIMES and value is not None else finite(value)
