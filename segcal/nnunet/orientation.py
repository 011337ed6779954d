"""From the axis order of nnU-Net's reader to that of the image file.

Two readers, `NibabelIOWithReorient` and `SimpleITKIOWithReorient`, turn images to RAS. What nnU-Net saves as .npz lies
in that order, while labels and segmentations on disk keep the order of the image file. Here arrays are turned back, by
the same libraries that turned them; the other readers leave the order alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import nibabel
import numpy as np
import SimpleITK
from numpy.typing import NDArray

from segcal.types import Box, box_slices


def in_file_order(values: NDArray[Any], properties: Mapping[str, Any]) -> NDArray[Any]:
    """Turn (channel, z, y, x) from the order of the reader to that of the image file; nothing is interpolated.

    Args:
        values: in the order of the reader.
        properties: nnU-Net's, as the reader filled them.
    """
    by_nibabel: Mapping[str, Any] = properties.get("nibabel_stuff", {})
    by_itk: Mapping[str, Any] = properties.get("sitk_stuff", {})
    if "reoriented_affine" in by_nibabel:
        return _turned_by_nibabel(values, by_nibabel)
    if "original_orientation" in by_itk:
        return np.stack([_turned_by_itk(channel, by_itk) for channel in values])
    return values


def box_in_file_order(box: Box, shape: tuple[int, ...], properties: Mapping[str, Any]) -> Box:
    """The same for a box in an array of the given (z, y, x) shape."""
    mask = np.zeros((1, *shape), dtype=np.int16)
    mask[:, *box_slices(box)] = 1
    inside = np.nonzero(in_file_order(mask, properties)[0])
    z, y, x = ((int(places.min()), int(places.max()) + 1) for places in inside)
    return z, y, x


def _turned_by_nibabel(values: NDArray[Any], geometry: Mapping[str, Any]) -> NDArray[Any]:
    now = nibabel.orientations.io_orientation(geometry["reoriented_affine"])  # type: ignore[no-untyped-call]
    then = nibabel.orientations.io_orientation(geometry["original_affine"])  # type: ignore[no-untyped-call]
    back = nibabel.orientations.ornt_transform(now, then)  # type: ignore[no-untyped-call]
    # nibabel counts axes as (x, y, z); those behind them, here the channels, stay where they are.
    turned = nibabel.orientations.apply_orientation(values.transpose(3, 2, 1, 0), back)  # type: ignore[no-untyped-call]
    return np.ascontiguousarray(turned.transpose(3, 2, 1, 0))


def _turned_by_itk(channel: NDArray[Any], geometry: Mapping[str, Any]) -> NDArray[Any]:
    # ITK has no 16-bit floats, but axes can be swapped and flipped without knowing what the bits mean.
    image = SimpleITK.GetImageFromArray(channel.view(f"i{channel.dtype.itemsize}"))
    image.SetDirection(geometry["direction"])  # type: ignore[no-untyped-call]
    turned = SimpleITK.DICOMOrient(image, geometry["original_orientation"])  # type: ignore[no-untyped-call]
    array: NDArray[Any] = SimpleITK.GetArrayFromImage(turned).view(channel.dtype)
    return array
