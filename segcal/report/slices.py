"""One slice of a case: image, label, segmentation, confidence before and after, and what else is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from segcal.evaluation.picture_maps import PictureMaps, informative_slice
from segcal.report.orientation import slice_view
from segcal.report.palette import BENEFICIAL, HARMFUL, INK, class_colours
from segcal.report.slice_panels import ERROR_OUTLINE, case_panels
from segcal.types import Grid


def slice_figure(
    maps: PictureMaps,
    *,
    class_names: Sequence[str],
    title: str = "",
    after_name: str = "after",
    grid: Grid | None = None,
    index: int | None = None,
) -> Figure:
    """Panels of one slice, the most informative one unless `index` says which.

    Voxels where the segmentation is wrong are outlined in the confidence maps: where a calibrator works, they are dark.
    """
    chosen = informative_slice(maps) if index is None else index
    view, colours = slice_view(grid), class_colours(len(class_names) - 1)
    panels = case_panels(maps, chosen, view, colours, after_name)
    n_columns = -(-len(panels) // 2)
    rows, columns = view.picture(maps.segmentation[chosen]).shape
    ratio = float(np.clip(rows * view.aspect / columns, 0.4, 2.0))
    size = (2.4 * n_columns, 2 * (2.4 * ratio + 0.5) + 0.7)
    figure = Figure(figsize=size, layout="compressed", facecolor="white")
    cells = list(figure.subplots(2, n_columns, squeeze=False).ravel())
    for axes in cells:
        axes.set_axis_off()
    for panel, axes in zip(panels, cells, strict=False):
        axes.set_title(panel.heading, fontsize=9.5, color=INK, loc="left", pad=4)
        panel.draw(axes)
    _add_legend(figure, cells[len(panels) :], _legend_handles(maps, class_names, colours))
    if title:
        where = f"{view.plane} slice {chosen + 1} of {len(maps.segmentation)}".strip()
        figure.suptitle(f"{title}, {where}", fontsize=11, color=INK, x=0.008, ha="left")
    return figure


def slice_alt_text(
    maps: PictureMaps,
    *,
    class_names: Sequence[str],
    title: str = "",
    index: int | None = None,
    position: tuple[int, int] | None = None,
) -> str:
    """What the panels show, in words: classes in the slice, errors, and how sure the map is of them.

    Args:
        position: (index, number of slices) to name instead, when `maps` were cut out of a larger volume.
    """
    chosen = informative_slice(maps) if index is None else index
    shown = (maps.segmentation if maps.label is None else maps.label)[chosen]
    present = ", ".join(name for value, name in enumerate(class_names) if value and (shown == value).any()) or "none"
    at, n_slices = position or (chosen, len(maps.segmentation))
    words = [f"{title or 'Case'}, slice {at + 1} of {n_slices}. Foreground classes: {present}."]
    if maps.errors is not None and maps.errors[chosen].any():
        wrong = maps.errors[chosen]
        before, after = (float(m[chosen][wrong].mean()) for m in (maps.confidence_before, maps.confidence_after))
        words.append(
            f"{100 * wrong.mean():.1f} percent of its voxels are wrong; their mean confidence is "
            f"{100 * before:.0f} percent before and {100 * after:.0f} percent after calibration."
        )
    if maps.flips is not None:
        words.append(f"Calibration moves the decision of {int(maps.flips[chosen].sum())} voxels of this slice.")
    return " ".join(words)


def _legend_handles(maps: PictureMaps, class_names: Sequence[str], colours: Sequence[str]) -> list[Artist]:
    handles: list[Artist] = [
        Patch(facecolor=to_rgba(colour, 0.45), edgecolor=colour, label=name)
        for colour, name in zip(colours, class_names[1:], strict=True)
    ]
    if maps.errors is not None:
        handles.append(Line2D([], [], color=ERROR_OUTLINE, linewidth=1.2, label="outline: segmentation is wrong"))
    if maps.flips is not None and maps.flips.any() and maps.label is not None:
        handles.append(Patch(color=HARMFUL, label="flip of a right voxel"))
        handles.append(Patch(color=BENEFICIAL, label="flip of a wrong voxel"))
    return handles


def _add_legend(figure: Figure, spare: Sequence[Axes], handles: Sequence[Artist]) -> None:
    """Into the empty cell of the grid when there is one, below the panels otherwise."""
    style = {"fontsize": 8.5, "frameon": False, "labelcolor": INK, "borderaxespad": 0.2}
    if spare:
        spare[0].legend(handles=handles, loc="upper left", **style)
    else:
        figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 4), **style)
