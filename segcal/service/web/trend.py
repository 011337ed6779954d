"""Drift at a glance: numbers of the last cases in the order they came, day by day, with the limits that flag a case.

The z-scores compare a case with the cases its calibrator was fitted on, so 0 is the middle of the calibration set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Literal

from segcal.counted import count
from segcal.qa.settings import QaSettings
from segcal.qa.words import STATISTIC_WORDS
from segcal.service.store import TrendPoint
from segcal.service.web.wording import percent, signed

WIDTH, HEIGHT = 420, 196
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 12, 28
"""Margins around the plot, in the units of the drawing."""

_LABEL_EVERY = 44
_BEYOND = 3.0
"""z-scores are drawn up to this many times the limit; farther ones stand at the edge."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A case; `how` is its shape."""

    x: float
    y: float
    key: int
    title: str
    how: Literal["in", "out", "above", "below"]


@dataclass(frozen=True, slots=True)
class Line:
    """A level of the drawing with words: a limit, or a tick of the axis; `below` says where the words stand."""

    y: float
    words: str
    below: bool = False


@dataclass(frozen=True, slots=True)
class Day:
    """A day's share of the width, and its median."""

    left: float
    right: float
    label: str
    median_y: float | None
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, ready for the template.

    Attributes:
        title: what is drawn.
        dots: one a case.
        limits: control limits, with their words.
        ticks: of the vertical axis.
        days: with the median of each.
        summary: the same in a sentence.
        bars: whether the days are drawn as bars from the bottom instead of a line at their median.
    """

    title: str
    dots: tuple[Dot, ...]
    limits: tuple[Line, ...]
    ticks: tuple[Line, ...]
    days: tuple[Day, ...]
    summary: str
    bars: bool = False


@dataclass(frozen=True, slots=True)
class _Quantity:
    title: str
    read: Callable[[TrendPoint], float | None]
    limit: float | None
    words: str
    score: bool

    def is_out(self, value: float) -> bool:
        if self.limit is None:
            return False
        return abs(value) > self.limit if self.score else value < self.limit

    def text(self, value: float) -> str:
        return signed(value) if self.score else f"{percent(value)} %"


def trend_charts(points: Sequence[TrendPoint], settings: QaSettings) -> list[Chart]:
    """Every quantity that at least one of the cases has."""
    drawn = (_chart(points, quantity) for quantity in _quantities(settings))
    return [chart for chart in (*drawn, _flagged_chart(points)) if chart is not None]


def _quantities(settings: QaSettings) -> tuple[_Quantity, ...]:
    z = settings.max_outlyingness
    dsc, boundary = settings.min_expected_dsc, settings.min_boundary_confidence
    beyond = "" if z is None else f"limit |z| {z:g}"

    def named(name: str) -> str:
        return f"{STATISTIC_WORDS[name]} (z)"

    return (
        _Quantity("expected DSC", lambda p: p.expected_dsc, dsc, f"lowest expected DSC {percent(dsc, 0)} %", False),
        _Quantity(
            "confidence near the boundary",
            lambda p: p.boundary_confidence,
            boundary,
            f"lowest boundary confidence {percent(boundary, 0)} %",
            False,
        ),
        _Quantity(named("free_energy_mean"), lambda p: p.z_free_energy, z, beyond, True),
        _Quantity(named("free_energy_std"), lambda p: p.z_free_energy_std, z, beyond, True),
        _Quantity(named("confidence_mean"), lambda p: p.z_confidence, z, beyond, True),
    )


def _chart(points: Sequence[TrendPoint], quantity: _Quantity) -> Chart | None:
    found = [(point, value) for point in points if (value := quantity.read(point)) is not None and math.isfinite(value)]
    if not found:
        return None
    low, high = _range([value for _, value in found], quantity)
    step = (WIDTH - LEFT - RIGHT) / len(found)

    def height(value: float) -> float:
        inside = min(max(value, low), high)
        return round(TOP + (high - inside) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    dots = tuple(
        Dot(round(LEFT + (k + 0.5) * step, 1), height(value), point.key, _dot_title(point, value, quantity), how)
        for k, (point, value) in enumerate(found)
        for how in [_shape(value, low, high, quantity)]
    )
    return Chart(
        title=quantity.title,
        dots=dots,
        limits=tuple(Line(height(at), words, not quantity.score) for at, words in _limits(quantity)),
        ticks=tuple(Line(height(at), _tick(at, quantity)) for at in _tick_values(low, high)),
        days=_days(found, step, height, quantity),
        summary=_summary(found, quantity),
    )


def _flagged_chart(points: Sequence[TrendPoint]) -> Chart | None:
    """The share of flagged cases, day by day."""
    if not points:
        return None
    step = (WIDTH - LEFT - RIGHT) / len(points)

    def height(share: float) -> float:
        return round(TOP + (1 - share) * (HEIGHT - TOP - BOTTOM), 1)

    days, start, labels = [], 0, _DayLabels()
    for name, group in groupby(points, key=lambda point: point.day):
        flagged = [point.n_flags > 0 for point in group]
        left, right = LEFT + start * step, LEFT + (start + len(flagged)) * step
        words = f"{name}: {sum(flagged)} of {count(len(flagged), 'case')} flagged"
        share = sum(flagged) / len(flagged)
        days.append(Day(round(left, 1), round(right, 1), labels.at(left, name), height(share), words))
        start += len(flagged)
    ticks = tuple(Line(height(share), f"{100 * share:.0f} %") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    return Chart("share of cases flagged", (), (), ticks, tuple(days), f"On {days[-1].title}.", bars=True)


class _DayLabels:
    """Names days below the axis where there is room for it."""

    def __init__(self) -> None:
        self._last = -math.inf

    def at(self, left: float, day: str) -> str:
        if left - self._last < _LABEL_EVERY or left > WIDTH - RIGHT - _LABEL_EVERY / 2:
            return ""
        self._last = left
        return day[5:]


def _range(values: Sequence[float], quantity: _Quantity) -> tuple[float, float]:
    """Both ends of the vertical axis: the limits are always in sight."""
    if quantity.score:
        limit = quantity.limit or max(1.0, *map(abs, values))
        reach = min(max(1.25 * limit, 1.05 * max(map(abs, values))), _BEYOND * limit)
        return -reach, reach
    lowest = min(values) if quantity.limit is None else min(*values, quantity.limit)
    return max(0.0, lowest - 0.15 * (1.0 - lowest) - 0.005), 1.0


def _limits(quantity: _Quantity) -> list[tuple[float, str]]:
    if quantity.limit is None:
        return []
    if not quantity.score:
        return [(quantity.limit, quantity.words)]
    return [(quantity.limit, quantity.words), (-quantity.limit, "")]


def _shape(value: float, low: float, high: float, quantity: _Quantity) -> Literal["in", "out", "above", "below"]:
    if value > high:
        return "above"
    if value < low:
        return "below"
    return "out" if quantity.is_out(value) else "in"


def _tick_values(low: float, high: float) -> list[float]:
    """Three to seven round numbers."""
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick(at: float, quantity: _Quantity) -> str:
    if quantity.score:
        return signed(at, 0) if at else "0"
    return f"{round(100 * at, 1):g} %"


def _days(
    found: Sequence[tuple[TrendPoint, float]], step: float, height: Callable[[float], float], quantity: _Quantity
) -> tuple[Day, ...]:
    days, start, labels = [], 0, _DayLabels()
    for name, group in groupby(found, key=lambda each: each[0].day):
        values = [value for _, value in group]
        left, right = LEFT + start * step, LEFT + (start + len(values)) * step
        middle = median(values)
        words = f"{name}: median {quantity.text(middle)} over {count(len(values), 'case')}"
        days.append(Day(round(left, 1), round(right, 1), labels.at(left, name), height(middle), words))
        start += len(values)
    return tuple(days)


def _dot_title(point: TrendPoint, value: float, quantity: _Quantity) -> str:
    return f"{point.case_id}, {point.day}: {quantity.text(value)}"


def _summary(found: Sequence[tuple[TrendPoint, float]], quantity: _Quantity) -> str:
    last_day = found[-1][0].day
    of_day = [value for point, value in found if point.day == last_day]
    n_out = sum(quantity.is_out(value) for _, value in found)
    words = f"Median on {last_day}: {quantity.text(median(of_day))}."
    if quantity.limit is not None:
        words += f" {n_out} of the last {count(len(found), 'case')} beyond the limit."
    return words
