"""nnU-Net's post-processing of label maps: all but the largest component is background."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage


def clean_labels(labels: NDArray[Any], steps: Iterable[Collection[int]]) -> NDArray[Any]:
    """Apply the steps of a postprocessing.json one after the other; see `read_postprocessing`."""
    for step in steps:
        labels = keep_largest_component(labels, step)
    return labels


def keep_largest_component(labels: NDArray[Any], values: Collection[int]) -> NDArray[Any]:
    """Keep the largest component of the voxels that hold one of `values`; their other components become 0.

    Voxels that touch at a corner belong together, and components of equal size all stay if they are the largest, as
    in nnU-Net's `remove_all_but_largest_component_from_segmentation`.

    Args:
        labels: (z, y, x) label values; not changed.
        values: label values that count as one object.
    """
    mask = np.isin(labels, list(values))
    components, n_components = ndimage.label(mask, structure=np.ones((3,) * labels.ndim))
    if n_components < 2:
        return labels
    sizes = np.bincount(components.ravel())
    sizes[0] = 0
    cleaned = labels.copy()
    cleaned[mask & (sizes[components] < sizes.max())] = 0
    return cleaned
