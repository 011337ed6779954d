"""The layers of one case for the viewer: small NIfTI files, and view.json that lists them.

image.nii.gz          int16, if the case has an image on the prediction's grid
segmentation.nii.gz   0, or 1 + the index of the foreground class or region
p<k>.nii.gz           calibrated probability of class or region k, in steps of 1/255
entropy.nii.gz        entropy over its largest possible value, in steps of 1/255
disagreement.nii.gz   chance that two members decide differently, if there are members
label.nii.gz          in the values of the segmentation, one more where the label says "ignore"
view.json             written last, so that a folder with one is whole
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.applying.maps import entropy_map, paint_regions
from segcal.cases import CaseData
from segcal.errors import GeometryError, SegcalError
from segcal.io.atomic import write_text_atomic
from segcal.io.images import read_image
from segcal.qa.case import QaMaps
from segcal.service.work.quantised import Stored, stored_image, stored_share, window
from segcal.types import IGNORED, Grid

VIEW_FILE, FORMAT = "view.json", "segcal-view-1"

LayerKind: TypeAlias = Literal["image", "labels", "share"]
"""Intensities with a window, label values, or numbers from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One file to look at; `low` and `high` are the window it is shown with first."""

    name: str
    title: str
    file: str
    kind: LayerKind
    low: float
    high: float


@dataclass
class CaseLayers:
    """Writes the layers of one case; make it while the maps are in memory, then call `finish`.

    Attributes:
        folder: where the files go.
        maps: of the case.
        names: of all channels: classes with the background first, or regions.
        layers: written so far.
        notes: what could not be shown, and why.
    """

    folder: Path
    maps: QaMaps
    names: Sequence[str]
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int, int]:
        _, z, y, x = self.maps.probs.shape
        return z, y, x

    @property
    def grid(self) -> Grid:
        return self.maps.grid or Grid(self.shape)

    @property
    def label_names(self) -> list[str]:
        """By value in segmentation.nii.gz."""
        return ["background", *self.names] if self.maps.regions else list(self.names)

    def add_image(self) -> None:
        """The image, if there is one; one that cannot be shown is no reason to give the case up."""
        if self.maps.image is None:
            return
        try:
            picture = read_image(self.maps.image)
            values = picture.values
            if values.shape[1:] != self.shape:
                raise GeometryError(f"{self.maps.image.name}: its grid {values.shape[1:]} is not that of the maps")
        except SegcalError as error:
            self.notes.append(f"the image cannot be shown: {error}")
            return
        if not self.grid.agrees_with(picture.grid):
            self.notes.append(
                f"{self.maps.image.name}: its header puts it elsewhere in space than the prediction; it is shown voxel "
                "by voxel, as the network saw it"
            )
        # Several channels of a volume are sequences, of which one is shown; those of a flat picture are colours.
        shown = values.mean(0) if len(values) == 3 and self.shape[0] == 1 else values[0]
        stored = stored_image(shown)
        self._add("image", "image", "image", stored, window(shown))

    def add_maps(self) -> None:
        """Segmentation, probabilities, uncertainty and, with members, their disagreement."""
        maps, (z, y, x) = self.maps, self.shape
        n_labels = len(self.label_names)
        self._add("segmentation", "segmentation", "labels", Stored(_narrow(maps.segmentation, n_labels)))
        for index, name in enumerate(self.names):
            channel = maps.probs[index]
            self._add(f"p{index}", f"probability of {name}", "share", stored_share((z, y, x), channel.__getitem__))
        largest = len(self.names) * math.log(2) if maps.regions else math.log(len(self.names))

        def doubt(planes: slice) -> Tensor:
            entropy = entropy_map(maps.probs[:, planes], regions=maps.regions)
            return torch.as_tensor(entropy, device=maps.probs.device) / largest

        self._add("entropy", "uncertainty", "share", stored_share((z, y, x), doubt, len(self.names)))
        tally = maps.tally
        if tally is not None and tally.n_members > 1:
            differing = stored_share((z, y, x), tally.disagreement_map, 2 * len(self.names))
            self._add("disagreement", "disagreement of the members", "share", differing)

    def add_label(self, data: CaseData) -> None:
        """The true label of a case with labels."""
        n_labels = len(self.label_names)
        if data.region_labels is not None:
            values = paint_regions(data.region_labels, tuple(range(1, n_labels)))
        else:
            assert data.labels is not None
            values = data.labels.where(data.labels != IGNORED, n_labels)
        if data.valid is not None:
            values = values.where(data.valid, n_labels)
        self._add("label", "true label", "labels", Stored(_narrow(values.cpu().numpy(), n_labels + 1)))

    def finish(self) -> None:
        """Write view.json; the case can be shown from then on."""
        content = {
            "format": FORMAT,
            "case": self.maps.case_id,
            "shape": list(self.shape),
            "spacing": _spacing(self.grid),
            "geometry": self.grid.affine is not None,
            "classes": list(self.names),
            "regions": self.maps.regions,
            "labels": self.label_names,
            "ignored": len(self.label_names),
            "layers": [asdict(layer) for layer in self.layers],
            "middle": _most_doubtful(self.maps.confidence),
            "notes": self.notes,
        }
        write_text_atomic(self.folder / VIEW_FILE, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def _add(
        self, name: str, title: str, kind: LayerKind, stored: Stored, window: tuple[float, float] | None = None
    ) -> None:
        file = f"{name}.nii.gz"
        stored.save(self.folder / file, self.grid)
        low, high = window or (0.0, 1.0 if kind == "share" else float(len(self.label_names) - 1))
        self.layers.append(Layer(name, title, file, kind, low, high))


def _narrow(values: NDArray[Any], n_labels: int) -> NDArray[Any]:
    return values.astype(np.uint8 if n_labels <= 256 else np.int16)


def _spacing(grid: Grid) -> list[float]:
    """Millimetres between voxels along (z, y, x); 1 where nothing is known."""
    if grid.affine is None:
        return [1.0, 1.0, 1.0]
    return [float(length) for length in np.linalg.norm(grid.affine[:3, :3], axis=0)[::-1]]


def _most_doubtful(confidence: Tensor) -> list[int]:
    """The slice with the most doubt along each axis (z, y, x), the first of several."""
    found = []
    for axis in range(3):
        others = tuple(other for other in range(3) if other != axis)
        doubt = (1 - confidence).sum(dim=others, dtype=torch.float64)
        found.append(int(doubt.cpu().numpy().argmax()))
    return found
