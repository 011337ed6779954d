"""The nouns of the service: jobs, cases, calibrators, tokens. Plain values that every part shares."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

JobKind: TypeAlias = Literal["apply", "qa", "evaluate", "fit", "study", "case"]
"""`case` is one nnU-Net output, from a watched folder or an upload: calibrated and looked at."""

JobState: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled"]

Scope: TypeAlias = Literal["read", "submit", "admin"]
"""What a token allows; each includes those before it."""

SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")

FINISHED: tuple[JobState, ...] = ("done", "failed", "cancelled")

REPEATABLE: tuple[JobState, ...] = ("failed", "cancelled")
"""What can be tried again."""


def new_id() -> str:
    """A name for a job: 16 hexadecimal digits of the time in ns, 8 random ones; sorts by age."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job has come: `done` of `total` steps of a stage."""

    stage: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work, as the store knows it.

    Attributes:
        id: sorts by age, see `new_id`.
        kind: what is to be done.
        request: its parameters, as JSON (see `segcal.service.requests`).
        batch: what its cases are grouped under in the overview.
        state: where it stands.
        submitted_by: name of the token, empty without one.
        created, started, finished: seconds since 1970, None before it happened.
        attempts: how often a worker began with it since it was submitted, or tried again by somebody.
        worker: name of the worker that has it, or had it last.
        progress: of the running attempt.
        cancel_requested: somebody asked it to stop; a running job stops at its next heartbeat.
        message: what a person should know: why it failed, or one line about what was done.
        result: small JSON about the outcome; empty before it is done.
    """

    id: str
    kind: JobKind
    request: Mapping[str, Any]
    batch: str
    state: JobState
    submitted_by: str
    created: float
    started: float | None = None
    finished: float | None = None
    attempts: int = 0
    worker: str = ""
    progress: JobProgress = JobProgress()
    cancel_requested: bool = False
    message: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SubmissionKey:
    """A name that a submitter gave to a submission: sent again under it, the submission is the same job.

    Attributes:
        owner: id of the token, because names of tokens may be given again; empty for a user of this machine.
        text: the name.
    """

    owner: str
    text: str


@dataclass(frozen=True, slots=True)
class NewCase:
    """One case that a job looked at; becomes a row of the overview when the job is finished.

    Attributes:
        case_id: its name in the manifest or folder.
        status: "ok", or "failed" with `error`.
        calibrator: sha256 of the calibrator.
        n_flags: reasons to look at it.
        flags: code and sentence of each.
        expected_dsc, boundary_confidence, member_dice, disagreement: None where undefined.
        z_free_energy, z_free_energy_std, z_confidence: robust z-scores against the calibration cases, None likewise.
        numbers: every number of `FlaggedCase.numbers`, None where undefined, and the reasons under "undefined".
        reliability: with labels, tables (3, 15) of the winning class: {"before": ..., "after": ...}; else None.
        view: folder of the layers to look at, relative to the job's folder; None without any.
        files: results of the case, relative to the job's folder.
    """

    case_id: str
    status: Literal["ok", "failed"]
    calibrator: str | None = None
    n_flags: int = 0
    flags: tuple[tuple[str, str], ...] = ()
    expected_dsc: float | None = None
    boundary_confidence: float | None = None
    member_dice: float | None = None
    disagreement: float | None = None
    z_free_energy: float | None = None
    z_free_energy_std: float | None = None
    z_confidence: float | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    reliability: Mapping[str, Any] | None = None
    error: str = ""
    view: str | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """A case in the store.

    Attributes:
        key: its number in the store, in URLs.
        job_id: which job looked at it.
        batch: of that job.
        day: "YYYY-MM-DD" in UTC when that job finished.
        created: the same in seconds since 1970.
        case: what was found.
    """

    key: int
    job_id: str
    batch: str
    day: str
    created: float
    case: NewCase


@dataclass(frozen=True, slots=True)
class CalibratorRecord:
    """A calibrator in the store; the file lies under its hash.

    Attributes:
        sha256: of the file.
        name: given at upload, for people.
        method, pooling, kind, classes: from its metadata.
        created: seconds since 1970.
        retired: when it was retired; no new job takes it then.
        info: all of its metadata (`CalibratorInfo`) as JSON.
    """

    sha256: str
    name: str
    method: str
    pooling: str
    kind: str
    classes: tuple[str, ...]
    created: float
    retired: float | None
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What the store knows of a token; never the token itself.

    Attributes:
        id: public part, also the beginning of the token.
        name: whose it is.
        scope: what it allows.
        created, expires, revoked: seconds since 1970; None for never.
    """

    id: str
    name: str
    scope: Scope
    created: float
    expires: float | None
    revoked: float | None
