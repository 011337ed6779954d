"""Unpacked layers, kept for the next slice: as many as fit into a number of bytes, the longest unused ones go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.io.archive import AnyArray
from segcal.io.nifti import read_nifti
from segcal.service.errors import UnknownError

CACHE_BYTES = 256 * 2**20
"""About 14 volumes of BraTS size, two bytes a voxel."""

_Key: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """A layer in memory, as stored.

    Attributes:
        stored: (z, y, x).
        slope, intercept: stored numbers stand for `slope * stored + intercept`.
        affine: voxel (x, y, z) to world.
    """

    stored: AnyArray
    slope: float
    intercept: float
    affine: NDArray[np.float64]

    def values(self, part: AnyArray) -> NDArray[np.float32]:
        """What a part of `stored` stands for."""
        return part.astype(np.float32) * np.float32(self.slope) + np.float32(self.intercept)


class LayerCache:
    """Volumes by file; many threads may ask at once, and a file that several want is read once."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Volume] = OrderedDict()
        self._reading: dict[_Key, Future[Volume]] = {}

    @property
    def nbytes(self) -> int:
        """What is held at the moment."""
        with self._lock:
            return self._held()

    def get(self, path: Path) -> Volume:
        """The volume of a file; a file that was written anew is read anew.

        Raises:
            UnknownError: there is no such file.
        """
        try:
            state = path.stat()
        except OSError:
            raise UnknownError(f"{path.name}: this layer is not there; its job may have been cleaned up") from None
        key = (str(path), state.st_mtime_ns, state.st_size)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            running = self._reading.get(key)
            mine: Future[Volume] | None = None
            if running is None:
                mine = self._reading[key] = Future()
        if running is not None:
            return running.result()
        assert mine is not None
        return self._read(path, key, mine)

    def _read(self, path: Path, key: _Key, result: Future[Volume]) -> Volume:
        """Reads for everybody who waits; what goes wrong goes wrong for all of them."""
        try:
            stored, header = read_nifti(path)
            volume = Volume(stored, header.slope, header.intercept, header.affine)
        except BaseException as error:
            with self._lock:
                del self._reading[key]
            result.set_exception(error)
            raise
        with self._lock:
            del self._reading[key]
            self._kept[key] = volume
            while self._held() > self._max_bytes and len(self._kept) > 1:
                self._kept.popitem(last=False)
        result.set_result(volume)
        return volume

    def _held(self) -> int:
        return sum(volume.stored.nbytes for volume in self._kept.values())
