"""Reliability diagrams of rows, and the same in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from segcal.counted import count
from segcal.metrics.bins import BinTable
from segcal.report.encoding import EncodedPicture, drawing, plain_text
from segcal.report.reliability import CONFIDENCE, reliability_alt_text, reliability_figure
from segcal.report.roles import Roles

if TYPE_CHECKING:
    from segcal.classification.page import RowResults

MIN_ROWS = 10
"""Bins of fewer rows are left out of curves and get no accuracy in the table: it would be mostly chance."""
MOST_CLASSES = 6
LARGE, SMALL = (4.6, 6.0), (4.0, 5.4)


def overall_diagram(results: RowResults, roles: Roles) -> EncodedPicture | None:
    """Confidence against accuracy for the uncalibrated scores and the pipelines that are judged."""
    return _diagram(
        _top_label(results, roles.curves), "all rows", LARGE, "accuracy: share of rows that are right", CONFIDENCE
    )


def single_diagrams(results: RowResults, roles: Roles) -> list[EncodedPicture]:
    """Every calibrated pipeline by itself, when there are more than the judged ones."""
    if len(roles.calibrated) <= len(roles.shown):
        return []
    base = results.summary["pipelines"][0]["name"]
    found = [
        _diagram(_top_label(results, [base, p["name"]]), p["name"], SMALL, "accuracy", "confidence")
        for p in roles.calibrated
    ]
    return [picture for picture in found if picture is not None]


def class_diagrams(results: RowResults, roles: Roles) -> list[EncodedPicture]:
    """A diagram for each class, or for the MOST_CLASSES with the largest error before calibration."""
    before = results.summary["pipelines"][0]["classes"]
    labelled = [c for c, one in enumerate(before) if one["n_labelled"]]
    worst = sorted(labelled, key=lambda c: (-before[c]["ece"], c))[:MOST_CLASSES]
    place = _places(results)
    found = []
    for c in sorted(worst) if len(before) <= MOST_CLASSES else worst:
        name = before[c]["name"]
        tables = {p: BinTable.from_array(results.classwise[place[p], c]) for p in roles.curves}
        note = f"{count(before[c]['n_labelled'], 'row is', 'rows are')} labelled {name}"
        ylabel, xlabel = f"share of rows that are {name}", f"probability of {name}"
        found.append(_diagram(tables, f"class {name}", SMALL, ylabel, xlabel, note))
    return [picture for picture in found if picture is not None]


def stated_rows(results: RowResults, names: Sequence[str]) -> list[dict[str, Any]]:
    """The bins as a table: for each pipeline the share of rows in a bin and how many of them are right."""
    tables = list(_top_label(results, names).values())
    n_bins = tables[0].n_bins
    rows = []
    for k in range(n_bins):
        cells = [(int(t.counts[k]) / max(t.total, 1), _accuracy(t, k)) for t in tables]
        if any(part for part, _ in cells):
            rows.append({"low": k / n_bins, "high": (k + 1) / n_bins, "cells": cells})
    return rows


def _top_label(results: RowResults, names: Sequence[str]) -> dict[str, BinTable]:
    place = _places(results)
    return {name: BinTable.from_array(results.top_label[place[name]]) for name in names}


def _places(results: RowResults) -> dict[str, int]:
    return {p["name"]: k for k, p in enumerate(results.summary["pipelines"])}


def _diagram(
    tables: Mapping[str, BinTable], title: str, size: tuple[float, float], ylabel: str, xlabel: str, note: str = ""
) -> EncodedPicture | None:
    if not any(table.total for table in tables.values()):
        return None
    named = {plain_text(name): table for name, table in tables.items()}
    figure = reliability_figure(
        named, title=plain_text(title), min_count=MIN_ROWS, ylabel=plain_text(ylabel), xlabel=plain_text(xlabel)
    )
    figure.set_size_inches(*size)
    upper, lower = figure.axes
    lower.set_ylabel("share of rows" if size == LARGE else "rows")
    inside = upper.get_legend()
    if inside is not None:
        inside.remove()
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize=8.5, frameon=False, handlelength=3.4)
    return drawing(figure, alt=reliability_alt_text(tables, title=title), caption=note)


def _accuracy(table: BinTable, k: int) -> float | None:
    return float(np.divide(table.hits[k], table.counts[k])) if table.counts[k] >= MIN_ROWS else None
