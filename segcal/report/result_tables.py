"""The tables of a report: results with intervals, paired differences, groups, sensitivities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from segcal.evaluation.summary import HEADLINE
from segcal.evaluation.tables import best_pipelines
from segcal.report.comparisons import Compared, Comparisons, State
from segcal.report.roles import PipelineEntry, Roles, base_of, variant_of
from segcal.report.wording import DASH, difference_interval, number, signed

DIFFERENCES = ("nll", "brier", "ece", "ba_ece", "ace", "dsc")


@dataclass(frozen=True, slots=True)
class Whisker:
    """A dot with an interval on a scale of 0 to 100; `zero` is where no difference lies."""

    low: float
    middle: float
    high: float
    zero: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with one interval; two of them make a cell that can be switched."""

    interval: str
    whisker: Whisker | None


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: the number.
        two_level, by_subject: its intervals by both schemes.
        note: for the tooltip.
        best: whether it is the best of its column.
        state: of a difference.
    """

    text: str
    two_level: Estimate | None = None
    by_subject: Estimate | None = None
    note: str = ""
    best: bool = False
    state: State | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: its pipeline (against `other` in a comparison) and the cells."""

    name: str
    cells: tuple[Cell, ...]
    other: str = ""
    entry: PipelineEntry | None = None
    heading: str = ""


def result_rows(
    pipelines: Sequence[PipelineEntry],
    *,
    columns: Sequence[str] = HEADLINE,
    mark_best: bool = True,
    headings: Sequence[str] = (),
) -> list[Row]:
    """The headline table: one row a pipeline, one column a measure (by default those of SEG Table 4).

    Args:
        columns: keys of the measures.
        mark_best: whether the best mean of a column is marked.
        headings: for each row the section that begins with it, empty for none.
    """
    cells = [_result_column(pipelines, column, mark_best) for column in columns]
    given = headings or [""] * len(pipelines)
    return [
        Row(p["name"], tuple(column[k] for column in cells), entry=p, heading=heading)
        for k, (p, heading) in enumerate(zip(pipelines, given, strict=True))
    ]


class Finder(Protocol):
    """Knows the paired difference of two pipelines in a column, if there is one."""

    def find(self, first: str, second: str, column: str) -> Compared | None: ...


def difference_rows(
    comparisons: Finder, pairs: Iterable[tuple[str, str]], columns: Sequence[str] = DIFFERENCES
) -> list[Row]:
    """Paired differences; whiskers of a column share one scale."""
    chosen = list(pairs)
    found = {(a, b, c): comparisons.find(a, b, c) for a, b in chosen for c in columns}
    scales = {c: _difference_scale([found[a, b, c] for a, b in chosen]) for c in columns}
    return [Row(a, tuple(_difference_cell(found[a, b, c], c, scales[c]) for c in columns), other=b) for a, b in chosen]


def against_base(roles: Roles) -> list[tuple[str, str]]:
    """Every calibrated pipeline with its uncalibrated input."""
    return [(p["name"], base) for p in roles.calibrated if (base := base_of(p, roles.main)) is not None]


def between_calibrated(comparisons: Comparisons, roles: Roles) -> list[tuple[str, str]]:
    """All pairs of calibrated pipelines."""
    return comparisons.pairs([p["name"] for p in roles.calibrated])


def group_rows(summary: Mapping[str, Any], roles: Roles) -> list[Row]:
    """The pipelines of the curves within each group."""
    entries: list[PipelineEntry] = []
    headings: list[str] = []
    for group, pipelines in (summary.get("groups") or {}).items():
        chosen = [p for p in pipelines if p["name"] in roles.curves]
        entries += chosen
        headings += [group, *[""] * len(chosen)][: len(chosen)]
    return result_rows(entries, mark_best=False, headings=headings)


def variant_rows(roles: Roles, what: str) -> list[Row]:
    """Sensitivity to the ensemble size (`M`) or the calibration cases (`n`): each method's variants, smallest first."""
    families: dict[str, list[tuple[int, PipelineEntry]]] = {}
    for entry in roles.variants:
        found = variant_of(entry["name"])
        if found is not None and found[1] == what:
            families.setdefault(found[0], []).append((found[2], entry))
    entries: list[PipelineEntry] = []
    for family, members in families.items():
        entries += [entry for _, entry in sorted(members, key=lambda member: member[0])]
        entries += [p for p in roles.main if p["name"] == family]
    return result_rows(entries, mark_best=False)


