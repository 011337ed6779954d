"""How the pages write numbers, times and states: the words of qa.html, so that both can be read side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from segcal.qa.words import STATISTIC_WORDS
from segcal.report.wording import DASH, MINUS
from segcal.service.model import JobKind, JobState

KIND_WORDS: Mapping[JobKind, str] = {
    "apply": "calibrated maps and QA",
    "qa": "QA",
    "evaluate": "evaluation with labels",
    "fit": "fit of calibrators",
    "study": "study",
    "case": "one case",
}

STATE_WORDS: Mapping[JobState, str] = {
    "queued": "waiting",
    "running": "running",
    "done": "done",
    "failed": "failed",
    "cancelled": "cancelled",
}

STATE_BADGES: Mapping[JobState, str] = {
    "queued": "",
    "running": "mixed",
    "done": "better",
    "failed": "worse",
    "cancelled": "",
}
"""Which colours of the style a state takes."""

SCORE_WORDS = {f"z:{name}": words for name, words in STATISTIC_WORDS.items()}

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def percent(value: float | None, digits: int = 1) -> str:
    """`93.1`, without the sign: the heading has it."""
    return DASH if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}"


def plain(value: float | None, digits: int = 1) -> str:
    """`2.3`."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int = 1) -> str:
    """`+2.3`."""
    return DASH if value is None or not math.isfinite(value) else f"{value:+.{digits}f}".replace("-", MINUS)


def moment(seconds: float | None) -> str:
    """`2026-03-01 04:05 UTC`."""
    return DASH if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def duration(seconds: float | None) -> str:
    """`12 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return DASH
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def file_size(n_bytes: int) -> str:
    """`1.4 MB`."""
    size, unit = float(n_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def short_hash(sha256: str | None) -> str:
    """The first eight digits, enough for people."""
    return DASH if not sha256 else sha256[:8]


def setting(value: Any) -> str:
    """A value of a calibrator's metadata, for a table of facts."""
    if value is None or value == () or value == [] or value == {}:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {setting(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(each) for each in value)
    return str(value)
