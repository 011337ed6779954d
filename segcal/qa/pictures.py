"""One slice of a case that needs a look: image when known, segmentation, confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from segcal.errors import SegcalError
from segcal.evaluation.picture_maps import PictureMaps, Volume, informative_slice
from segcal.io.images import read_image
from segcal.qa.case import QaMaps
from segcal.report.encoding import EncodedPicture, photograph, plain_text
from segcal.report.orientation import slice_view
from segcal.report.palette import INK, class_colours
from segcal.report.slice_panels import Panel, case_panels
from segcal.types import Grid


@dataclass(frozen=True, slots=True, eq=False)
class QaSlice:
    """The most informative slice of a case; small enough to keep until it is known which cases are the worst."""

    maps: PictureMaps
    index: int
    n_slices: int
    grid: Grid | None


def cut_slice(maps: QaMaps) -> QaSlice:
    """Cut the slice with the most classes and the most doubt; an image that does not fit is left out."""
    confidence = maps.confidence.to("cpu").numpy()
    whole = PictureMaps(maps.segmentation, confidence, confidence, image=_image(maps))
    index = informative_slice(whole)
    cut = slice(index, index + 1)
    # Copies: a view would keep the whole volume alive.
    shown = confidence[cut].copy()
    image = None if whole.image is None else whole.image[..., cut, :, :].copy()
    return QaSlice(PictureMaps(maps.segmentation[cut].copy(), shown, shown, image), index, len(confidence), maps.grid)


def draw_slice(part: QaSlice, names: Sequence[str], *, case_id: str) -> EncodedPicture:
    """Render a slice with its panels side by side."""
    view, colours = slice_view(part.grid), class_colours(len(names))
    panels = [
        _renamed(panel) for panel in case_panels(part.maps, 0, view, colours, "") if "before" not in panel.heading
    ]
    rows, columns = view.picture(part.maps.segmentation[0]).shape
    ratio = float(np.clip(rows * view.aspect / columns, 0.4, 2.0))
    figure = Figure(figsize=(2.7 * len(panels), 2.7 * ratio + 1.3), layout="compressed", facecolor="white")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        axes.set_axis_off()
        axes.set_title(panel.heading, fontsize=9.5, color=INK, loc="left", pad=4)
        panel.draw(axes)
    handles = [
        Patch(facecolor=to_rgba(colour, 0.45), edgecolor=colour, label=plain_text(name))
        for colour, name in zip(colours, names, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=8.5, frameon=False, labelcolor=INK)
    where = f"{view.plane} slice {part.index + 1} of {part.n_slices}".strip()
    alt = _words(part, names, case_id, where)
    return photograph(figure, alt=alt, caption=where, dpi=110)


def _renamed(panel: Panel) -> Panel:
    return replace(panel, heading=panel.heading.strip())


def _image(maps: QaMaps) -> Volume | None:
    if maps.image is None:
        return None
    try:
        values = read_image(maps.image).values
    except SegcalError:
        return None  # a picture is no reason to give a case up
    return values if values.shape[-3:] == maps.segmentation.shape else None


def _words(part: QaSlice, names: Sequence[str], case_id: str, where: str) -> str:
    shown = part.maps.segmentation[0]
    present = ", ".join(name for value, name in enumerate(names, start=1) if (shown == value).any()) or "none"
    doubtful = 100 * float((part.maps.confidence_after[0] < 0.75).mean())
    return (
        f"{case_id}, {where}. Segmented classes: {present}. "
        f"Confidence is below 75 percent at {doubtful:.1f} percent of the voxels."
    )