def bin_rows(summary: Mapping[str, Any], roles: Roles, column: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Numbers of bins, and for each pipeline ECE or ACE with so many bins; empty when the study did not ask."""
    table = summary.get("bins") or {}
    if len(table) < 2:
        return [], []
    counts = sorted(table, key=int)
    names = [p["name"] for p in roles.main if p["name"] in table[counts[0]]]
    return counts, [(name, [number(table[b].get(name, {}).get(column), column) for b in counts]) for name in names]


def _result_column(pipelines: Sequence[PipelineEntry], column: str, mark_best: bool) -> list[Cell]:
    best = best_pipelines(pipelines, column) if mark_best else frozenset()
    ends = [
        end
        for p in pipelines
        if _applies(p, column)
        for scheme in ("", "by_subject")
        for end in _ends(p, column, scheme)
    ]
    scale = (min(ends), max(ends)) if ends else (0.0, 1.0)
    return [_result_cell(p, column, scale, p["name"] in best) for p in pipelines]


def _result_cell(pipeline: PipelineEntry, column: str, scale: tuple[float, float], best: bool) -> Cell:
    values = pipeline["metrics"].get(column, {})
    mean = values.get("mean")
    if mean is None or not _applies(pipeline, column):
        return Cell(DASH, note="does not apply" if mean is not None else str(values.get("reason", "not measured")))
    two_level = _estimate(_ends(pipeline, column, ""), mean, column, scale)
    by_subject = _estimate(_ends(pipeline, column, "by_subject"), mean, column, scale)
    return Cell(_bare(mean, column), two_level, by_subject, _note(values, column), best)


def _estimate(ends: Sequence[float], mean: float, column: str, scale: tuple[float, float]) -> Estimate | None:
    if not ends:
        return None
    low, high = ends
    place = [_place(value, scale) for value in (low, mean, high)]
    return Estimate(f"{_bare(low, column)} to {_bare(high, column)}", Whisker(*place))


def _ends(pipeline: PipelineEntry, column: str, scheme: str) -> list[float]:
    """The interval; for ACE the basic bootstrap interval, because its percentile interval lies too high."""
    values = pipeline["metrics"].get(column, {})
    if column == "ace":
        drawn = values.get("bootstrap", {}).get(scheme or "two_level", {}).get("basic", {})
    else:
        drawn = values.get(scheme, {}) if scheme else values
    low, high = drawn.get("low"), drawn.get("high")
    return [] if low is None or high is None else [low, high]


def _note(values: Mapping[str, Any], column: str) -> str:
    repeats = [v for v in values.get("by_repeat", []) if v is not None]
    notes = [f"by repeat: {', '.join(_bare(v, column) for v in repeats)}"] if len(repeats) > 1 else []
    if values.get("noise_limit") is not None:
        notes.append(f"below {values['noise_limit']:.4f} it cannot be told from perfect calibration")
    if values.get("n_undefined"):
        notes.append(f"not defined for {values['n_undefined']} measurements")
    return "; ".join(notes)


def _applies(pipeline: PipelineEntry, column: str) -> bool:
    return column != "flip" or bool(pipeline.get("flip_applicable", True))


def _difference_scale(column: Sequence[Compared | None]) -> tuple[float, float]:
    ends = [v for c in column if c is not None for v in (c.low, c.high, c.subject_low, c.subject_high, c.difference)]
    known = [v for v in ends if v is not None]
    return min([*known, 0.0]), max([*known, 0.0])


def _difference_cell(compared: Compared | None, column: str, scale: tuple[float, float]) -> Cell:
    if compared is None or compared.difference is None:
        return Cell(DASH, state="unknown")
    two_level = _difference(compared, compared.low, compared.high, scale)
    by_subject = _difference(compared, compared.subject_low, compared.subject_high, scale)
    text = signed(compared.difference, column)
    return Cell(text, two_level, by_subject, _shares(compared), state=compared.state)


def _difference(
    compared: Compared, low: float | None, high: float | None, scale: tuple[float, float]
) -> Estimate | None:
    if low is None or high is None or compared.difference is None or compared.state == "same":
        return None
    place = [_place(value, scale) for value in (low, compared.difference, high, 0.0)]
    return Estimate(difference_interval(low, high, compared.column), Whisker(*place))


def _shares(compared: Compared) -> str:
    """`20 of 20 better`, `16 better, 4 worse`."""
    better, worse = compared.n_improved, compared.n_worsened
    if better is None or worse is None or compared.state == "same":
        return ""
    return f"{better} better, {worse} worse" if worse else f"{better} of {compared.n_pairs} better"


def _place(value: float, scale: tuple[float, float]) -> float:
    low, high = scale
    return round(100 * (value - low) / (high - low), 1) if high > low else 50.0


def _bare(value: float, column: str) -> str:
    """Without the percent sign, which the head of the column carries."""
    return number(value, column).removesuffix(" %")
