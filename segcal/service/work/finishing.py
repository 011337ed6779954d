"""The end of a job that calibrated or looked at cases: rows for the overview and a result in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from segcal.counted import count
from segcal.errors import DataError, UsageError
from segcal.qa.results import CSV_FILE, JSON_FILE, PAGE_FILE, QaResult
from segcal.service.model import NewCase
from segcal.service.work.context import JobFolder
from segcal.service.work.outcome import SHOWN_FAILURES, Outcome, failures, in_one_line

QA_FILES = tuple(f"qa/{name}" for name in (CSV_FILE, JSON_FILE, PAGE_FILE))


def check_some_worked(ids: Sequence[str], failed: Mapping[str, str]) -> None:
    """A job without a single case that could be done has failed.

    Raises:
        UsageError: there is no case at all.
        DataError: with the message of the first case, which is often that of all.
    """
    if not ids:
        raise UsageError("there is no case to work on; leave `cases` out to take all")
    if all(case_id in failed for case_id in ids):
        first = failed[ids[0]]
        raise DataError(first if len(ids) == 1 else f"none of the {len(ids)} cases could be done; the first: {first}")


def outcome_of(
    rows: Sequence[NewCase],
    job: JobFolder,
    *,
    verb: str,
    calibrator: str,
    method: str,
    looked: QaResult | None,
    notes: Sequence[str] = (),
) -> Outcome:
    """What the job hands back.

    Args:
        rows: one for every case.
        verb: what was done with the cases that worked.
        looked: QA, if it was wanted.
        notes: what the user should know.
    """
    failed = {row.case_id: row.error for row in rows if row.status == "failed"}
    check_some_worked([row.case_id for row in rows], failed)
    n_done, n_flagged = len(rows) - len(failed), sum(row.n_flags > 0 for row in rows)
    told = dict.fromkeys([*(() if looked is None else looked.warnings), *notes])
    result = {
        "method": method,
        "calibrator": calibrator,
        "n_cases": len(rows),
        "n_done": n_done,
        "n_flagged": n_flagged,
        **failures(failed),
        "notes": [job.said(text) for text in told][:SHOWN_FAILURES],
        "files": list(job.existing("out/run.json", *QA_FILES)),
    }
    message = in_one_line(
        [
            f"{count(n_done, 'case')} {verb}",
            "" if looked is None else f"{n_flagged} flagged",
            f"{len(failed)} failed" if failed else "",
        ]
    )
    return Outcome(message, result, tuple(rows))
