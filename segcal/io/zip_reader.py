"""Reading zip members that nobody vouches for: the directory is checked first, unpacking stops at the declared size.

Unpacking is isal's work, which releases the interpreter lock: several files are read at once.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from isal import igzip_lib, isal_zlib

from segcal.errors import FileFormatError, MissingFileError

MAX_ENTRIES = 64
ENTRY_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\.npy")

_READ_BYTES = 2**18
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENCRYPTED_OR_PATCHED = 0x0001 | 0x0020 | 0x0040 | 0x2000
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
# isal's own type information takes the exception class for an instance.
_INFLATE_ERRORS = (cast(type[Exception], igzip_lib.error), EOFError)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; what the system says about it becomes one of our errors."""
    if path.exists() and not path.is_file() and not path.is_dir():
        # Opening a pipe would wait for whoever writes to it, perhaps for ever.
        raise FileFormatError(f"{path}: is neither a file nor a link to one (a pipe or a device?); name a real file.")
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file; check the path.") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}).") from error
    with file:
        yield file


def checked_directory(path: Path, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """Directory of an .npz archive by array name, after checking names, number, packing and encryption."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except Exception as error:  # a broken directory makes zipfile raise half a dozen unrelated types
        raise FileFormatError(f"{path}: not a readable .npz (zip) file, truncated or damaged ({error}).") from error
    if not 1 <= len(infos) <= MAX_ENTRIES:
        raise FileFormatError(f"{path}: holds {len(infos)} entries, expected 1 to {MAX_ENTRIES} arrays.")
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        # `orig_filename` because zipfile cuts `filename` at a NUL byte.
        name = info.orig_filename
        if not ENTRY_NAME.fullmatch(name):
            raise FileFormatError(f"{path}: entry {name!r} does not belong in an .npz file, expected `<key>.npy` only.")
        if name[:-4] in entries:
            raise FileFormatError(f"{path}: holds the entry {name!r} twice.")
        if info.flag_bits & _ENCRYPTED_OR_PATCHED:
            raise FileFormatError(f"{path}: entry {name!r} is encrypted; save the file without a password.")
        if info.compress_type not in _METHODS:
            raise FileFormatError(
                f"{path}: entry {name!r} is packed with zip method {info.compress_type}; only stored and deflate "
                "are read. Write it again with numpy.savez_compressed."
            )
        entries[name[:-4]] = info
    return entries


class ZipEntryReader:
    """One member of an open archive, unpacked from front to back and never beyond its declared size."""

    def __init__(self, path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> None:
        self._path, self._file, self._info = path, file, info
        self._packed_left = info.compress_size
        self._crc = 0
        self.left = info.file_size
        stored = info.compress_type == zipfile.ZIP_STORED
        self._inflater = None if stored else igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_DEFLATE)
        if stored and info.compress_size != info.file_size:
            raise self.broken("has a packed size unlike its unpacked one although it is stored unpacked")
        self._seek_to_data()

    def fill(self, target: memoryview) -> None:
        """Unpack the next `len(target)` bytes; the caller asks for no more than `left`."""
        filled = 0
        while filled < len(target):
            piece = self._unpack(min(len(target) - filled, 4 * _READ_BYTES))
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
        self.left -= filled
        self._crc = isal_zlib.crc32(target, self._crc)

    def finish(self) -> None:
        """Check that the stream ends where the directory says and that the checksum fits."""
        while self._inflater is not None and not self._inflater.eof:
            if self._inflate(1):
                raise self.broken("inflates to more than the size it declares; the rest was not unpacked")
        if self._crc != self._info.CRC:
            raise self.broken(f"fails its checksum (CRC {self._crc:08x}, expected {self._info.CRC:08x})")

    def broken(self, what: str) -> FileFormatError:
        """The error that names the file and this member."""
        return FileFormatError(f"{self._path}: entry {self._info.orig_filename!r} {what}.")

    def _unpack(self, at_most: int) -> bytes:
        """Between 1 and `at_most` unpacked bytes."""
        if self._inflater is None:
            return self._read_packed(min(at_most, _READ_BYTES))
        while not self._inflater.eof:
            if piece := self._inflate(at_most):
                return piece
        raise self.broken("ends before the size it declares")

    def _inflate(self, at_most: int) -> bytes:
        assert self._inflater is not None
        data = self._read_packed(_READ_BYTES) if self._inflater.needs_input else b""
        try:
            return self._inflater.decompress(data, at_most)
        except _INFLATE_ERRORS as error:
            raise self.broken(f"cannot be inflated ({error})") from error

    def _read_packed(self, at_most: int) -> bytes:
        data = self._file.read(min(at_most, self._packed_left))
        if not data:
            raise self.broken("ends before the size it declares")
        self._packed_left -= len(data)
        return data

    def _seek_to_data(self) -> None:
        try:
            self._file.seek(self._info.header_offset)
            fields = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        except (OSError, ValueError, struct.error) as error:
            raise self.broken("points outside the file") from error
        magic, flags, name_length, extra_length = fields[0], fields[2], fields[9], fields[10]
        name = self._file.read(name_length)
        if magic != b"PK\x03\x04" or name != self._info.orig_filename.encode():
            raise self.broken("is not where the zip directory says it is")
        if flags & _ENCRYPTED_OR_PATCHED:
            raise self.broken("is encrypted")
        self._file.seek(extra_length, io.SEEK_CUR)
