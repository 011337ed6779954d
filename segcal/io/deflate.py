"""Deflate by isal at a level made for speed, with the same bytes for the same data.

Levels 1 and 2 of ISA-L 2.32 mistake the address of their own state for the first bytes of the data when a stream begins
(docs/adr/0012), so that a few of a hundred streams come out packed a little differently. The first bytes therefore make
a block of their own, which another routine packs; what follows does not begin a stream any more.
"""

from __future__ import annotations

from isal import isal_zlib

LEVEL = 1
FIRST_BYTES = 16
"""The most that are left to that other routine; fewer than 4 would leave the beginning to the first one again."""


class Deflate:
    """Packs one raw deflate stream; works in the place of a `zlib.compressobj`."""

    def __init__(self) -> None:
        self._packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, -isal_zlib.MAX_WBITS)
        self._first: bytes | None = b""

    def compress(self, data: bytes | memoryview) -> bytes:
        """Packed bytes of what came before `data` and of a part of it; the rest comes later."""
        if self._first is None:
            return self._packer.compress(data)
        rest = memoryview(data).cast("B")
        missing = FIRST_BYTES - len(self._first)
        self._first += rest[:missing]
        if len(self._first) < FIRST_BYTES:
            return b""
        block = self._packer.compress(self._first) + self._packer.flush(isal_zlib.Z_SYNC_FLUSH)
        self._first = None
        return block + self._packer.compress(rest[missing:])

    def flush(self, mode: int = isal_zlib.Z_FINISH) -> bytes:
        """What is left; with `Z_SYNC_FLUSH` more data may follow."""
        first, self._first = self._first, None
        return (self._packer.compress(first) if first else b"") + self._packer.flush(mode)
