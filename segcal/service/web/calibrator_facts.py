"""What is known about a calibrator, line by line: how it was made, and how the cases it was used for did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from segcal.counted import count
from segcal.report.wording import DASH
from segcal.service.model import CalibratorRecord, CaseRecord, NewCase
from segcal.service.web.reliability import pooled_errors
from segcal.service.web.wording import moment, percent, setting, signed

Facts: TypeAlias = list[tuple[str, str]]
"""Names and values, as a table shows them."""

_KEEPS = {"order": "the order of all classes", "argmax": "the winning class"}


@dataclass(frozen=True, slots=True)
class Pair:
    """A fact about two calibrators."""

    name: str
    one: str
    other: str

    @property
    def differs(self) -> bool:
        return self.one != self.other


def n_reference_cases(info: Mapping[str, Any]) -> int | None:
    """How many calibration cases a calibrator remembers; None when it remembers none."""
    statistics = info.get("reference_statistics") or {}
    return max((len(values) for values in statistics.values()), default=0) or None


def calibrator_facts(record: CalibratorRecord) -> Facts:
    """What its file says, for people."""
    info = record.info
    n_cases = n_reference_cases(info)
    facts = [
        ("method", record.method),
        ("fitted on", DASH if n_cases is None else count(n_cases, "calibration case")),
        ("manifest SHA-256", setting(info.get("manifest_sha256"))),
        ("regions" if info.get("regions") else "classes", ", ".join(record.classes)),
        ("members pooled", f"{setting(info.get('n_members'))}, by {record.pooling}"),
        ("files held", record.kind),
        ("keeps", _KEEPS.get(str(info.get("preserves")), "")),
        ("NLL on its own cases", setting(info.get("fit_nll"))),
        ("NLL on validation cases", setting(info.get("validation_nll"))),
        ("λ, μ, α", _penalties(info)),
        ("solver and seed", f"{setting(info.get('solver'))}, {setting(info.get('seed'))}"),
        ("prediction", setting(info.get("prediction"))),
        ("made with", setting(info.get("versions"))),
        ("here since", moment(record.created)),
        ("SHA-256", record.sha256),
    ]
    return [(name, text or "nothing for sure") for name, text in facts]


def _penalties(info: Mapping[str, Any]) -> str:
    values = [info.get(name) for name in ("lambda", "mu", "alpha")]
    return DASH if values == [None] * 3 else ", ".join(setting(value) for value in values)


def case_facts(records: Sequence[CaseRecord]) -> Facts:
    """How cases did: their calibration error where they have labels, flags, and the middle of their numbers."""
    cases = [record.case for record in records]
    n_flagged = sum(case.n_flags > 0 for case in cases)
    flagged = DASH if not cases else f"{n_flagged} of {len(cases)} ({percent(n_flagged / len(cases), 0)} %)"
    return [
        ("calibration error (ECE) with labels", _error(cases)),
        ("flagged", flagged),
        ("median expected DSC", _median(cases, "expected_dsc", " %")),
        ("median boundary confidence", _median(cases, "boundary_confidence", " %")),
        ("median z of the mean free energy", _median(cases, "z_free_energy")),
        ("median z of the confidence before calibration", _median(cases, "z_confidence")),
    ]


def shared_cases(one: Sequence[CaseRecord], other: Sequence[CaseRecord]) -> tuple[list[CaseRecord], list[CaseRecord]]:
    """The cases of the same name in both lists, newest first; of several of a name the newest."""
    first, second = ({record.case.case_id: record for record in reversed(records)} for records in (one, other))
    names = [name for name in first if name in second]
    return [first[name] for name in names], [second[name] for name in names]


def compared(one: Facts, other: Facts) -> list[Pair]:
    """Two lists of facts, line by line."""
    first, second = dict(one), dict(other)
    return [Pair(name, first.get(name, DASH), second.get(name, DASH)) for name in dict.fromkeys([*first, *second])]


def _error(cases: Sequence[NewCase]) -> str:
    found = pooled_errors(case.reliability for case in cases)
    if found is None:
        return DASH
    n_cases, before, after = found
    return f"{100 * before:.2f} % before, {100 * after:.2f} % after, over {count(n_cases, 'case')}"


def _median(cases: Sequence[NewCase], name: str, unit: str = "") -> str:
    values = [value for case in cases if (value := getattr(case, name)) is not None]
    if not values:
        return DASH
    return f"{percent(median(values))}{unit}" if unit else signed(median(values))
