"""One slice of a case with everything a reader wants to see of it, small enough to keep for every case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.cases import CaseData
from segcal.evaluation.picture_maps import PictureMaps, informative_slice
from segcal.io.images import read_image
from segcal.manifest import Manifest, ManifestCase
from segcal.types import Grid

_MAPS = ("segmentation", "confidence_before", "confidence_after", "image", "label", "flips", "free_energy")


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


def case_picture(manifest: Manifest, case: ManifestCase, data: CaseData, probs: Tensor) -> CasePicture:
    """Cut the most informative slice out of a case.

    Args:
        data: pooled, with labels.
        probs: (C, z, y, x) calibrated probabilities.
    """
    image = None if case.image is None else read_image(manifest.resolve(case.image)).values
    maps = PictureMaps(image=image, **_volumes(manifest, data, probs))
    index = informative_slice(maps)
    cut: dict[str, Any] = {name: _slice(getattr(maps, name), index) for name in _MAPS}
    affine = None if data.grid is None else data.grid.affine
    return CasePicture(PictureMaps(**cut), index, len(maps.segmentation), affine)


def _volumes(manifest: Manifest, data: CaseData, probs: Tensor) -> dict[str, Any]:
    """Region models are shown by their painted label map; confidence is that of the least sure region."""
    energy = torch.logsumexp(data.logits, 0) if not manifest.has_regions else None
    if manifest.has_regions:
        before = torch.sigmoid(data.logits.abs()).amin(0)
        after = torch.maximum(probs, 1 - probs).amin(0)
        decided, moved = data.decision, (probs > 0.5)
        segmentation = _painted(decided)
        flips = (decided != moved).any(0)
        label = None if data.region_labels is None else _painted(data.region_labels)
    else:
        before = torch.softmax(data.logits, 0).amax(0)
        after = probs.amax(0)
        segmentation, flips, label = data.decision, probs.argmax(0) != data.decision, data.labels
    return {
        "segmentation": segmentation.to(torch.int16).cpu().numpy(),
        "confidence_before": before.half().cpu().numpy(),
        "confidence_after": after.half().cpu().numpy(),
        "label": None if label is None else label.to(torch.int16).cpu().numpy(),
        "flips": flips.cpu().numpy(),
        "free_energy": None if energy is None else energy.half().cpu().numpy(),
    }


def _painted(regions: Tensor) -> Tensor:
    """(R, z, y, x) bool to one map: 0, or 1 + the last region that holds the voxel."""
    labels = torch.zeros(regions.shape[1:], dtype=torch.int64, device=regions.device)
    for index, region in enumerate(regions):
        labels[region] = index + 1
    return labels


def _slice(volume: NDArray[Any] | None, index: int) -> NDArray[Any] | None:
    if volume is None:
        return None
    cut = volume[..., index : index + 1, :, :]
    return cut.astype(np.float16) if cut.dtype == np.float32 and float(np.abs(cut).max(initial=0)) < 6e4 else cut
