"""The per-case list of a report: what is needed to find the cases that deserve a look, worst first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from segcal.evaluation.records import CaseRecord, Records
from segcal.report.roles import Roles
from segcal.report.wording import DASH, number

DETAIL = ("nll", "ece", "ba_ece", "dsc", "flip")


@dataclass(frozen=True, slots=True)
class CaseColumn:
    """A column of the list; `hint` explains it in a tooltip, `first` is how it sorts when first asked: worst on top."""

    title: str
    hint: str
    numeric: bool
    first: Literal["ascending", "descending"]


@dataclass(frozen=True, slots=True)
class CaseCell:
    """Text and the value to sort by; no value sorts last."""

    text: str
    value: float | str | None


@dataclass(frozen=True, slots=True)
class CaseLine:
    """One case.

    Attributes:
        number: position in the list as it is first shown; names the case in the page, where its id could clash.
        case: its id.
        cells: as the columns, the id first.
        classes: (class, Dice in percent) of the focus.
        detail: (pipeline, numbers) for every pipeline.
        facts: short remarks: group, subject, repeats, share outside the crop.
    """

    number: int
    case: str
    cells: tuple[CaseCell, ...]
    classes: tuple[tuple[str, str], ...]
    detail: tuple[tuple[str, tuple[str, ...]], ...]
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaseList:
    """The list, worst first: by the NLL of the focus, cases without one at the end.

    Attributes:
        sorted_by: position of the column it is sorted by.
    """

    columns: tuple[CaseColumn, ...]
    lines: tuple[CaseLine, ...]
    sorted_by: int


def case_list(records: Records, summary: Mapping[str, Any], roles: Roles) -> CaseList:
    """Every case once; its numbers are means over the repeats that test it."""
    by_case: dict[str, list[CaseRecord]] = {}
    for row in records.rows:
        by_case.setdefault(row.case, []).append(row)
    columns = _columns(summary, roles, grouped=bool(records.groups))
    lines = [_line(case, rows, summary, roles, columns) for case, rows in sorted(by_case.items())]
    by = next((k for k, c in enumerate(columns) if c.column == "nll" and c.pipeline == roles.focus), 0)
    lines.sort(key=lambda line: _worst_first(line.cells[by].value))
    numbered = tuple(replace(line, number=number) for number, line in enumerate(lines))
    return CaseList(tuple(column.public() for column in columns), numbered, by)


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    hint: str
    column: str = ""
    pipeline: str = ""

    def public(self) -> CaseColumn:
        rising = self.column in ("", "dsc")
        return CaseColumn(self.title, self.hint, self.column != "", "ascending" if rising else "descending")


def _columns(summary: Mapping[str, Any], roles: Roles, *, grouped: bool) -> list[_Column]:
    columns = [_Column("case", "open it to see a slice and the numbers of every pipeline")]
    if grouped:
        columns.append(_Column("group", "as the manifest names it"))
    columns.append(_Column("DSC (%)", f"mean Dice score of {roles.focus}, higher is better", "dsc", roles.focus))
    for column, title in (("nll", "NLL"), ("ece", "ECE"), ("ba_ece", "BA-ECE")):
        if roles.base != roles.focus:
            columns.append(_Column(f"{title} before", f"{roles.base}, lower is better", column, roles.base))
        after = f"{title} after" if roles.base != roles.focus else title
        columns.append(_Column(after, f"{roles.focus}, lower is better", column, roles.focus))
    if any(p["name"] == roles.focus and p.get("flip_applicable") for p in roles.main):
        columns.append(_Column("flips (%)", f"voxels whose label {roles.focus} changes", "flip", roles.focus))
    if summary.get("free_energy"):
        columns.append(_Column("free energy SD", "spatial standard deviation of the pooled free energy", "energy"))
    return columns


def _line(
    case: str, rows: Sequence[CaseRecord], summary: Mapping[str, Any], roles: Roles, columns: Sequence[_Column]
) -> CaseLine:
    first = rows[0]
    cells = []
    for column in columns:
        if column.title == "case":
            cells.append(CaseCell(case, case))
        elif column.title == "group":
            cells.append(CaseCell(first.group or DASH, first.group or None))
        elif column.column == "energy":
            cells.append(_energy(case, summary, roles))
        else:
            value = _mean(rows, column.pipeline, column.column)
            cells.append(CaseCell(number(value, column.column).removesuffix(" %"), value))
    flipping = {p["name"] for p in summary["pipelines"] if p.get("flip_applicable", True)}
    names = list(dict.fromkeys(row.pipeline for row in rows))
    detail = tuple((name, tuple(_detail(rows, name, c, name in flipping) for c in DETAIL)) for name in names)
    return CaseLine(0, case, tuple(cells), _dice(rows, summary, roles.focus), detail, _facts(rows, summary))


def _detail(rows: Sequence[CaseRecord], pipeline: str, column: str, flips: bool) -> str:
    return DASH if column == "flip" and not flips else number(_mean(rows, pipeline, column), column)


def _dice(rows: Sequence[CaseRecord], summary: Mapping[str, Any], focus: str) -> tuple[tuple[str, str], ...]:
    first = 0 if summary.get("regions") or summary["settings"]["metrics"].get("include_background") else 1
    names = list(summary.get("classes") or [])[first:]
    return tuple((name, number(_mean(rows, focus, f"dsc:{name}"), "dsc")) for name in names)


def _facts(rows: Sequence[CaseRecord], summary: Mapping[str, Any]) -> tuple[str, ...]:
    first = rows[0]
    facts = [f"group {first.group}"] if first.group else []
    kind, _, subject = first.subject.partition(":")
    if kind == "subject":
        facts.append(f"subject {subject}")
    repeats = sorted({row.repeat for row in rows})
    if int(summary["n_repeats"]) > 1:
        facts.append(f"tested in repeat {', '.join(str(r + 1) for r in repeats)}; numbers are means over these")
    outside = (summary.get("outside_share") or {}).get(first.case)
    if outside:
        facts.append(f"{100 * outside:.1f} % of its voxels lie outside the crop")
    return tuple(facts)


def _energy(case: str, summary: Mapping[str, Any], roles: Roles) -> CaseCell:
    pooling = next((p.get("pooling") for p in roles.main if p["name"] == roles.focus), None)
    value = summary["free_energy"].get(case, {}).get(pooling, {}).get("free_energy_std")
    return CaseCell(DASH, None) if value is None else CaseCell(f"{value:.2f}", value)


def _mean(rows: Sequence[CaseRecord], pipeline: str, column: str) -> float | None:
    values = [row.values.get(column, math.nan) for row in rows if row.pipeline == pipeline]
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def _worst_first(value: float | str | None) -> float:
    return math.inf if value is None or isinstance(value, str) else -value
