"""The reliability diagram: is a voxel called with 80 % confidence right in 80 % of cases?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter
from numpy.typing import NDArray

from segcal.errors import ParameterError
from segcal.metrics.bins import BinTable
from segcal.report.palette import CURVES, FAINT, INK, CurveStyle

ACCURACY = "accuracy: share of voxels that are right"
CONFIDENCE = "confidence: probability of the predicted class"

ROOM = 0.03
"""Below the lowest point, as a share of the axis: half a marker must fit above the frame."""


def reliability_figure(
    tables: Mapping[str, BinTable],
    *,
    title: str = "",
    min_count: int = 50,
    ylabel: str = ACCURACY,
    xlabel: str = CONFIDENCE,
) -> Figure:
    """Accuracy against confidence for several sets of probabilities, with the share of voxels per bin underneath.

    Points below the diagonal are over-confident. Bins of fewer than `min_count` voxels are left out of the curve
    (their accuracy is mostly chance) and stay in the strip.

    Args:
        tables: Name of each curve and its table (bin,), pooled over the cases of interest; at most six.
        ylabel: What a hit is; tables of one class count voxels of that class.
        xlabel: What is binned.
    """
    if not 1 <= len(tables) <= len(CURVES):
        raise ParameterError(f"a reliability diagram shows 1 to {len(CURVES)} curves, got {len(tables)}")
    figure = Figure(figsize=(4.6, 5.4), layout="constrained", facecolor="white")
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (3.4, 1)})
    start = min(_first_edge(table) for table in tables.values())
    upper.plot([start, 1], [start, 1], color=FAINT, linewidth=1.2, zorder=1, label="perfect calibration")
    for (name, table), style in zip(tables.items(), CURVES, strict=False):
        _draw_curve(upper, name, table, style, min_count)
        _draw_shares(lower, table, style)
    _finish(figure, upper, lower, start, title)
    upper.set_ylabel(ylabel)
    lower.set_xlabel(xlabel)
    return figure


def reliability_alt_text(tables: Mapping[str, BinTable], *, title: str = "") -> str:
    """What the diagram shows, in words, for readers who do not see it."""
    sentences = [f"Reliability diagram{f', {title}' if title else ''}: accuracy against confidence."]
    for name, table in tables.items():
        if not table.total:
            sentences.append(f"{name}: no voxels.")
            continue
        excess = float((table.confidence - table.hits).sum()) / table.total
        lean = "higher" if excess > 0 else "lower"
        sentences.append(
            f"{name}: expected calibration error {100 * table.ece():.2f} percent; confidence is on average "
            f"{100 * abs(excess):.2f} percentage points {lean} than accuracy."
        )
    return " ".join(sentences)


def _curve(table: BinTable, min_count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean confidence and accuracy of every bin that holds at least `min_count` voxels."""
    kept = table.counts >= max(min_count, 1)
    confidence, accuracy = table.reliability()
    return confidence[kept], accuracy[kept]


def _first_edge(table: BinTable) -> float:
    """Lower end of the confidence axis: the first bin in use, rounded down to a tenth."""
    used = np.flatnonzero(table.counts)
    return float(np.floor(10 * used[0] / table.n_bins + 1e-9) / 10) if len(used) else 0.0


def _draw_curve(axes: Axes, name: str, table: BinTable, style: CurveStyle, min_count: int) -> None:
    confidence, accuracy = _curve(table, min_count)
    label = f"{name} (ECE {100 * table.ece():.2f} %)" if table.total else f"{name} (no voxels)"
    (line,) = axes.plot(confidence, accuracy, color=style.colour, linestyle=style.line, linewidth=1.5, label=label)
    line.set(marker=style.marker, markersize=4.5, markeredgecolor="white", markeredgewidth=0.5, zorder=3)


def _draw_shares(axes: Axes, table: BinTable, style: CurveStyle) -> None:
    edges = np.linspace(0, 1, table.n_bins + 1)
    shares = np.where(table.counts > 0, table.counts / max(table.total, 1), np.nan)  # a log axis has no zero
    axes.stairs(shares, edges, baseline=None, color=style.colour, linestyle=style.line, linewidth=1.3)


def _finish(figure: Figure, upper: Axes, lower: Axes, start: float, title: str) -> None:
    lowest = min(start, upper.dataLim.ymin)
    upper.set(xlim=(start, 1.0), ylim=(lowest - ROOM * (1.0 - lowest), 1.005))
    lower.set(yscale="log", ylabel="share of voxels")
    lower.yaxis.set_major_locator(LogLocator(numticks=4))
    for axis in (upper.yaxis, lower.xaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.6g}%"))
    for axes in (upper, lower):
        axes.grid(color="#E4E4E4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8.5, colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.label.set(size=9.5, color=INK)
        axes.yaxis.label.set(size=9.5, color=INK)
    upper.legend(loc="upper left", fontsize=8.5, frameon=True, framealpha=0.9, edgecolor="none", handlelength=2.6)
    figure.align_ylabels([upper, lower])
    if title:
        upper.set_title(title, fontsize=10.5, color=INK, loc="left")
