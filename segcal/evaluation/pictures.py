"""One slice of a case with everything a reader wants to see of it, small enough to keep for every case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.cases import CaseData
from segcal.errors import GeometryError
from segcal.evaluation.picture_maps import PictureMaps, choose_slice, slice_doubt
from segcal.io.images import read_image
from segcal.manifest import Manifest, ManifestCase
from segcal.types import Grid

_MAPS = ("segmentation", "confidence_before", "confidence_after", "image", "label", "flips", "free_energy")

BySlice: TypeAlias = Callable[[int], Tensor]
"""Makes the probabilities (C, y, x) of one slice when they are asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class CasePicture:
    """The most informative slice.

    Attributes:
        maps: volumes one slice deep.
        index: which slice.
        n_slices: of how many.
        affine: of the case, for orientation and aspect; None without geometry.
    """

    maps: PictureMaps
    index: int
    n_slices: int
    affine: NDArray[np.float64] | None

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As named arrays, for an npz file."""
        kept = {name: getattr(self.maps, name) for name in _MAPS if getattr(self.maps, name) is not None}
        kept["position"] = np.array([self.index, self.n_slices])
        if self.affine is not None:
            kept["affine"] = self.affine
        return kept

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> CasePicture:
        """Inverse of `arrays`."""
        maps = PictureMaps(**{name: arrays[name] for name in _MAPS if name in arrays})
        index, n_slices = (int(value) for value in arrays["position"])
        return cls(maps, index, n_slices, arrays.get("affine"))

    @property
    def grid(self) -> Grid | None:
        _, height, width = self.maps.segmentation.shape
        return None if self.affine is None else Grid((self.n_slices, height, width), self.affine)


def case_picture(
    manifest: Manifest, case: ManifestCase, data: CaseData, probs: BySlice, *, can_flip: bool
) -> CasePicture:
    """Cut the most informative slice out of a case.

    Args:
        data: pooled, with labels.
        probs: makes the calibrated probabilities of a slice, so that no volume of them need exist.
        can_flip: whether the probabilities can decide otherwise than `data`; if not, only one slice is asked for.
    """
    true = data.labels if data.region_labels is None else data.region_labels

    def shown(index: int) -> NDArray[Any]:
        return _painted(data.decision if true is None else true, index)

    def doubt(index: int) -> float:
        maps = _maps(manifest, data, index, probs if can_flip else None)
        return slice_doubt(maps.confidence_before, maps.errors, maps.flips)

    n_slices = data.logits.shape[1]
    index = choose_slice(n_slices, shown, doubt)
    image = None if case.image is None else read_image(manifest.resolve(case.image)).values
    maps = replace(_maps(manifest, data, index, probs), image=_cut_image(case, image, data.logits.shape[1:], index))
    return CasePicture(maps, index, n_slices, None if data.grid is None else data.grid.affine)


def _maps(manifest: Manifest, data: CaseData, index: int, probs: BySlice | None) -> PictureMaps:
    """One slice before calibration and, given `probs`, after it.

    Region models are shown by their painted label map; confidence is that of the least sure region.
    """
    logits, decision = data.logits[:, index], data.decision[..., index, :, :]
    changed = None if probs is None else probs(index)
    true = data.labels if data.region_labels is None else data.region_labels
    if manifest.has_regions:
        before = torch.sigmoid(logits.abs()).amin(0)
        after = before if changed is None else torch.maximum(changed, 1 - changed).amin(0)
        flips = None if changed is None else (decision != (changed > 0.5)).any(0)
    else:
        before = torch.softmax(logits, 0).amax(0)
        after = before if changed is None else changed.amax(0)
        flips = None if changed is None else changed.argmax(0) != decision
    return PictureMaps(
        segmentation=_painted(data.decision, index)[None],
        confidence_before=before.half().cpu().numpy()[None],
        confidence_after=after.half().cpu().numpy()[None],
        label=None if true is None else _painted(true, index)[None],
        flips=None if flips is None else flips.cpu().numpy()[None],
        free_energy=None if manifest.has_regions else torch.logsumexp(logits, 0).half().cpu().numpy()[None],
    )


def _painted(classes: Tensor, index: int) -> NDArray[np.int16]:
    """One slice of (z, y, x) class indices; (R, z, y, x) regions become 0, or 1 + the last that holds the voxel."""
    if classes.ndim == 3:
        return classes[index].to(torch.int16).cpu().numpy()
    painted = torch.zeros(classes.shape[2:], dtype=torch.int16, device=classes.device)
    for position, region in enumerate(classes[:, index]):
        painted[region] = position + 1
    return painted.cpu().numpy()


def _cut_image(case: ManifestCase, image: NDArray[Any] | None, shape: Sequence[int], index: int) -> NDArray[Any] | None:
    if image is None:
        return None
    if image.shape[-3:] != tuple(shape):
        raise GeometryError(f"{case.id}: the image has shape {image.shape}, the prediction {tuple(shape)}")
    cut = image[..., index : index + 1, :, :]
    return cut.astype(np.float16) if cut.dtype == np.float32 and float(np.abs(cut).max(initial=0)) < 6e4 else cut
