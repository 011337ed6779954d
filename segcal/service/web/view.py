"""What there is to look at in one case: the layers that its job wrote, and which way up their slices are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.errors import FileFormatError
from segcal.report.orientation import SliceView, slice_view
from segcal.service.errors import UnknownError
from segcal.types import Grid

VIEW_FILE = "view.json"

Axis: TypeAlias = Literal["z", "y", "x"]
"""Which array axis a slice is cut across; arrays are (z, y, x)."""

AXES: tuple[Axis, ...] = ("z", "y", "x")

LayerKind: TypeAlias = Literal["image", "labels", "share"]
"""Grey values to be windowed; class numbers; shares between 0 and 1."""

_ORDER = {"z": (0, 1, 2), "y": (0, 2, 1), "x": (1, 2, 0)}
"""For every axis: which columns of the affine (x, y, z) run along a slice's columns, along its rows, and across it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One volume that can be shown.

    Attributes:
        name: in URLs, e.g. `p1`.
        title: for people.
        file: in the view's folder.
        kind: how it is drawn.
        low, high: values at the two ends of its scale.
    """

    name: str
    title: str
    file: str
    kind: LayerKind
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class View:
    """The layers of a case.

    Attributes:
        folder: holds the files.
        shape: (z, y, x).
        labels: names of the values of the label layers; 0 is the background.
        ignored: value of the true label where it says nothing; None when there is no such value.
        has_geometry: whether it is known how the arrays lie in the body.
        notes: what could not be shown, and why.
        layers: by name, in the order to offer them.
        middle: the slice to look at first along each axis, by array order.
    """

    folder: Path
    shape: tuple[int, int, int]
    labels: tuple[str, ...]
    layers: Mapping[str, Layer]
    middle: tuple[int, int, int]
    ignored: int | None = None
    has_geometry: bool = True
    notes: tuple[str, ...] = ()

    def layer(self, name: str) -> Layer:
        """The layer called `name`.

        Raises:
            UnknownError: the case has none of that name.
        """
        try:
            return self.layers[name]
        except KeyError:
            raise UnknownError(f"no layer {name!r} of this case; there are {', '.join(self.layers)}") from None

    def n_slices(self, axis: Axis) -> int:
        return self.shape[AXES.index(axis)]

    def first_slice(self, axis: Axis) -> int:
        """Where to begin: the most uncertain slice."""
        return self.middle[AXES.index(axis)]

    def orientation(self, affine: NDArray[np.float64], axis: Axis) -> SliceView:
        """Which way up slices across `axis` are shown, with the affine of a layer's file."""
        return slice_orientation(affine if self.has_geometry else None, axis)

    @property
    def image(self) -> Layer | None:
        """What lies below the other layers; None when the job had no image."""
        return next((layer for layer in self.layers.values() if layer.kind == "image"), None)


def read_view(folder: Path) -> View:
    """The layers below a view folder.

    Raises:
        UnknownError: there is no such folder any more.
        FileFormatError: its description is damaged.
    """
    try:
        values = json.loads((folder / VIEW_FILE).read_text(encoding="utf-8"))
    except OSError:
        raise UnknownError("the layers of this case are not there; its job may have been cleaned up") from None
    except ValueError as error:
        raise FileFormatError(f"{VIEW_FILE}: not JSON ({error})") from None
    try:
        return _view(folder, values)
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{VIEW_FILE}: not what a job writes ({error!r})") from None


def slice_orientation(affine: NDArray[np.float64] | None, axis: Axis) -> SliceView:
    """The radiological view of slices across `axis`; as the array lies when the geometry is unknown.

    A slice across z has rows y and columns x, one across y has rows z and columns x, one across x rows z and columns y.
    """
    if affine is None:
        return SliceView()
    turned = affine.copy()
    turned[:, :3] = affine[:, list(_ORDER[axis])]
    return slice_view(Grid((1, 1, 1), turned))


def _view(folder: Path, values: Mapping[str, Any]) -> View:
    layers = [
        Layer(each["name"], each["title"], each["file"], each["kind"], float(each["low"]), float(each["high"]))
        for each in values["layers"]
    ]
    shape, middle = ((int(z), int(y), int(x)) for z, y, x in (values["shape"], values["middle"]))
    return View(
        folder,
        shape,
        tuple(values["labels"]),
        {layer.name: layer for layer in layers},
        middle,
        values.get("ignored"),
        bool(values.get("geometry", True)),
        tuple(values.get("notes", ())),
    )
