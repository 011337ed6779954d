"""Slices drawn by the server: one picture of one layer, in PNG, the way a radiologist expects it to lie.

What a picture shows depends on the kind of its layer. An image is shown in grey between the two ends of the window.
Class numbers are drawn in colour over the dimmed image, with an outline. Shares (a probability, the uncertainty, the
disagreement) are drawn over the image with a colour scale wherever they reach the threshold.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segcal.errors import ParameterError
from segcal.io.archive import AnyArray
from segcal.report.orientation import SliceView
from segcal.report.palette import CONFIDENCE_MAP, FAINT, class_colours
from segcal.service.errors import UnknownError
from segcal.service.web.layers import LayerCache, Volume
from segcal.service.web.view import AXES, Axis, Layer, View, read_view

PICTURE_PIXELS = 560
"""Longer side of a picture, unless asked otherwise; slices with more voxels are shown voxel by voxel."""

SMALLEST, LARGEST = 32, 2048
DIMMED, FILL = 0.75, 0.4
"""Brightness of the image below class colours, and how much of the colour is mixed in."""
NO_IMAGE = 0.2

CACHE = LayerCache()
"""Shared by all requests of this process."""

Grey = NDArray[np.float32]
Colours = NDArray[np.float32]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SliceStyle:
    """How a slice is drawn.

    Attributes:
        low, high: window of the image, in its own units; None for the ends that the job chose.
        threshold: shares below it leave the image bare.
        opacity: how much of a share's colour is mixed into the image.
        size: longer side of the picture in pixels.
    """

    low: float | None = None
    high: float | None = None
    threshold: float = 0.0
    opacity: float = 0.7
    size: int = PICTURE_PIXELS

    def __post_init__(self) -> None:
        ends = [end for end in (self.low, self.high, self.threshold, self.opacity) if end is not None]
        if not all(map(math.isfinite, ends)):
            raise ParameterError("low, high, threshold and opacity have to be finite numbers")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ParameterError(f"the window has to rise: low {self.low:g} is not below high {self.high:g}")
        if not (0 <= self.threshold <= 1 and 0 <= self.opacity <= 1):
            raise ParameterError(f"threshold and opacity lie in 0 to 1, got {self.threshold:g} and {self.opacity:g}")
        if not SMALLEST <= self.size <= LARGEST:
            raise ParameterError(f"the size of a picture is {SMALLEST} to {LARGEST} pixels, got {self.size}")


PLAIN = SliceStyle()


def draw_slice(
    view_folder: Path, layer: str, axis: Axis, index: int, style: SliceStyle = PLAIN, *, cache: LayerCache = CACHE
) -> bytes:
    """A PNG of slice `index` across `axis`.

    Raises:
        UnknownError: there is no such layer, or no slice of that number.
        ParameterError: the axis is none.
    """
    if axis not in AXES:
        raise ParameterError(f"axis {axis!r}: expected one of {', '.join(AXES)}")
    view = read_view(view_folder)
    chosen = view.layer(layer)
    if not 0 <= index < view.n_slices(axis):
        raise UnknownError(f"no slice {index} across {axis}; there are 0 to {view.n_slices(axis) - 1}")
    painter = _Painter(view, axis, index, style, cache)
    return _png(painter.draw(chosen))


@dataclass(frozen=True, slots=True)
class _Painter:
    """Draws layers of one slice."""

    view: View
    axis: Axis
    index: int
    style: SliceStyle
    cache: LayerCache

    def draw(self, layer: Layer) -> Pixels:
        """Coloured voxel by voxel, then enlarged to the size that was asked for; outlines are as fine as its pixels."""
        volume = self._volume(layer)
        # The orientation of the layer's own file: all files of a view share one grid.
        towards = self.view.orientation(volume.affine, self.axis)
        below = self._background(towards)
        if layer.kind == "image":
            return self._enlarged(_pixels(below), towards)
        shown = self._slice(volume, towards)
        if layer.kind == "share":
            return self._enlarged(_pixels(self._with_shares(below, volume.values(shown), layer)), towards)
        colours = label_colours(self.view)
        filled = self._enlarged(_pixels(_filled(np.float32(DIMMED) * below, shown, colours)), towards)
        return _outlined(filled, self._enlarged(shown, towards), colours)

    def _enlarged(self, values: AnyArray, towards: SliceView) -> AnyArray:
        return _enlarged(values, towards.aspect, self.style.size)

    def _background(self, towards: SliceView) -> Colours:
        """The image in grey; even dark grey when there is none."""
        image = self.view.image
        if image is None:
            volume = self._volume(next(iter(self.view.layers.values())))
            return np.full((*self._slice(volume, towards).shape, 3), NO_IMAGE, dtype=np.float32)
        volume = self._volume(image)
        low = image.low if self.style.low is None else self.style.low
        high = image.high if self.style.high is None else self.style.high
        values = volume.values(self._slice(volume, towards))
        grey = np.clip((values - np.float32(low)) / np.float32(max(high - low, 1e-6)), 0, 1)
        return np.repeat(grey[:, :, None], 3, axis=2)

    def _with_shares(self, below: Colours, shares: Grey, layer: Layer) -> Colours:
        place = np.clip((shares - layer.low) / max(layer.high - layer.low, 1e-6), 0, 1)
        colours = share_colours()[np.rint(255 * place).astype(np.intp)]
        # Half a step of the stored uint8 below, so that a threshold of 0.2 keeps what was stored for 0.2.
        covered = (shares >= self.style.threshold - 0.5 / 255)[:, :, None]
        mixed = below + np.float32(self.style.opacity) * (colours - below)
        return np.where(covered, mixed, below)

    def _volume(self, layer: Layer) -> Volume:
        return self.cache.get(self.view.folder / layer.file)

    def _slice(self, volume: Volume, towards: SliceView) -> AnyArray:
        if volume.stored.shape != self.view.shape:
            raise UnknownError(f"a layer has the shape {volume.stored.shape}, its case {self.view.shape}")
        return towards.picture(volume.stored.take(self.index, axis=AXES.index(self.axis)))


@cache
def share_colours() -> Colours:
    """(256, 3) the colour scale of shares, as in the report: brighter is more."""
    from matplotlib import colormaps

    return np.asarray(colormaps[CONFIDENCE_MAP](np.arange(256))[:, :3], dtype=np.float32)


def label_colours(view: View) -> dict[int, str]:
    """Colour of every value of the label layers; grey where the true label says nothing."""
    found = dict(enumerate(class_colours(len(view.labels) - 1), start=1))
    return found if view.ignored is None else found | {view.ignored: FAINT}


def _filled(below: Colours, labels: AnyArray, colours: Mapping[int, str]) -> Colours:
    """Every class in a light shade of its colour."""
    drawn = below.copy()
    for value, colour in colours.items():
        mask = labels == value
        drawn[mask] += np.float32(FILL) * (_rgb(colour) / np.float32(255) - drawn[mask])
    return drawn


def _outlined(drawn: Pixels, labels: AnyArray, colours: Mapping[int, str]) -> Pixels:
    """Every class in its full colour where another value begins."""
    edge = _outline(labels)
    for value, colour in colours.items():
        drawn[edge & (labels == value)] = _rgb(colour)
    return drawn


def _rgb(colour: str) -> Pixels:
    return np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)], dtype=np.uint8)


def _outline(labels: AnyArray) -> NDArray[np.bool_]:
    """Pixels beside another value; the edge of the picture is none."""
    edge = np.zeros(labels.shape, dtype=np.bool_)
    across, along = labels[1:] != labels[:-1], labels[:, 1:] != labels[:, :-1]
    edge[1:] |= across
    edge[:-1] |= across
    edge[:, 1:] |= along
    edge[:, :-1] |= along
    return edge


def _enlarged(values: AnyArray, aspect: float, size: int) -> AnyArray:
    """Nearest neighbour, true to the millimetre in both directions, the longer side `size` pixels."""
    height, width = values.shape[0] * aspect, float(values.shape[1])
    scale = size / max(height, width)
    rows, columns = (
        np.minimum((np.arange(pixels) + 0.5) * n / pixels, n - 1).astype(np.intp)
        for n, pixels in (
            (values.shape[0], max(1, round(height * scale))),
            (values.shape[1], max(1, round(width * scale))),
        )
    )
    enlarged: AnyArray = values[rows[:, None], columns]
    return enlarged


def _pixels(colours: Colours) -> Pixels:
    return np.rint(255 * colours).astype(np.uint8)


def _png(pixels: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", compress_level=1)
    return buffer.getvalue()
