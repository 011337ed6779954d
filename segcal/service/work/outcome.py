"""What a job hands back to its supervisor: small, plain and the same whatever interrupted it on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from segcal.service.model import NewCase

SHOWN_FAILURES = 20
"""Messages of failed cases in a job's result; the others are in the rows of the cases and in the files."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job that could be done.

    Attributes:
        message: one line for people.
        result: small JSON about what was done.
        cases: what becomes rows of the overview.
        calibrators: calibrator files to be taken into the store, relative to the job's folder.
    """

    message: str
    result: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[NewCase, ...] = ()
    calibrators: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for the pipe between child and supervisor."""
        return {
            "message": self.message,
            "result": dict(self.result),
            "cases": [asdict(case) for case in self.cases],
            "calibrators": list(self.calibrators),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """What `to_json` gave."""
        cases = tuple(_case(each) for each in values["cases"])
        return cls(values["message"], values["result"], cases, tuple(values["calibrators"]))


def failures(failed: Mapping[str, str]) -> dict[str, Any]:
    """The part of a result about cases that could not be done; bounded, however many there are."""
    return {"n_failed": len(failed), "failed": dict(list(failed.items())[:SHOWN_FAILURES])}


def in_one_line(parts: Iterable[str]) -> str:
    """`3 cases calibrated, 1 flagged` from what there is to say."""
    return ", ".join(part for part in parts if part)


def _case(values: Mapping[str, Any]) -> NewCase:
    flags = tuple((str(code), str(text)) for code, text in values["flags"])
    return NewCase(**{**values, "flags": flags, "files": tuple(values["files"])})
