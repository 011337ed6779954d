"""The reliability diagrams of a report, and the same in a table: what a stated confidence is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from segcal.evaluation.records import Records
from segcal.metrics.bins import BinTable
from segcal.report.encoding import EncodedPicture, drawing, plain_text
from segcal.report.pooled import PooledTables, band_words, class_labels
from segcal.report.reliability import ACCURACY, CONFIDENCE, reliability_alt_text, reliability_figure
from segcal.report.roles import Roles, base_of

MIN_VOXELS = 50
"""Confidence ranges with fewer voxels get no accuracy: it would be mostly chance."""


LARGE, SMALL, NARROW = (4.6, 6.0), (4.0, 5.4), (3.5, 5.0)
"""Sizes in inches; text keeps its size in points, so it is relatively larger in pictures that are shown smaller."""


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
    tables = PooledTables.of(records, summary)
    top_label = {name: table for name in roles.curves if (table := tables.top_label(name)) is not None}
    overall = [_diagram(top_label, "all voxels", size=LARGE)]
    near = [_band_diagram(tables, roles.curves, k, words) for k, words in enumerate(band_words(metrics["band_edges"]))]
    channels = class_labels(summary)
    classes = [_class_diagram(tables, roles.curves, k, name) for k, name in enumerate(channels)]
    single = [] if len(roles.calibrated) <= len(roles.shown) else [_single(tables, p, roles) for p in roles.calibrated]
    found = [[picture for picture in part if picture is not None] for part in (overall, near, classes, single)]
    return Diagrams(*(tuple(part) for part in found))


def stated_confidence(records: Records, summary: Mapping[str, Any], names: Sequence[str]) -> list[Stated]:
    """Ten ranges of confidence, those that no voxel has left out; empty when the bins cannot be folded to ten."""
    n_bins = int(summary["settings"]["metrics"]["ece_bins"])
    tables = [PooledTables.of(records, summary).top_label(name) for name in names]
    if n_bins % 10 or any(table is None for table in tables):
        return []
    folded = [table.fold(10) for table in tables if table is not None]
    rows = []
    for k in range(10):
        cells = tuple((int(t.counts[k]) / max(t.total, 1), _accuracy(t, k)) for t in folded)
        if any(part for part, _ in cells):
            rows.append(Stated(k / 10, (k + 1) / 10, cells))
    return rows


def _diagram(
    tables: Mapping[str, BinTable],
    title: str,
    note: str = "",
    *,
    size: tuple[float, float] = SMALL,
    ylabel: str = ACCURACY,
    xlabel: str = CONFIDENCE,
) -> EncodedPicture | None:
    if not tables or not any(table.total for table in tables.values()):
        return None
    named = {plain_text(name): table for name, table in tables.items()}
    title_text, y_text, x_text = (plain_text(text) for text in (title, ylabel, xlabel))
    figure = reliability_figure(named, title=title_text, ylabel=y_text, xlabel=x_text)
    figure.set_size_inches(*size)
    if size != LARGE:
        figure.axes[1].set_ylabel("voxels")
    _legend_below(figure)
    return drawing(figure, alt=reliability_alt_text(tables, title=title), caption=note)


def _legend_below(figure: Figure) -> None:
    """Out of the way of the curves, which may lie anywhere."""
    axes = figure.axes[0]
    inside = axes.get_legend()
    if inside is not None:
        inside.remove()
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize=8.5, frameon=False, handlelength=3.4)


def _band_diagram(tables: PooledTables, names: Sequence[str], band: int, words: str) -> EncodedPicture | None:
    chosen = {name: table for name in names if (table := tables.band(name, band)) is not None}
    n_voxels = max((table.total for table in chosen.values()), default=0)
    title, note = f"{words} voxels away", f"{n_voxels:,} voxels"
    return _diagram(chosen, title, note, size=NARROW, ylabel="accuracy", xlabel="confidence")


def _class_diagram(tables: PooledTables, names: Sequence[str], index: int, name: str) -> EncodedPicture | None:
    chosen = {pipeline: table for pipeline in names if (table := tables.of_class(pipeline, index)) is not None}
    n_voxels = max((int(table.hits.sum()) for table in chosen.values()), default=0)
    return _diagram(
        chosen,
        name,
        f"{n_voxels:,} voxels are labelled {name}",
        ylabel=f"share of voxels that are {name}",
        xlabel=f"probability of {name}",
    )


def _single(tables: PooledTables, pipeline: Mapping[str, Any], roles: Roles) -> EncodedPicture | None:
    names = [name for name in (base_of(pipeline, roles.main), pipeline["name"]) if name]
    return _diagram({n: t for n in names if (t := tables.top_label(n)) is not None}, pipeline["name"])


def _accuracy(table: BinTable, k: int) -> float | None:
    return int(table.hits[k]) / int(table.counts[k]) if table.counts[k] >= MIN_VOXELS else None
