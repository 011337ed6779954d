"""What a benchmark found, for machines: benchmarks/results/latest.json, a list of {name, value, unit, target, ok}.

Every script replaces its own entries by name and leaves the others alone. Entries of a quick run start with `quick/`,
so they never stand in for real ones, and have no target: small data show that a script runs, not how fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from segcal.io.atomic import write_text_atomic

FILE_VARIABLE = "SEGCAL_BENCH_RESULTS"
QUICK = "quick/"


@dataclass(frozen=True)
class Entry:
    """One figure.

    Attributes:
        name: `script/what`.
        value: None when it could not be measured.
        target: the largest value that is good enough; with `at_least` the smallest; None for figures without one.
        ok: whether the target is met; None without one.
    """

    name: str
    value: float | None
    unit: str
    target: float | None
    ok: bool | None


def entry(name: str, value: float | None, unit: str, target: float | None = None, *, at_least: bool = False) -> Entry:
    """An entry with its verdict; what could not be measured does not meet a target."""
    if target is None:
        return Entry(name, value, unit, None, None)
    met = value is not None and (value >= target if at_least else value <= target)
    return Entry(name, value, unit, target, met)


def results_file() -> Path:
    """latest.json, or the file $SEGCAL_BENCH_RESULTS names."""
    given = os.environ.get(FILE_VARIABLE)
    return Path(given) if given else Path(__file__).parent / "results" / "latest.json"


def record(entries: Iterable[Entry], *, quick: bool = False) -> None:
    """Put entries into the file in place of those of the same names."""
    path = results_file()
    known = {one["name"]: one for one in json.loads(path.read_bytes())} if path.is_file() else {}
    for one in entries:
        row = asdict(replace(one, name=f"{QUICK}{one.name}", target=None, ok=None) if quick else one)
        known[row["name"]] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, json.dumps([known[name] for name in sorted(known)], indent=1) + "\n")
