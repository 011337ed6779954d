"""What the values of a label map mean: which a manifest knows, how often each occurs, which regions they belong to."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.chunks import MOST_VOXELS, chunk_slices
from segcal.io.archive import AnyArray
from segcal.manifest import Manifest


def known_values(manifest: Manifest) -> set[int]:
    """Label values that have a meaning, without the ignore label."""
    if manifest.regions is None:
        return set(range(manifest.n_classes))
    return {0}.union(*(region.labels for region in manifest.regions))


def label_counts(values: AnyArray) -> dict[int, int]:
    """How many voxels hold each value."""
    flat = values.ravel()
    if flat.size == 0:
        return {}
    low, high = int(flat.min()), int(flat.max())
    if max(-low, high) >= 2**16:
        found, n_found = np.unique(flat, return_counts=True)
        return {int(value): int(count) for value, count in zip(found, n_found, strict=True)}
    # Counting is many times faster than the sort behind `unique`, and labels are small numbers.
    # By pieces, because it makes int64 of what it is given, eight times the size of a label map.
    counts = np.zeros(high - low + 1, dtype=np.int64)
    for piece in chunk_slices(flat.size, MOST_VOXELS):
        counts += np.bincount(flat[piece].astype(np.int64) - low, minlength=len(counts))
    return {low + int(place): int(counts[place]) for place in np.flatnonzero(counts)}


def region_masks(manifest: Manifest, values: Tensor) -> Tensor:
    """(R, z, y, x) bool: which voxels of a (z, y, x) label map belong to each region of the manifest."""
    assert manifest.regions is not None
    wanted = [torch.tensor(region.labels, dtype=torch.int64, device=values.device) for region in manifest.regions]
    return torch.stack([torch.isin(values, labels) for labels in wanted])
