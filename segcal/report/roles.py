"""Which pipelines a report puts first: those to judge, what each is judged against, and whose curves are drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PipelineEntry = Mapping[str, Any]

MAX_SHOWN = 3
"""Calibrated pipelines with a verdict and a curve of their own."""

_VARIANT = re.compile(r" (?P<what>[Mn])=(?P<size>\d+)$")


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """The parts that the pipelines of a summary play.

    Attributes:
        main: the rows of the result table.
        variants: the same methods with fewer members or calibration cases, for the sensitivity tables.
        shown: names of the calibrated pipelines that get a verdict and curves, in the order of the table.
        focus: the pipeline of the case list and its pictures; an uncalibrated one when nothing else was evaluated.
        base: what the focus is compared with; the focus itself when there is nothing to compare.
    """

    main: tuple[PipelineEntry, ...]
    variants: tuple[PipelineEntry, ...]
    shown: tuple[str, ...]
    focus: str
    base: str

    @property
    def calibrated(self) -> tuple[PipelineEntry, ...]:
        return tuple(p for p in self.main if p.get("calibrated"))

    @property
    def curves(self) -> tuple[str, ...]:
        """Names for the reliability diagrams: what each shown pipeline is compared with, then the pipelines."""
        bases = (base_of(p, self.main) for p in self.main if p["name"] in self.shown)
        return tuple(dict.fromkeys([*(name for name in bases if name), *self.shown])) or (self.focus,)


def assign_roles(summary: Mapping[str, Any]) -> Roles:
    """Choose from the summary alone; nobody's numbers are hidden by it, they all stand in the table."""
    main = tuple(p for p in summary["pipelines"] if variant_of(p["name"]) is None)
    variants = tuple(p for p in summary["pipelines"] if variant_of(p["name"]) is not None)
    calibrated = [p for p in main if p.get("calibrated")]
    names = [p["name"] for p in main]
    pictured = summary.get("pictured")
    candidates = [name for name in names if name == pictured] + [p["name"] for p in calibrated] + names[-1:]
    focus: str = candidates[0]
    base = next((base_of(p, main) or focus for p in main if p["name"] == focus), focus)
    chosen = [p["name"] for p in calibrated]
    if len(chosen) > MAX_SHOWN:
        chosen = _best_known(calibrated, focus)
    return Roles(main, variants, tuple(n for n in names if n in chosen), focus, base)


def base_of(pipeline: PipelineEntry, pipelines: Iterable[PipelineEntry]) -> str | None:
    """The uncalibrated pipeline with the same input; None for an uncalibrated one and where there is none."""
    if not pipeline.get("calibrated"):
        return None
    pooling = pipeline.get("pooling")
    # Members that were calibrated one by one are averaged as probabilities.
    key = ("probabilities" if pooling == "members-probabilities" else pooling, pipeline.get("n_members"))
    same = [p["name"] for p in pipelines if not p.get("calibrated") and (p.get("pooling"), p.get("n_members")) == key]
    return same[0] if same else None


def variant_of(name: str) -> tuple[str, str, int] | None:
    """(`ts(z)`, `M`, 3) for `ts(z) M=3`; None for a pipeline that is no variant."""
    found = _VARIANT.search(name)
    return None if found is None else (name[: found.start()], found["what"], int(found["size"]))


def _best_known(calibrated: Sequence[PipelineEntry], focus: str) -> list[str]:
    """The pictured one, the best by NLL, and the best by NLL among those that keep every label."""
    ranked = sorted((p for p in calibrated if _nll(p) is not None), key=lambda p: float(_nll(p) or 0.0))
    keeping = [p["name"] for p in ranked if p.get("preserves")]
    wanted = [*[p["name"] for p in calibrated if p["name"] == focus], *[p["name"] for p in ranked][:1], *keeping]
    return list(dict.fromkeys(wanted))[:MAX_SHOWN]


def _nll(pipeline: PipelineEntry) -> float | None:
    value: float | None = pipeline["metrics"].get("nll", {}).get("mean")
    return value
