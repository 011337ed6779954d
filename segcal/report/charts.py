"""The reliability diagrams of a report, and the same in a table: what a stated confidence is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.records import Records
from segcal.metrics.bins import BinTable
from segcal.report.encoding import EncodedPicture, drawing, plain_text
from segcal.report.reliability import ACCURACY, CONFIDENCE, reliability_alt_text, reliability_figure
from segcal.report.roles import Roles, base_of

MIN_VOXELS = 50
"""Confidence ranges with fewer voxels get no accuracy: it would be mostly chance."""


@dataclass(frozen=True, slots=True)
class Diagrams:
    """Reliability diagrams, by what they are about; empty where the tables are not there."""

    overall: tuple[EncodedPicture, ...]
    bands: tuple[EncodedPicture, ...]
    classes: tuple[EncodedPicture, ...]
    each: tuple[EncodedPicture, ...]


@dataclass(frozen=True, slots=True)
class Stated:
    """One range of confidence: how many voxels have it and how many of them are right, for each pipeline."""

    low: float
    high: float
    cells: tuple[tuple[float, float | None], ...]


def reliability_diagrams(records: Records, summary: Mapping[str, Any], roles: Roles) -> Diagrams:
    """All diagrams: every voxel, by distance to the true boundary, by class, and each pipeline by itself."""
    metrics = summary["settings"]["metrics"]
    tables = _Tables(records, int(metrics["ece_bins"]), int(metrics["ace_bins"]))
    overall = [
        _diagram({name: table for name in roles.curves if (table := tables.top_label(name)) is not None}, "all voxels")
    ]
    near = [_band_diagram(tables, roles.curves, k, words) for k, words in enumerate(band_words(metrics["band_edges"]))]
    channels = _class_names(summary)
    classes = [_class_diagram(tables, roles.curves, k, name) for k, name in enumerate(channels)]
    single = [] if len(roles.calibrated) <= len(roles.shown) else [_single(tables, p, roles) for p in roles.calibrated]
    found = [[picture for picture in part if picture is not None] for part in (overall, near, classes, single)]
    return Diagrams(*(tuple(part) for part in found))


def stated_confidence(records: Records, summary: Mapping[str, Any], names: Sequence[str]) -> list[Stated]:
    """Ten ranges of confidence, those that no voxel has left out; empty when the bins cannot be folded to ten."""
    n_bins = int(summary["settings"]["metrics"]["ece_bins"])
    tables = [_Tables(records, n_bins, n_bins).top_label(name) for name in names]
    if n_bins % 10 or any(table is None for table in tables):
        return []
    folded = [table.fold(10) for table in tables if table is not None]
    rows = []
    for k in range(10):
        cells = tuple((int(t.counts[k]) / max(t.total, 1), _accuracy(t, k)) for t in folded)
        if any(part for part, _ in cells):
            rows.append(Stated(k / 10, (k + 1) / 10, cells))
    return rows


def band_words(edges: Sequence[float]) -> list[str]:
    """`0 to 3 voxels from the true boundary`."""
    tops = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    return [f"{words} voxels from the true boundary" for words in (*tops, f"{edges[-1]:g} or more")]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Bin tables of a pipeline, pooled over cases and repeats; None where the run did not keep them."""

    records: Records
    ece_bins: int
    ace_bins: int

    def top_label(self, pipeline: str) -> BinTable | None:
        pooled = self._pooled(f"top_label_{self.ece_bins}", pipeline)
        return None if pooled is None else BinTable.from_array(pooled.sum(axis=0))

    def band(self, pipeline: str, band: int) -> BinTable | None:
        pooled = self._pooled(f"top_label_bands_{self.ace_bins}", pipeline)
        return None if pooled is None or band >= pooled.shape[1] else BinTable.from_array(pooled[:, band].sum(axis=0))

    def of_class(self, pipeline: str, index: int) -> BinTable | None:
        """Of class `index`; region models have one channel a region, whose class 1 is the region."""
        pooled = self._pooled(f"classwise_{self.ece_bins}", pipeline)
        if pooled is None:
            return None
        channel, position = (index, 1) if len(pooled) > 1 else (0, index)
        return BinTable.from_array(pooled[channel, position])

    def _pooled(self, name: str, pipeline: str) -> NDArray[np.float64] | None:
        rows = [row for row in self.records.rows if row.pipeline == pipeline]
        return self.records.table(name, pipeline) if rows and all(name in row.tables for row in rows) else None


def _diagram(
    tables: Mapping[str, BinTable], title: str, note: str = "", *, ylabel: str = ACCURACY, xlabel: str = CONFIDENCE
) -> EncodedPicture | None:
    if not tables or not any(table.total for table in tables.values()):
        return None
    named = {plain_text(name): table for name, table in tables.items()}
    title_text, y_text, x_text = (plain_text(text) for text in (title, ylabel, xlabel))
    figure = reliability_figure(named, title=title_text, ylabel=y_text, xlabel=x_text)
    return drawing(figure, alt=reliability_alt_text(tables, title=title), caption=note)


def _band_diagram(tables: _Tables, names: Sequence[str], band: int, words: str) -> EncodedPicture | None:
    chosen = {name: table for name in names if (table := tables.band(name, band)) is not None}
    n_voxels = max((table.total for table in chosen.values()), default=0)
    return _diagram(chosen, words, f"{n_voxels:,} voxels")


def _class_diagram(tables: _Tables, names: Sequence[str], index: int, name: str) -> EncodedPicture | None:
    chosen = {pipeline: table for pipeline in names if (table := tables.of_class(pipeline, index)) is not None}
    n_voxels = max((int(table.hits.sum()) for table in chosen.values()), default=0)
    return _diagram(
        chosen,
        name,
        f"{n_voxels:,} voxels are labelled {name}",
        ylabel=f"share of voxels that are {name}",
        xlabel=f"probability of {name}",
    )


def _single(tables: _Tables, pipeline: Mapping[str, Any], roles: Roles) -> EncodedPicture | None:
    names = [name for name in (base_of(pipeline, roles.main), pipeline["name"]) if name]
    return _diagram({n: t for n in names if (t := tables.top_label(n)) is not None}, pipeline["name"])


def _class_names(summary: Mapping[str, Any]) -> list[str]:
    return list(summary.get("classes") or summary["settings"]["metrics"].get("class_names") or [])


def _accuracy(table: BinTable, k: int) -> float | None:
    return int(table.hits[k]) / int(table.counts[k]) if table.counts[k] >= MIN_VOXELS else None
