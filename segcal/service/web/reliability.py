"""The reliability diagram of a case with labels, before and after calibration, as coordinates for the template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from segcal.metrics.bins import BinTable  # brings torch, which a server without labelled cases never needs

SIZE, MARGIN = 320, 50
MIN_VOXELS = 50
"""Bins of fewer voxels are left out of a curve, as in the report."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One set of probabilities.

    Attributes:
        name: "before" or "after"; also its style.
        points: (x, y) of every bin with enough voxels.
        line: the same as the `points` of a polyline.
        words: name and calibration error.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    line: str
    words: str


@dataclass(frozen=True, slots=True)
class Diagram:
    """The drawing; `start` is the value at the lower left corner."""

    curves: tuple[Curve, ...]
    ticks: tuple[tuple[float, float, str], ...]
    alt: str


def reliability_diagram(tables: Mapping[str, Any] | None) -> Diagram | None:
    """From the tables that a job kept of a case; None when it kept none."""
    if not tables:
        return None
    found = {name: _table(tables[name]) for name in ("before", "after") if tables.get(name) is not None}
    if not found:
        return None
    from segcal.report.reliability import reliability_alt_text

    start = min(_first_edge(table) for table in found.values())
    ticks = [start + (1 - start) * k / 4 for k in range(5)]
    return Diagram(
        curves=tuple(_curve(name, table, start) for name, table in found.items()),
        ticks=tuple((_place(at, start), SIZE - _place(at, start), f"{round(100 * at, 1):g} %") for at in ticks),
        alt=reliability_alt_text(found),
    )


def pooled_errors(cases: Iterable[Mapping[str, Any] | None]) -> tuple[int, float, float] | None:
    """How many cases have labels, and the calibration error before and after over all of their voxels."""
    both = [
        (_table(each["before"]), _table(each["after"])) for each in cases if each and {*each} >= {"before", "after"}
    ]
    if not both:
        return None
    before, after = (reduce(add, tables) for tables in zip(*both, strict=True))
    return len(both), before.ece(), after.ece()


def _table(values: Sequence[Sequence[float]]) -> BinTable:
    from segcal.metrics.bins import BinTable

    return BinTable.from_array(np.asarray(values, dtype=np.float64))


def _curve(name: str, table: BinTable, start: float) -> Curve:
    confidence, accuracy = table.reliability()
    points = tuple(
        (_place(float(confidence[k]), start), round(SIZE - _place(float(accuracy[k]), start), 1))
        for k in np.flatnonzero(table.counts >= MIN_VOXELS)
    )
    line = " ".join(f"{x},{y}" for x, y in points)
    error = f"ECE {100 * table.ece():.2f} %" if table.total else "no voxels"
    return Curve(name, points, line, f"{name} ({error})")


def _place(value: float, start: float) -> float:
    """Where a share lies on either axis; what lies below the corner stands at the edge."""
    inside = max(0.0, (value - start) / (1 - start))
    return round(MARGIN + inside * (SIZE - 2 * MARGIN), 1)


def _first_edge(table: BinTable) -> float:
    used = np.flatnonzero(table.counts >= MIN_VOXELS)
    lowest = used[0] / table.n_bins if len(used) else 0.0
    _, accuracy = table.reliability()
    if len(used):
        lowest = min(lowest, float(np.nanmin(accuracy[used])))
    return min(0.9, float(np.floor(10 * lowest + 1e-9) / 10))
