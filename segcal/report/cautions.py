"""Warnings of a report: what a reader has to know before believing the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from segcal.counted import count
from segcal.evaluation.records import Records
from segcal.report.results import Results
from segcal.report.wording import about_case, listing, share

FEW_SUBJECTS = 20
"""Percentile intervals from fewer subjects are noticeably too narrow."""
RARE_CASES, RARE_VOXELS = 5, 500
"""A class labelled in fewer cases or voxels is called starved."""

Severity = Literal["serious", "note"]


@dataclass(frozen=True, slots=True)
class Caution:
    """One warning: a heading of a few words and a sentence."""

    severity: Severity
    heading: str
    text: str


def cautions(results: Results) -> list[Caution]:
    """All warnings, the serious ones first."""
    found = [
        *_failed(results.summary),
        *_given(results.summary),
        *_few_cases(results),
        *_rare_classes(results.summary, results.records),
        *_outside(results.summary, results.records),
        *_floored(results.summary),
        *_undefined(results.summary),
        *_repeats(results),
    ]
    return sorted(found, key=lambda caution: caution.severity != "serious")


def _failed(summary: Mapping[str, Any]) -> list[Caution]:
    failed = summary.get("failed") or {}
    return [Caution("serious", "case left out", about_case(case, message)) for case, message in failed.items()]


def _given(summary: Mapping[str, Any]) -> list[Caution]:
    """Warnings of the calibrators, each once with the pipelines that carry it, and those of the run."""
    carriers: dict[str, list[str]] = {}
    for pipeline in summary["pipelines"]:
        for text in pipeline.get("warnings") or []:
            carriers.setdefault(text, []).append(pipeline["name"])
    found = [Caution("serious", "calibrator", f"{listing(names)}: {text}") for text, names in carriers.items()]
    told = {f"{name}: {text}" for text, names in carriers.items() for name in names}
    return found + [Caution("serious", "run", text) for text in summary.get("warnings") or [] if text not in told]


def _few_cases(results: Results) -> list[Caution]:
    n = results.n_subjects
    if n >= FEW_SUBJECTS:
        return []
    text = f"The intervals come from {count(n, 'subject')}. Below about {FEW_SUBJECTS} they tend to be too narrow."
    return [Caution("serious", "few test cases", text)]


def _rare_classes(summary: Mapping[str, Any], records: Records) -> list[Caution]:
    """Classes that are hardly there: their numbers rest on a few cases or voxels."""
    names = summary.get("classes") or []
    labelled = _labelled_voxels(records, bool(summary.get("regions")))
    found = []
    for name, voxels in zip(names, labelled.T if labelled.size else [], strict=False):
        n_cases, total = int((voxels > 0).sum()), int(voxels.sum())
        if n_cases == 0:
            text = f"`{name}` has no labelled voxel in these cases; nothing is known about it."
        elif n_cases < min(RARE_CASES, len(voxels)) or total < RARE_VOXELS:
            text = f"`{name}` is labelled in {n_cases} of {count(len(voxels), 'case')} ({count(total, 'voxel')})."
        else:
            continue
        found.append(Caution("serious", "starved class", text))
    return found


def _labelled_voxels(records: Records, regions: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(case, class) labelled voxels, from the confusion tables (channel, label, prediction) of one pipeline."""
    first = records.rows[0].pipeline
    rows = {
        row.case: row.tables["confusion"] for row in records.rows if row.pipeline == first and "confusion" in row.tables
    }
    if regions:
        return np.array([[channel[1].sum() for channel in table] for table in rows.values()])
    return np.array([table[0].sum(axis=1) for table in rows.values()])


def _outside(summary: Mapping[str, Any], records: Records) -> list[Caution]:
    found = []
    shares = list((summary.get("outside_share") or {}).values())
    if shares:
        mean = share(float(np.mean(shares)))
        text = (
            f"In {count(len(shares), 'case')} the network predicted only inside a crop box; on average {mean} of their "
            "voxels lie outside. Those count as certain background unless they were left out, and "
            "make every mean over voxels look better, before and after calibration alike."
        )
        found.append(Caution("note", "fill voxels", text))
    lost = [row for row in records.rows if row.values.get("n_floored_outside", 0) > 0]
    if lost:
        cases = sorted({row.case for row in lost})
        text = (
            f"Labelled foreground lies outside the crop box in {count(len(cases), 'case')} ({listing(cases[:5])}"
            f"{' …' if len(cases) > 5 else ''}): no calibrator can repair that, and it dominates their NLL."
        )
        found.append(Caution("serious", "foreground outside", text))
    return found


def _floored(summary: Mapping[str, Any]) -> list[Caution]:
    n = int(summary.get("n_floored") or 0)
    if not n:
        return []
    text = f"{count(n, 'probability', 'probabilities')} stored as 0 were raised to the smallest number of their type."
    return [Caution("note", "zeros in the files", text)]


def _undefined(summary: Mapping[str, Any]) -> list[Caution]:
    found = []
    for column in ("nll", "dsc", "ece", "ba_ece"):
        worst = max(
            (int(p["metrics"].get(column, {}).get("n_undefined") or 0) for p in summary["pipelines"]), default=0
        )
        if worst:
            text = f"{column} does not exist for {count(worst, 'measurement')} (case and repeat), which are in no mean."
            found.append(Caution("note", "undefined", text))
    return found


def _repeats(results: Results) -> list[Caution]:
    n = int(results.summary["n_repeats"])
    if n == 1:
        text = (
            "The calibrators were fitted once. The intervals say how the numbers vary with the test cases, not how "
            "they would vary with another calibration set; `segcal study` measures that."
        )
        calibrated = any(p.get("calibrated") for p in results.summary["pipelines"])
        return [Caution("note", "one fit", text)] if calibrated else []
    found = []
    varying = [p["name"] for p in results.summary["pipelines"] if p.get("calibrated") and _fits_vary(p)]
    if varying:
        text = (
            f"The NLL of {listing(varying)} differs more between repeats than its interval is wide: trust neither "
            "interval and look at the repeats, which the tooltips of the table give."
        )
        found.append(Caution("serious", "fits vary", text))
    if results.overlapping:
        text = (
            "The same subjects are in the test sets of several repeats. The two-level interval takes a case tested "
            "three times for three cases and is then too narrow; read the interval by subject as well."
        )
        found.append(Caution("note", "overlapping test sets", text))
    return found


def _fits_vary(pipeline: Mapping[str, Any]) -> bool:
    nll = pipeline["metrics"].get("nll", {})
    repeats = [value for value in nll.get("by_repeat", []) if value is not None]
    if len(repeats) < 2 or nll.get("low") is None or nll.get("high") is None:
        return False
    return bool(max(repeats) - min(repeats) > nll["high"] - nll["low"])
