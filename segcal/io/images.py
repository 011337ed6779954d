"""Label maps and images in the formats people have: NIfTI by nibabel, PNG and BMP by Pillow, the rest by SimpleITK.

NIfTI goes through nibabel because ITK refuses sheared headers and picks between qform and sform by its own rules;
label and member grids then come from one reader. PNG and BMP go through Pillow because ITK turns palettes into colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import SimpleITK
from numpy.typing import NDArray
from PIL import Image

from segcal.counted import count
from segcal.errors import DataError, FileFormatError
from segcal.io.archive import BEYOND_LIMIT, DEFAULT_LIMIT_BYTES, AnyArray
from segcal.io.nifti import is_nifti, read_nifti, read_nifti_header, scaled_values
from segcal.io.zip_reader import opened
from segcal.types import Grid

_ImageFileReader: Any = SimpleITK.ImageFileReader  # SimpleITK leaves its methods without type information

# SimpleITK invents an identity geometry for these; nobody measured it.
_WITHOUT_GEOMETRY = (".tif", ".tiff", ".jpg", ".jpeg")
_FLAT = {".png": "PNG", ".bmp": "BMP"}
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])
_PNG_DEPTH_AT = 24  # bit depth and colour type in the header every PNG begins with
_PNG_GRAY = 0


@dataclass(frozen=True, slots=True, eq=False)
class LabelMap:
    """Label values (z, y, x) as stored, an integer type, and where they lie."""

    values: AnyArray = field(repr=False)
    grid: Grid


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Intensities (channel, z, y, x) and where they lie."""

    values: NDArray[np.float32] = field(repr=False)
    grid: Grid


