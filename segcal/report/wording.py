"""How a report names measures and writes numbers: one place, so that sentences and tables agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DASH, MINUS = "—", "\N{MINUS SIGN}"

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of the tables.

    Attributes:
        short: as a table heads it.
        words: as a sentence says it.
        better: which way it gets better.
        percent: shown in percent, differences in percentage points.
    """

    short: str
    words: str
    better: Better = "lower"
    percent: bool = False


MEASURES = {
    "nll": Measure("NLL", "negative log-likelihood"),
    "brier": Measure("Brier", "Brier score"),
    "ece": Measure("ECE", "expected calibration error"),
    "ba_ece": Measure("BA-ECE", "calibration error near boundaries"),
    "ace": Measure("ACE", "average calibration error"),
    "adaptive_ece": Measure("Adaptive ECE", "calibration error in bins of equally many"),
    "classwise_ece": Measure("Class-wise ECE", "calibration error of every class's probability"),
    "accuracy": Measure("Accuracy", "share of right predictions", "higher", percent=True),
    "dsc": Measure("DSC", "Dice score", "higher", percent=True),
    "flip": Measure("Flips", "share of voxels whose label changes", percent=True),
}


def number(value: float | None, column: str) -> str:
    """`0.0375`, `85.04 %`; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{100 * value:.2f} %" if _percent(column) else f"{value:.4f}"


def signed(value: float | None, column: str) -> str:
    """A difference with its sign: `−0.0060`; percentage points for shares."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{100 * value:+.2f}" if _percent(column) else f"{value:+.4f}"
    return text.lstrip("+-") if not float(text) else text.replace("-", MINUS)


def difference_interval(low: float | None, high: float | None, column: str) -> str:
    """`−0.0087 to −0.0040`."""
    return f"{signed(low, column)} to {signed(high, column)}"


def relative(after: float | None, before: float | None) -> str:
    """Change in percent of the value before: `−14 %`; empty where that makes no sense."""
    if after is None or before is None or not before > 0:
        return ""
    return f"{100 * (after / before - 1):+.0f} %".replace("-", MINUS)


def share(value: float) -> str:
    """A share of voxels in percent, also when it is tiny: `0.0021 %`; exact 0 and 1 look exact."""
    percent = 100 * value
    if percent in (0.0, 100.0):
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 10 else f"{percent:.2g} %"


def listing(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))


def about_case(case_id: str, message: str) -> str:
    """`case_7: truncated`; messages often begin with the id of their case, which is said once."""
    return f"{case_id}: {message.removeprefix(f'{case_id}: ')}"


def _percent(column: str) -> bool:
    base = column.split(":")[0]
    return base.startswith("flip") or (base in MEASURES and MEASURES[base].percent)
