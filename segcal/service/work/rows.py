"""From what QA found to the rows of the overview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segcal.metrics.base import Score, Undefined
from segcal.qa.results import FlaggedCase, QaResult
from segcal.service.model import NewCase


def case_rows(
    ids: Sequence[str],
    calibrator: str,
    *,
    failed: Mapping[str, str],
    result: QaResult | None = None,
    files: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[NewCase, ...]:
    """One row for every case, in the order of `ids`, whatever became of it.

    Args:
        ids: all cases of the job.
        calibrator: sha256.
        failed: cases that could not be done before QA, with the message.
        result: of QA; None when it was not wanted.
        files: by case, relative to the job's folder.
    """
    found = {} if result is None else {each.case.case_id: each for each in result.cases}
    messages = {**failed, **({} if result is None else result.failed)}
    written = files or {}

    def row(case_id: str) -> NewCase:
        own = written.get(case_id, ())
        if case_id in messages:
            return NewCase(case_id, "failed", calibrator, error=messages[case_id], files=own)
        if result is None:
            return NewCase(case_id, "ok", calibrator, files=own)
        return _looked_at(found[case_id], calibrator, result.kept[case_id], own)

    return tuple(row(case_id) for case_id in ids)


def _looked_at(each: FlaggedCase, calibrator: str, kept: Any, files: tuple[str, ...]) -> NewCase:
    case, numbers = each.case, each.numbers
    undefined = {name: score.reason for name, score in numbers.items() if isinstance(score, Undefined)}
    notes = {"notes": list(kept.notes)} if kept.notes else {}
    return NewCase(
        case_id=case.case_id,
        status="ok",
        calibrator=calibrator,
        n_flags=len(each.flags),
        flags=tuple((flag.code, flag.text) for flag in each.flags),
        expected_dsc=_number(case.expected_dsc),
        boundary_confidence=_number(case.boundary_confidence),
        member_dice=_number(case.member_dice),
        disagreement=_number(case.disagreement),
        z_free_energy=_number(case.outlyingness["free_energy_mean"]),
        z_free_energy_std=_number(case.outlyingness["free_energy_std"]),
        z_confidence=_number(case.outlyingness["confidence_mean"]),
        numbers={**{name: _number(score) for name, score in numbers.items()}, "undefined": undefined, **notes},
        reliability=kept.reliability,
        view=kept.view,
        files=files,
    )


def _number(score: Score) -> float | None:
    return None if isinstance(score, Undefined) else score
