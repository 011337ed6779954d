"""Label maps in the place, orientation and format of the segmentation nnU-Net wrote for the case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import nibabel.orientations as orientations
import numpy as np
import SimpleITK
from numpy.typing import NDArray

from segcal.errors import FileFormatError
from segcal.io.archive import read_npz_array
from segcal.io.atomic import atomic_write
from segcal.io.images import read_grid, read_labels
from segcal.io.members import DEFAULT_LIMIT_BYTES
from segcal.io.nifti import is_nifti, write_nifti

_itk: Any = SimpleITK  # its functions carry no type information
_nibabel: Any = nibabel
_ornt: Any = orientations
_RAS = np.array([[0, 1], [1, 1], [2, 1]])


def read_written(path: Path) -> NDArray[Any]:
    """The (z, y, x) label values of a file `segcal apply` wrote: an image, or `.npz` with key `segmentation`."""
    if path.suffix == ".npz":
        return read_npz_array(path, "segmentation", limit_bytes=DEFAULT_LIMIT_BYTES)
    return read_labels(path).values


def write_like(original: Path, labels: NDArray[Any], target: Path) -> None:
    """Write label values (z, y, x) with the geometry, and in the format, of the original segmentation."""
    with atomic_write(target) as temporary:
        if is_nifti(original) and not is_flat_nifti(original):
            write_nifti(temporary, labels, affine=read_grid(original).affine)
            return
        try:
            template = _itk.ReadImage(str(original))
            image = _itk.GetImageFromArray(labels[0] if template.GetDimension() == 2 else labels)
            image.CopyInformation(template)
            _itk.WriteImage(image, str(temporary), True)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise FileFormatError(f"{original}: cannot serve as pattern for {target.name} ({reason}).") from error


def is_flat_nifti(path: Path) -> bool:
    """Whether a NIfTI file says that it has two dimensions; `write_nifti` gives its volumes three."""
    try:
        return is_nifti(path) and len(_nibabel.load(path).shape) == 2
    except Exception:  # a damaged file, in one of nibabel's many ways; whoever reads its voxels will say so
        return False


def in_file_orientation(labels: NDArray[Any], original: Path) -> NDArray[Any]:
    """Turn an array in RAS order back into the order of the image file.

    Args:
        labels: (z, y, x) as nnU-Net's readers `…WithReorient` arrange it: x to the right, y anterior, z superior.
        original: the segmentation nnU-Net wrote; it lies as the image does.
    """
    affine = read_grid(original).affine
    if affine is None:
        return labels
    back = _ornt.ornt_transform(_RAS, _ornt.io_orientation(affine))
    turned: NDArray[Any] = _ornt.apply_orientation(labels.T, back).T
    return np.ascontiguousarray(turned)


def lies_in_ras(path: Path) -> bool:
    """Whether a file's axes already run as the readers `…WithReorient` turn them."""
    affine = read_grid(path).affine
    return affine is None or bool(np.array_equal(_ornt.io_orientation(affine), _RAS))
