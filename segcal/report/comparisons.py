"""Paired differences and what may be concluded from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from segcal.evaluation.records import Records
from segcal.evaluation.summary import COMPARED
from segcal.metrics.bootstrap import Bootstrap
from segcal.metrics.summary import comparison_json
from segcal.report.wording import MEASURES

State = Literal["better", "worse", "same", "open", "disputed", "few", "unknown"]
"""`open`: both intervals include zero; `disputed`: one does; `same`: no case differs; `few`: too few subjects."""

MIN_SUBJECTS = 6
"""With five subjects that all go one way a two-sided sign test is still at 2 / 2^5 = 0.0625: nothing can be shown."""


@dataclass(frozen=True, slots=True)
class Compared:
    """`first` minus `second` on the same cases, with the two-level interval and the one by subject."""

    first: str
    second: str
    column: str
    difference: float | None
    low: float | None
    high: float | None
    subject_low: float | None
    subject_high: float | None
    share_improved: float | None
    share_worsened: float | None
    n_pairs: int
    n_subjects: int

    @property
    def state(self) -> State:
        """What is shown: a side only when both intervals exclude zero on it."""
        numbers = (self.difference, self.low, self.high, self.subject_low, self.subject_high)
        if any(value is None for value in numbers):
            return "unknown"
        if not any(numbers):
            return "same"
        if self.n_subjects < MIN_SUBJECTS:
            return "few"
        sides = {_side(self.low, self.high), _side(self.subject_low, self.subject_high)}
        if len(sides) > 1:
            return "disputed"
        side = sides.pop()
        if not side:
            return "open"
        return "better" if (side < 0) == (MEASURES[self.column].better == "lower") else "worse"

    @property
    def n_improved(self) -> int | None:
        """Pairs of repeat and case on which `first` is better."""
        return None if self.share_improved is None else round(self.share_improved * self.n_pairs)

    @property
    def n_worsened(self) -> int | None:
        return None if self.share_worsened is None else round(self.share_worsened * self.n_pairs)

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], n_subjects: int) -> Self:
        """From an entry of `differences` in summary.json; `n_subjects` is how many people the cases are of."""
        subject = entry.get("by_subject") or {}
        return cls(
            first=entry["first"],
            second=entry["second"],
            column=entry["metric"],
            difference=entry.get("difference"),
            low=entry.get("low"),
            high=entry.get("high"),
            subject_low=subject.get("low"),
            subject_high=subject.get("high"),
            share_improved=entry.get("share_improved"),
            share_worsened=entry.get("share_worsened"),
            n_pairs=int(entry.get("n_pairs") or 0),
            n_subjects=n_subjects,
        )


@dataclass(eq=False)
class Comparisons:
    """Looks differences up in the summary; those it does not hold are made from the per-case table the same way."""

    summary: Mapping[str, Any]
    records: Records
    _known: dict[tuple[str, str, str], Compared] = field(init=False)
    _drawn: dict[str | None, Bootstrap] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        n_subjects = _n_subjects(self.records)
        entries = [entry for entry in self.summary["differences"] if entry["metric"] in MEASURES]
        listed = [Compared.from_entry(entry, n_subjects) for entry in entries]
        self._known = {(c.first, c.second, c.column): c for c in listed}

    def find(self, first: str, second: str, column: str) -> Compared | None:
        """The paired difference; None when it can be neither found nor made."""
        known = self._known.get((first, second, column))
        return self.in_group(None, first, second, column) if known is None else known

    def in_group(self, group: str | None, first: str, second: str, column: str) -> Compared | None:
        """The paired difference on the cases of one group (None: all), with the summary's seed and replicates."""
        if column not in COMPARED and column != "ace":
            return None
        records = self.records if group is None else self.records.of_group(group)
        if group not in self._drawn:
            self._drawn[group] = self._bootstrap(records)
        drawn = self._drawn[group]
        if column == "ace":
            values = comparison_json(drawn.compare_ace(first, second))
        else:
            values = comparison_json(drawn.compare(first, second, column, MEASURES[column].better))
        return Compared.from_entry({"first": first, "second": second, "metric": column, **values}, _n_subjects(records))

    def pairs(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Pairs among these names that the summary compares, in its order."""
        wanted = set(names)
        return list(dict.fromkeys((a, b) for a, b, _ in self._known if {a, b} <= wanted))

    def _bootstrap(self, records: Records) -> Bootstrap:
        settings = self.summary["settings"]
        how = settings["bootstrap"]
        return Bootstrap(
            records.scores(COMPARED, ace_bins=int(settings["metrics"]["ace_bins"])),
            n_replicates=int(how["n_replicates"]),
            seed=int(how["seed"]),
            confidence_level=float(how["confidence_level"]),
        )


def _n_subjects(records: Records) -> int:
    return len({row.subject for row in records.rows})


def _side(low: float | None, high: float | None) -> int:
    """+1 or -1 where the interval lies wholly on one side of zero, 0 where it includes zero."""
    assert low is not None
    assert high is not None
    return 1 if low > 0 else -1 if high < 0 else 0
