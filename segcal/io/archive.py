"""Arrays in .npz files: reading those that nobody vouches for, and writing our own.

Everything that can be known without inflating is checked first: the names in the directory, how a member is
packed, the shape and dtype its header declares against a limit. Inflating then stops at the declared size, so
a small file cannot turn into a large one, and the checksum is compared at the end. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from segcal.errors import FileFormatError
from segcal.io.zip_reader import ENTRY_NAME, ZipEntryReader, checked_directory, opened
from segcal.io.zip_writer import ZipWriter

AnyArray: TypeAlias = NDArray[Any]

DEFAULT_LIMIT_BYTES = 8 * 2**30
"""Largest array a file may declare (8 GiB) unless the caller says otherwise."""

BEYOND_LIMIT = (
    "which no option changes; where the header is right, store the array in a smaller type (float16 in .npz, uint8 "
    "for labels) or cut the image into cases"
)
"""The way out, after the limit, in messages about arrays that are too large."""

_HEADER_BYTES = 2**14  # numpy itself refuses .npy headers above 10,000 characters
_VERIFY_BYTES = 2**22
_PLAIN_NUMBERS = "biuf"

# numpy parses headers through `ast`, which Python 3.11 does not run safely in several threads at once.
_HEADER_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """What a .npy header declares about its array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def nbytes(self) -> int:
        """Size of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class NpzReader:
    """An open .npz file whose directory has been checked; made by `open_npz`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.entries = checked_directory(path, file)

    def header(self, key: str) -> ArrayHeader:
        """Declared shape and dtype of one array; nothing beyond its header is inflated."""
        return _read_header(self._entry(key))[0]

    def array(self, key: str, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> AnyArray:
        """One array, see `read_npz_array`."""
        entry, header, rest = self._opened(key, limit_bytes)
        buffer = np.empty(header.nbytes, dtype=np.uint8)
        buffer[: len(rest)] = np.frombuffer(rest, dtype=np.uint8)
        entry.fill(buffer.data[len(rest) :])
        entry.finish()
        return _as_array(buffer, header)

    def verify(self, key: str, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        """Raise what reading the array would raise, without holding more than a few megabytes of it."""
        entry, _, _ = self._opened(key, limit_bytes)
        buffer = bytearray(min(entry.left, _VERIFY_BYTES))
        while entry.left:
            entry.fill(memoryview(buffer)[: min(entry.left, _VERIFY_BYTES)])
        entry.finish()

    def _opened(self, key: str, limit_bytes: int) -> tuple[ZipEntryReader, ArrayHeader, bytes]:
        """An array whose declared size is within the limit and what is packed: its entry, header and first bytes."""
        entry = self._entry(key)
        header, rest = _read_header(entry)
        if header.nbytes > limit_bytes:
            raise entry.broken(
                f"declares {header.shape} {header.dtype} = {header.nbytes:,} bytes, more than the limit of "
                f"{limit_bytes:,}, {BEYOND_LIMIT}"
            )
        packed = len(rest) + entry.left
        if header.nbytes != packed:
            raise entry.broken(f"declares {header.nbytes:,} bytes of data but {packed:,} are packed")
        return entry, header, rest

    def _entry(self, key: str) -> ZipEntryReader:
        if key not in self.entries:
            found = ", ".join(f"`{name}`" for name in self.entries)
            raise FileFormatError(f"{self._path}: has no array `{key}`, only {found}.")
        return ZipEntryReader(self._path, self._file, self.entries[key])


@contextmanager
def open_npz(path: Path) -> Iterator[NpzReader]:
    """Open an .npz file and check its directory."""
    with opened(path) as file:
        yield NpzReader(path, file)


def read_npz_header(path: Path) -> dict[str, ArrayHeader]:
    """Declared shape and dtype of every array in the file; nothing beyond the headers is inflated."""
    with open_npz(path) as reader:
        return {key: reader.header(key) for key in reader.entries}


def read_npz_array(path: Path, key: str, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> AnyArray:
    """Read one array of an .npz file.

    Memory is one array plus small buffers, whatever the file claims.

    Args:
        path: the file.
        key: name of the array, without `.npy`.
        limit_bytes: a header declaring more than this is refused before anything is inflated.

    Returns:
        The array in native byte order, writable; Fortran-ordered when it was stored that way.
    """
    with open_npz(path) as reader:
        return reader.array(key, limit_bytes=limit_bytes)


def npz_fingerprint(path: Path) -> str:
    """Text that changes when the content does: file size and the checksums of the zip directory, nothing inflated."""
    with open_npz(path) as reader:
        parts = [f"{key}:{info.file_size}:{info.CRC:08x}" for key, info in sorted(reader.entries.items())]
        return f"npz:{path.stat().st_size}:" + ",".join(parts)


def write_npz(path: Path, arrays: Mapping[str, AnyArray]) -> None:
    """Write arrays as `numpy.load` reads them; the same arrays give the same bytes.

    `path` is written in place: hand in the temporary path of `atomic_write`. Arrays are packed a few megabytes at
    a time, so no second copy of an array is made.
    """
    for key, array in arrays.items():
        if not ENTRY_NAME.fullmatch(f"{key}.npy"):
            raise ValueError(f"{key!r} cannot be the name of an array in an .npz file: use letters, digits, _ and -")
        if array.dtype.kind not in _PLAIN_NUMBERS:
            raise ValueError(f"array {key!r} has dtype {array.dtype}; only plain numbers are written")
    with path.open("wb") as file:
        writer = ZipWriter(file)
        for key, array in arrays.items():
            with writer.entry(f"{key}.npy", array.nbytes + _HEADER_BYTES) as entry:
                npy.write_array(entry, array, allow_pickle=False)
        writer.finish()


def _read_header(entry: ZipEntryReader) -> tuple[ArrayHeader, bytes]:
    """The parsed .npy header and the bytes of data that were unpacked along with it."""
    start = bytearray(min(entry.left, _HEADER_BYTES))
    entry.fill(memoryview(start))
    stream = io.BytesIO(start)
    try:
        with _HEADER_LOCK:
            version = npy.read_magic(stream)
            # Version 3 exists only for structured dtypes, which are refused anyway.
            parse = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
            shape, fortran, dtype = parse(stream)
    except Exception as error:  # literal_eval and tokenize fail in many ways on a damaged header
        raise entry.broken(f"has an .npy header that cannot be read ({error})") from error
    if dtype.kind not in _PLAIN_NUMBERS:
        raise entry.broken(f"has dtype {dtype}; only arrays of plain numbers are read, never Python objects")
    if any(isinstance(n, bool) or n < 0 for n in shape):
        raise entry.broken(f"declares the impossible shape {shape}")
    return ArrayHeader(tuple(shape), dtype, bool(fortran)), bytes(start[stream.tell() :])


def _as_array(buffer: NDArray[np.uint8], header: ArrayHeader) -> AnyArray:
    """View the bytes as the declared array; byte order is made native in place."""
    flat = buffer.view(header.dtype)
    if not header.dtype.isnative:
        flat = flat.byteswap(inplace=True).view(header.dtype.newbyteorder("="))
    return flat.reshape(header.shape, order="F" if header.fortran else "C")
