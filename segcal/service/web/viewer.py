"""What the viewer of a case shows, from its address: layer, plane, slice, window, threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from segcal.report.orientation import SliceView
from segcal.service.web.layers import LayerCache
from segcal.service.web.render import address
from segcal.service.web.slices import CACHE, SliceStyle, label_colours, share_colours
from segcal.service.web.view import AXES, Axis, Layer, View, read_view

THUMBNAIL_PIXELS = 160

USUAL = SliceStyle(threshold=0.05)
"""Where a share is next to nothing, the image below is worth more than the darkest colour of the scale."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A direction to cut slices in.

    Attributes:
        axis: in addresses.
        name: `axial`, or the array axis when the geometry is unknown.
        n_slices, first: how many there are, and the one to begin with.
        edges: which side of the body is at the left and at the upper edge, in words; empty when unknown.
    """

    axis: Axis
    name: str
    n_slices: int
    first: int
    edges: str


@dataclass(frozen=True, slots=True)
class Shown:
    """The state of the viewer: what the page was asked for, where possible, and what it takes instead."""

    layer: Layer
    axis: Axis
    index: int
    style: SliceStyle


@dataclass(frozen=True, slots=True)
class Viewer:
    """The viewer of a case, ready for the template."""

    key: int
    view: View
    planes: tuple[Plane, ...]
    shown: Shown

    @property
    def plane(self) -> Plane:
        """The one that is shown."""
        return next(plane for plane in self.planes if plane.axis == self.shown.axis)

    @property
    def colours(self) -> list[tuple[int, str, str, str]]:
        """Value, colour and name of every foreground class; what only a true label has names its layer."""
        names = dict(enumerate(self.view.labels))
        return [
            (value, colour, names.get(value, "left out"), "" if value in names else "label")
            for value, colour in label_colours(self.view).items()
        ]

    def picture(self, layer: str | None = None, *, index: int | None = None, size: int | None = None) -> str:
        """Address of a slice as the viewer is set, or with another layer, slice or size."""
        shown, style = self.shown, self.shown.style
        at = shown.index if index is None else index
        path = f"/v1/cases/{self.key}/slices/{layer or shown.layer.name}/{shown.axis}/{at}.png"
        return address(path, {**_values(style), "size": size})

    def link(self, **changes: object) -> str:
        """Address of this page with some settings changed."""
        shown = self.shown
        values = {"layer": shown.layer.name, "axis": shown.axis, "index": shown.index, **_values(shown.style)}
        return address(f"/cases/{self.key}", values | changes)


def make_viewer(
    key: int,
    folder: Path,
    *,
    layer: str | None = None,
    axis: Axis = "z",
    index: int | None = None,
    style: SliceStyle = USUAL,
    cache: LayerCache = CACHE,
) -> Viewer:
    """The viewer of the layers in `folder`.

    A slice that does not exist along the axis gives way to the first one worth a look, so that changing the axis works
    without a script.

    Raises:
        UnknownError: the layers are not there, or none of that name.
    """
    view = read_view(folder)
    chosen = view.layer(layer) if layer else view.layers.get("segmentation") or next(iter(view.layers.values()))
    at = index if index is not None and 0 <= index < view.n_slices(axis) else view.first_slice(axis)
    affine = cache.get(folder / chosen.file).affine
    planes = tuple(_plane(view, each, view.orientation(affine, each)) for each in AXES)
    return Viewer(key, view, planes, Shown(chosen, axis, at, style))


@cache
def share_scale(n_stops: int = 9) -> tuple[tuple[str, str], ...]:
    """Offset and colour of the stops of the legend's gradient."""
    colours = share_colours()
    at = [round(255 * k / (n_stops - 1)) for k in range(n_stops)]
    return tuple(
        (f"{k / (n_stops - 1):.3f}", "#" + "".join(f"{round(255 * float(part)):02x}" for part in colours[place]))
        for k, place in enumerate(at)
    )


def _values(style: SliceStyle) -> Mapping[str, object]:
    """For addresses; the usual opacity, and the ends of the window that the job chose, go without saying."""
    return {
        "low": None if style.low is None else f"{style.low:g}",
        "high": None if style.high is None else f"{style.high:g}",
        "threshold": f"{style.threshold:g}",
        "opacity": None if style.opacity == USUAL.opacity else f"{style.opacity:g}",
    }


_SIDES = {"R": "right", "L": "left", "A": "front", "P": "back", "S": "head", "I": "feet"}


def _plane(view: View, axis: Axis, towards: SliceView) -> Plane:
    name = towards.plane or f"array axis {axis}"
    edges = ""
    if towards.plane:
        side = "" if towards.left in "AP" else " side"
        edges = f"{_SIDES[towards.left]}{side} of the patient at the left edge, {_SIDES[towards.top]} at the top"
    return Plane(axis, name, view.n_slices(axis), view.first_slice(axis), edges)
