"""NIfTI volumes, 3-D and 4-D: nibabel understands the header, isal unpacks the bytes.

On disk x runs fastest and the class (or channel) slowest, so the bytes of a file are already an array
(class, z, y, x) in C order: reading needs no transposition and no second copy. What is unpacked is bounded by the
size the header declares, and the checksum of a compressed file is verified.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import nibabel as nib
import numpy as np
from isal import igzip, isal_zlib
from nibabel.fileholders import FileHolder
from numpy.typing import NDArray

from segcal.errors import FileFormatError
from segcal.io.archive import BEYOND_LIMIT, DEFAULT_LIMIT_BYTES, AnyArray
from segcal.io.deflate import LEVEL, Deflate
from segcal.io.zip_reader import opened
from segcal.types import Grid

# Both libraries leave these without type information.
_GzipFile: Any = igzip.IGzipFile
_Nifti1Image: Any = nib.Nifti1Image
_HEADER_CLASSES: dict[int, Any] = {348: nib.Nifti1Header, 540: nib.Nifti2Header}

_PIECE_BYTES = 2**20
_MAX_OFFSET_BYTES = 2**24  # header and extensions in front of the voxels; real files need a few kilobytes


@dataclass(frozen=True, slots=True)
class NiftiHeader:
    """What a NIfTI header declares.

    Attributes:
        shape: in array order, slowest axis first: (z, y, x) or (class, z, y, x); 2-D images have z = 1.
        dtype: as stored.
        affine: (4, 4) voxel (x, y, z) to world, RAS+ millimetres.
        slope, intercept: stored numbers stand for `slope * stored + intercept`; (1, 0) when nothing is scaled.
        offset: first byte of the voxels.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    affine: NDArray[np.float64]
    slope: float
    intercept: float
    offset: int

    @property
    def grid(self) -> Grid:
        """Where the volume lies."""
        z, y, x = self.shape[-3:]
        return Grid((z, y, x), self.affine)

    @property
    def scaled(self) -> bool:
        """Whether stored numbers are multiples of a slope."""
        return (self.slope, self.intercept) != (1.0, 0.0)

    @property
    def nbytes(self) -> int:
        """Size of the voxels as stored."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_nifti(path: Path) -> bool:
    """Whether the name says NIfTI."""
    return path.name.lower().endswith((".nii", ".nii.gz"))


def read_nifti_header(path: Path) -> NiftiHeader:
    """Read geometry, shape and dtype; no voxel is unpacked."""
    with _unpacked(path) as file:
        return _parse_header(path, file)


def read_nifti(path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> tuple[AnyArray, NiftiHeader]:
    """Read the voxels as stored, in array order (z, y, x) or (class, z, y, x), native byte order.

    The slope of the header is not applied: `scaled_values` does that, and callers want to know.
    """
    with _unpacked(path) as file:
        header = _parse_header(path, file)
        if header.nbytes > limit_bytes:
            raise FileFormatError(
                f"{path}: declares {header.shape} {header.dtype} = {header.nbytes:,} bytes, more than the limit of "
                f"{limit_bytes:,}, {BEYOND_LIMIT}."
            )
        buffer = np.empty(header.nbytes, dtype=np.uint8)
        try:
            file.seek(header.offset)
            _fill(path, file, buffer.data)
            surplus = file.read(1)  # also makes the reader verify the checksum at the end of the stream
        except (OSError, EOFError, ValueError, struct.error) as error:
            raise FileFormatError(f"{path}: truncated or damaged ({error}).") from error
    if surplus:
        raise FileFormatError(f"{path}: holds more data than its header declares; the rest was not unpacked.")
    flat = buffer.view(header.dtype)
    if not header.dtype.isnative:
        flat = flat.byteswap(inplace=True).view(header.dtype.newbyteorder("="))
    return flat.reshape(header.shape), header


def check_whole(path: Path) -> None:
    """Refuse a file that ends before its voxels do, or whose checksum is wrong; ITK takes zeros for what is missing.

    Everything is unpacked once and nothing is kept.
    """
    with _unpacked(path) as file:
        header = _parse_header(path, file)
        try:
            n_bytes = file.seek(0)
            while piece := file.read(_PIECE_BYTES):
                n_bytes += len(piece)
        except (OSError, EOFError, ValueError, struct.error) as error:
            raise FileFormatError(f"{path}: truncated or damaged ({error}).") from error
    if n_bytes < header.offset + header.nbytes:
        raise FileFormatError(
            f"{path}: truncated, it has {n_bytes:,} of the {header.offset + header.nbytes:,} bytes its header declares."
        )


def scaled_values(stored: AnyArray, header: NiftiHeader) -> AnyArray:
    """The numbers the file stands for: `stored` itself, or float32 `slope * stored + intercept`."""
    if not header.scaled:
        return stored
    wide = stored.dtype == np.float64
    values: AnyArray = stored.astype(np.float64 if wide else np.float32)
    values *= header.slope
    values += header.intercept
    return values


def nifti_fingerprint(path: Path) -> str:
    """Text that changes when the content does: file size and the checksum gzip keeps at the end, nothing unpacked.

    Files without a checksum of their content there (plain `.nii`, and block-wise gzip, which ends in an empty
    block) are read once to compute one.
    """
    with opened(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 8))
        trailer = file.read(8)
        if path.name.lower().endswith(".gz") and any(trailer):
            return f"nii.gz:{size}:{trailer.hex()}"
        file.seek(0)
        crc = 0
        while piece := file.read(_PIECE_BYTES):
            crc = isal_zlib.crc32(piece, crc)
    return f"nii:{size}:{crc:08x}"


def write_nifti(
    path: Path,
    values: AnyArray,
    *,
    affine: NDArray[np.float64] | None,
    scale: float | None = None,
    slope_inter: tuple[float, float] = (1.0, 0.0),
) -> None:
    """Write a volume; `.nii.gz` is packed with isal, the same input gives the same bytes.

    `path` is written in place: hand in the temporary path of `atomic_write`.

    Args:
        path: ends in `.nii` or `.nii.gz`.
        values: (z, y, x) or (class, z, y, x); on disk x-y-z(-class).
        affine: voxel (x, y, z) to world in RAS+ millimetres; None writes the identity.
        scale: when given, the file holds uint16 with this scl_slope. Floats become `round(values / scale)`;
            uint16 values are taken as the integers to store.
        slope_inter: without `scale`: scl_slope and scl_inter of the header; the values are stored as they are.
    """
    if values.ndim not in (3, 4):
        raise ValueError(f"expected (z, y, x) or (class, z, y, x), got shape {values.shape}")
    if values.dtype == np.float16:
        raise ValueError("NIfTI has no float16; write float32, or uint16 with a scale")
    stored = values if scale is None else _quantised(values, scale)
    image = _Nifti1Image(stored.T, np.eye(4) if affine is None else affine, dtype=stored.dtype)
    image.header.set_xyzt_units("mm")
    image.header.set_slope_inter(*(slope_inter if scale is None else (scale, 0.0)))
    with path.open("wb") as raw, ExitStack() as stack:
        target: Any = raw
        if path.name.lower().endswith(".gz"):
            # No name and no date in the gzip header: they would make two equal files differ.
            target = stack.enter_context(_GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=raw, mtime=0))
            target.compress = Deflate()
        holder = FileHolder(fileobj=target)
        image.to_file_map({"image": holder, "header": holder})


def _quantised(values: AnyArray, scale: float) -> NDArray[np.uint16]:
    if values.dtype == np.uint16:
        return values
    largest = np.iinfo(np.uint16).max
    levels: AnyArray = np.rint(values / values.dtype.type(scale))
    if not (levels.min() >= 0 and levels.max() <= largest):
        raise ValueError(f"values outside [0, {largest * scale}] cannot be stored as uint16 with scale {scale}")
    stored: NDArray[np.uint16] = levels.astype(np.uint16)
    return stored


@contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    with opened(path) as file:
        if path.name.lower().endswith(".gz"):
            with _GzipFile(fileobj=file, mode="rb") as unpacked:
                yield unpacked
        else:
            yield file


def _parse_header(path: Path, file: BinaryIO) -> NiftiHeader:
    try:
        start = file.read(max(_HEADER_CLASSES))
        size = next(n for n in _HEADER_CLASSES if n.to_bytes(4, "little") == start[:4] or n.to_bytes(4) == start[:4])
        # Extensions behind the header are left alone: nothing in them is needed.
        header = _HEADER_CLASSES[size](start[:size], check=True)
        if header["magic"].item() != header.single_magic:
            raise ValueError("the voxels are in another file")
        offset, dtype = int(header.get_data_offset()), header.get_data_dtype()
        on_disk = tuple(int(n) for n in header.get_data_shape())
        slope, intercept = header.get_slope_inter()
        affine = np.asarray(header.get_best_affine(), dtype=np.float64)
    except Exception as error:  # nibabel, struct and the unpacker each have their own exceptions for a bad header
        reason = str(error) or "it does not begin as a header does"
        raise FileFormatError(f"{path}: not a readable NIfTI file, truncated or damaged ({reason}).") from error
    if dtype.kind not in "biuf" or not size < offset <= _MAX_OFFSET_BYTES:
        raise FileFormatError(f"{path}: voxels of dtype {dtype} at byte {offset:,}; expected plain numbers near 352.")
    while len(on_disk) > 4 and on_disk[-1] == 1:
        on_disk = on_disk[:-1]
    on_disk += (1,) * (3 - len(on_disk))
    if min(on_disk) < 1 or len(on_disk) > 4:
        raise FileFormatError(f"{path}: has the shape {on_disk} on disk; expected x-y-z or x-y-z-class.")
    if not np.isfinite(affine).all():
        raise FileFormatError(f"{path}: its affine holds NaN or Inf; repair the header (sform or qform).")
    return NiftiHeader(on_disk[::-1], dtype, affine, 1.0 if slope is None else slope, intercept or 0.0, offset)


def _fill(path: Path, file: BinaryIO, target: memoryview) -> None:
    filled = 0
    while filled < len(target):
        piece = file.read(min(_PIECE_BYTES, len(target) - filled))
        if not piece:
            raise FileFormatError(f"{path}: truncated, {len(target) - filled:,} of {len(target):,} bytes are missing.")
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
