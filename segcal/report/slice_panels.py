"""The single panels of a slice picture: image, class overlay, confidence, flips, free energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba
from numpy.typing import NDArray

from segcal.evaluation.picture_maps import PictureMaps, Volume
from segcal.report.orientation import SliceView
from segcal.report.palette import BENEFICIAL, CONFIDENCE_MAP, FREE_ENERGY_MAP, HARMFUL, INK, OKABE_ITO

LOWEST_CONFIDENCE = 0.5
"""Lower end of the confidence scale; whatever lies below shares its colour, and the colour bar says so."""

ERROR_OUTLINE = OKABE_ITO["vermillion"]


@dataclass(frozen=True, slots=True)
class Panel:
    """A heading and the function that draws below it."""

    heading: str
    draw: Callable[[Axes], None]


def case_panels(maps: PictureMaps, index: int, view: SliceView, colours: Sequence[str], after_name: str) -> list[Panel]:
    """The panels that the data of a case allow, in reading order."""
    painter = _Painter(maps, index, view, colours)
    panels = [Panel("image", painter.image)] if maps.image is not None else []
    if maps.label is not None:
        panels.append(Panel("label", lambda axes: painter.classes(axes, maps.label)))
    panels.append(Panel("segmentation", lambda axes: painter.classes(axes, maps.segmentation)))
    if maps.flips is not None:
        n = int(maps.flips[index].sum())
        panels.append(Panel(f"decisions moved: {n or 'none'}", painter.flips))
    panels.append(Panel("confidence before", lambda axes: painter.confidence(axes, maps.confidence_before)))
    panels.append(Panel(f"confidence {after_name}", lambda axes: painter.confidence(axes, maps.confidence_after)))
    if maps.free_energy is not None:
        panels.append(Panel("free energy", painter.free_energy))
    return panels


@dataclass(frozen=True, slots=True)
class _Painter:
    """Draws slice `index` of a case's volumes."""

    maps: PictureMaps
    index: int
    view: SliceView
    colours: Sequence[str]

    def image(self, axes: Axes) -> None:
        self._background(axes, strength=1.0)
        style: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 8, "color": "white"}
        axes.text(0.02, 0.5, self.view.left, va="center", **style)
        axes.text(0.5, 0.985, self.view.top, ha="center", va="top", **style)

    def classes(self, axes: Axes, volume: Volume | None) -> None:
        assert volume is not None
        self._background(axes, strength=0.75)
        values = self._picture(volume)
        fill = ListedColormap([(0, 0, 0, 0), *(to_rgba(colour, 0.4) for colour in self.colours)])
        clipped = np.clip(values, 0, len(self.colours))
        self._show(axes, clipped, cmap=fill, norm=Normalize(0, len(self.colours)))
        for value, colour in enumerate(self.colours, start=1):
            _outline(axes, values == value, colour)

    def confidence(self, axes: Axes, volume: Volume) -> None:
        norm = Normalize(LOWEST_CONFIDENCE, 1.0)
        self._show(axes, self._picture(volume), cmap=CONFIDENCE_MAP, norm=norm)
        if self.maps.errors is not None:
            _outline(axes, self._picture(self.maps.errors), ERROR_OUTLINE)
        ticks = {0.5: "≤ 50 %", 0.75: "75 %", 1.0: "100 %"}
        _colour_bar(axes, ScalarMappable(norm, CONFIDENCE_MAP), ticks)

    def flips(self, axes: Axes) -> None:
        self._background(axes, strength=0.45)
        assert self.maps.flips is not None
        moved = self._picture(self.maps.flips).astype(np.int64)
        errors = self.maps.errors
        if errors is not None:
            moved = moved * np.where(self._picture(errors), 2, 1)
        shades = ListedColormap([(0, 0, 0, 0), to_rgba(HARMFUL), to_rgba(BENEFICIAL)])
        self._show(axes, moved, cmap=shades, norm=Normalize(0, 2))

    def free_energy(self, axes: Axes) -> None:
        assert self.maps.free_energy is not None
        values = self._picture(self.maps.free_energy)
        low, high = (float(np.percentile(values, q)) for q in (1, 99))
        high = max(high, low + 1e-6)
        norm = Normalize(low, high)
        self._show(axes, values, cmap=FREE_ENERGY_MAP, norm=norm)
        ticks = {at: f"{at:.3g}" for at in (low, (low + high) / 2, high)}
        _colour_bar(axes, ScalarMappable(norm, FREE_ENERGY_MAP), ticks)

    def _picture(self, volume: Volume) -> NDArray[Any]:
        return self.view.picture(volume[self.index])

    def _show(self, axes: Axes, values: NDArray[Any], **style: Any) -> None:
        axes.imshow(values, aspect=self.view.aspect, interpolation="nearest", **style)

    def _background(self, axes: Axes, *, strength: float) -> None:
        """The image in grey, dimmed when something is drawn on top; plain dark grey without an image."""
        image = self.maps.image
        if image is None:
            values: NDArray[Any] = np.full(self._picture(self.maps.segmentation).shape, 0.2)
        elif image.ndim == 4 and image.shape[:2] == (3, 1):
            values = self.view.picture(np.moveaxis(image[:, 0], 0, -1))
        else:
            values = self._picture(image if image.ndim == 3 else image[0])
        low, high = (float(np.percentile(values, q)) for q in (0.5, 99.5))
        grey = strength * np.clip((values - low) / max(high - low, 1e-6), 0, 1)
        self._show(axes, grey, cmap="gray", norm=Normalize(0, 1))


def _outline(axes: Axes, mask: NDArray[Any], colour: str) -> None:
    """The border of a mask along pixel edges; nothing when the mask is empty or full."""
    if mask.any() and not mask.all():
        # Each pixel becomes 4 x 4 equal samples, so that the contour keeps to the pixel's edge instead of cutting it.
        fine = np.kron(np.pad(mask, 1, mode="edge"), np.ones((4, 4)))
        rows, columns = ((np.arange(n) + 0.5) / 4 - 1.5 for n in fine.shape)
        axes.contour(columns, rows, fine, levels=[0.5], colors=[colour], linewidths=1.0)
        axes.set(xlim=(-0.5, mask.shape[1] - 0.5), ylim=(mask.shape[0] - 0.5, -0.5))


def _colour_bar(axes: Axes, mappable: ScalarMappable, ticks: dict[float, str]) -> None:
    bar = axes.inset_axes((0.0, -0.075, 1.0, 0.035))
    figure = axes.get_figure()
    assert figure is not None
    colour_bar = figure.colorbar(mappable, cax=bar, orientation="horizontal", ticks=list(ticks))
    bar.set_xticklabels(list(ticks.values()))
    bar.tick_params(labelsize=8, colors=INK, length=2, pad=1.5)
    labels = bar.get_xticklabels()
    labels[0].set_horizontalalignment("left")
    labels[-1].set_horizontalalignment("right")
    colour_bar.outline.set_visible(False)
