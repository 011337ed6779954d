"""How far every voxel lies from the ground-truth boundary, in bands: computed once a case, shared by all pipelines."""

from __future__ import annotations

from dataclasses import dataclass

import edt
import numpy as np
from numpy.typing import NDArray

from segcal.errors import GeometryError
from segcal.metrics.fixed_point import UNITS_PER_ONE


@dataclass(frozen=True, slots=True, eq=False)
class BandMap:
    """Distance bands of one label map.

    Attributes:
        band: (z, y, x) uint8, index of the band.
        squared: (z, y, x) int32, squared distance in voxels; None for a label map without a boundary.
        edges: lower edges of the bands in voxels.
    """

    band: NDArray[np.uint8]
    squared: NDArray[np.int32] | None
    edges: tuple[float, ...]

    def distance_sums(self, flat_index: slice, keep: NDArray[np.bool_] | None) -> tuple[int, ...]:
        """Sum of distances in every band over part of the flattened voxels, in units of `fixed_point`."""
        if self.squared is None:
            return (0,) * len(self.edges)
        squared = self.squared.reshape(-1)[flat_index]
        counts = np.bincount(squared if keep is None else squared[keep])
        # Whole-number distances squared are few: count each, then multiply by its root.
        present = counts.nonzero()[0]
        roots = np.rint(np.sqrt(present) * UNITS_PER_ONE).astype(np.int64)
        split = np.searchsorted(present, np.square(self.edges))
        stops = [*split[1:], len(present)]
        return tuple(
            int(counts[present[start:stop]] @ roots[start:stop]) for start, stop in zip(split, stops, strict=True)
        )


def distance_bands(labels: NDArray[np.integer], edges: tuple[float, ...], *, ignored: int) -> BandMap:
    """Unsigned Euclidean distance in voxels to the nearest boundary voxel, cut into bands [edge_k, edge_k+1).

    A voxel is on the boundary when a face neighbour has another label; ignored voxels and the image border make no
    boundary. With a single label there is no boundary and every voxel is in the last band. `labels` is 2-D or 3-D.
    """
    if labels.ndim not in (2, 3):
        raise GeometryError(f"distance bands need a 2-D or 3-D label map, got shape {labels.shape}")
    boundary = boundary_voxels(labels, ignored=ignored)
    if not boundary.any():
        return BandMap(np.full(labels.shape, len(edges) - 1, dtype=np.uint8), None, edges)
    # edtsq gives whole numbers in float32, exact up to 2^24, so a distance of exactly 3 falls into the right band.
    squared = edt.edtsq(np.ascontiguousarray(~boundary), black_border=False, parallel=1).astype(np.int32)
    band_of = np.zeros(int(squared.max()) + 1, dtype=np.uint8)
    for edge in edges[1:]:
        band_of[int(np.ceil(edge**2)) :] += 1
    return BandMap(band_of[squared], squared, edges)


def boundary_voxels(labels: NDArray[np.integer], *, ignored: int) -> NDArray[np.bool_]:
    """Voxels with a face neighbour of another label, both counted; pairs with an ignored voxel are not."""
    boundary = np.zeros(labels.shape, dtype=np.bool_)
    counted = labels != ignored
    everything = bool(counted.all())
    for axis in range(labels.ndim):
        low = tuple(slice(None, -1) if k == axis else slice(None) for k in range(labels.ndim))
        high = tuple(slice(1, None) if k == axis else slice(None) for k in range(labels.ndim))
        differs = labels[low] != labels[high]
        if not everything:
            differs &= counted[low] & counted[high]
        boundary[low] |= differs
        boundary[high] |= differs
    return boundary