def read_labels(path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> LabelMap:
    """Read a label map; 2-D images get z = 1.

    Labels stored as floating point are accepted when every value is a whole number. PNG files may be gray (1 to 16
    bit) or have a palette, whose indices are the labels.
    """
    if is_nifti(path):
        stored, header = read_nifti(path, limit_bytes=limit_bytes)
        values, grid = scaled_values(stored, header), header.grid
    elif path.suffix.lower() in _FLAT:
        values, grid = _read_flat_labels(path, limit_bytes)
    else:
        values, grid = _read_sitk(path, limit_bytes)
    if values.ndim == 4:
        if values.shape[0] != 1:
            raise DataError(f"{path}: has {values.shape[0]} channels; a label map has one number per voxel.")
        values = values[0]
    return LabelMap(_whole_numbers(path, values), grid)


def read_image(path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Picture:
    """Read an image for pictures; colours and 4-D volumes become channels, 2-D images get z = 1."""
    if is_nifti(path):
        stored, header = read_nifti(path, limit_bytes=limit_bytes)
        values, grid = scaled_values(stored, header), header.grid
    elif path.suffix.lower() in _FLAT:
        values, grid = _read_flat_colours(path, limit_bytes)
    else:
        values, grid = _read_sitk(path, limit_bytes)
    channels = values if values.ndim == 4 else values[np.newaxis]
    return Picture(channels.astype(np.float32, copy=False), grid)


def read_grid(path: Path) -> Grid:
    """Shape and affine of an image or label map; no voxel is read."""
    if is_nifti(path):
        return read_nifti_header(path).grid
    if path.suffix.lower() in _FLAT:
        with opened(path) as file, _opened_flat(path, file, DEFAULT_LIMIT_BYTES) as image:
            return Grid((1, image.height, image.width))
    return _sitk_grid(path, _sitk_reader(path))


def _whole_numbers(path: Path, values: AnyArray) -> AnyArray:
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    if values.dtype.kind in "iu":
        return values
    whole = np.isfinite(values) & (np.rint(values) == values) & (np.abs(values) < 2**31)
    if not whole.all():
        example = values[~whole].flat[0]
        raise DataError(
            f"{path}: not whole numbers in {count(int((~whole).sum()), 'voxel')}, for example {example}. "
            "Was the label map resampled with interpolation? Use nearest neighbour."
        )
    return values.astype(np.int32)


def _read_flat_labels(path: Path, limit_bytes: int) -> tuple[AnyArray, Grid]:
    with opened(path) as file, _opened_flat(path, file, limit_bytes) as image:
        values = _loaded(path, image)
        if image.mode not in ("1", "L", "P", "I", "I;16"):
            raise DataError(
                f"{path}: a colour image ({image.mode}) is no label map; save class indices as gray or palette PNG."
            )
        if image.format == "PNG":
            file.seek(_PNG_DEPTH_AT)
            bits, colour_type = file.read(2)
            if colour_type == _PNG_GRAY and bits in (2, 4):
                # Pillow stretches these to 0..255, which is right for pictures and wrong for labels.
                values = values // (255 // (2**bits - 1))
    return values[np.newaxis], Grid((1, *values.shape))


def _read_flat_colours(path: Path, limit_bytes: int) -> tuple[AnyArray, Grid]:
    with opened(path) as file, _opened_flat(path, file, limit_bytes) as image:
        gray = image.mode in ("1", "L", "I", "I;16")
        values = _loaded(path, image if gray else image.convert("RGB"))
    channels = values[np.newaxis] if gray else np.moveaxis(values, -1, 0)
    return channels[:, np.newaxis], Grid((1, *values.shape[:2]))


def _opened_flat(path: Path, file: BinaryIO, limit_bytes: int) -> Image.Image:
    formats = [_FLAT[path.suffix.lower()]]
    with _damage_named(path):
        # Pillow compares checksums only here, not when it loads the pixels.
        Image.open(file, formats=formats).verify()
        file.seek(0)
        image = Image.open(file, formats=formats)
    _check_size(path, (1, image.height, image.width), 4, limit_bytes)
    return image


def _loaded(path: Path, image: Image.Image) -> AnyArray:
    with _damage_named(path):
        image.load()
    return np.array(image)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow has a type of its own, SyntaxError among them, for every way to be broken
        raise FileFormatError(f"{path}: not a readable image, truncated or damaged ({error}).") from error


def _read_sitk(path: Path, limit_bytes: int) -> tuple[AnyArray, Grid]:
    """Voxels as (z, y, x) or (channel, z, y, x)."""
    reader = _sitk_reader(path)
    grid = _sitk_grid(path, reader)
    channels = reader.GetNumberOfComponents() * math.prod(reader.GetSize()[3:])
    _check_size(path, (channels, *grid.shape), 8, limit_bytes)
    try:
        image = reader.Execute()
    except RuntimeError as error:
        raise FileFormatError(f"{path}: truncated or damaged ({_reason(error)}).") from error
    values: AnyArray = SimpleITK.GetArrayFromImage(image)
    if reader.GetNumberOfComponents() > 1:
        values = np.moveaxis(values, -1, 0)
    if values.dtype.kind not in "iuf":
        raise FileFormatError(f"{path}: values have dtype {values.dtype}; expected plain numbers.")
    shape = grid.shape if channels == 1 else (channels, *grid.shape)
    return values.reshape(shape), grid


def _sitk_reader(path: Path) -> Any:
    with opened(path):
        pass  # says what is wrong with the path better than ITK does
    reader = _ImageFileReader()
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise FileFormatError(f"{path}: not an image SimpleITK can read ({_reason(error)}).") from error
    return reader


def _sitk_grid(path: Path, reader: Any) -> Grid:
    size = reader.GetSize()
    shape = (size[2] if len(size) > 2 else 1, size[1], size[0])
    if len(size) < 3 or path.name.lower().endswith(_WITHOUT_GEOMETRY):
        return Grid(shape)
    n = len(size)
    direction = np.asarray(reader.GetDirection(), dtype=np.float64).reshape(n, n)[:3, :3]
    # ITK's world is LPS: x and y point the other way than in NIfTI's RAS.
    affine = np.eye(4)
    affine[:3, :3] = _LPS_TO_RAS @ direction @ np.diag(reader.GetSpacing()[:3])
    affine[:3, 3] = _LPS_TO_RAS @ np.asarray(reader.GetOrigin()[:3])
    return Grid(shape, affine)


def _check_size(path: Path, shape: tuple[int, ...], itemsize: int, limit_bytes: int) -> None:
    if math.prod(shape) * itemsize > limit_bytes:
        raise FileFormatError(
            f"{path}: declares {shape} values, more than the limit of {limit_bytes:,} bytes, {BEYOND_LIMIT}."
        )


def _reason(error: RuntimeError) -> str:
    """The last line of an ITK message; the others name source files."""
    return str(error).strip().splitlines()[-1]
