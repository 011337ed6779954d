"""Packing: every reader unpacks it, and the bytes depend on the data alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from segcal.io.archive import write_npz
from segcal.io.deflate import Deflate
from segcal.io.nifti import write_nifti

PLACES = 250
"""In memory; a stream that isal begins by itself comes out differently in about six of a hundred of them."""


def bin_tables() -> np.ndarray:
    """Tables as bins.npz holds them: mostly empty, so that packing hangs on few entries of isal's search table."""
    rng = np.random.default_rng(0)
    tables = np.zeros((8, 300, 3, 50))
    tables[:, :, 0, 0] = 36
    tables[:, :, 1, 0] = rng.random((8, 300)) / 300
    tables[:, :, 2, 0] = rng.random((8, 300)) < 0.1
    return tables


def packed_everywhere(pack: Callable[[], bytes]) -> set[bytes]:
    """What comes out when compressors lie at other and other places."""
    kept, outputs = [], set()
    for _ in range(PLACES):
        kept.append(isal_zlib.compressobj(1, isal_zlib.DEFLATED, -isal_zlib.MAX_WBITS))
        outputs.add(pack())
    return outputs


def test_the_bytes_do_not_depend_on_the_place_in_memory() -> None:
    data = bin_tables().tobytes()

    def pack() -> bytes:
        packer = Deflate()
        return packer.compress(data) + packer.flush()

    assert len(packed_everywhere(pack)) == 1


@pytest.mark.parametrize("name", ["tables.npz", "tables.nii.gz"])
def test_written_files_do_not_depend_on_it_either(tmp_path: Path, name: str) -> None:
    tables = bin_tables()

    def write() -> bytes:
        path = tmp_path / name
        if name.endswith(".npz"):
            write_npz(path, {"tables": tables})
        else:
            write_nifti(path, tables.reshape(8, 300, 3, 50), affine=None)
        return path.read_bytes()

    assert len(packed_everywhere(write)) == 1


@given(st.lists(st.binary(max_size=40), max_size=6), st.booleans())
def test_any_pieces_unpack_to_what_they_were(pieces: list[bytes], synced: bool) -> None:
    packer = Deflate()

    packed = b"".join(packer.compress(piece) for piece in pieces)
    packed += packer.flush(isal_zlib.Z_SYNC_FLUSH) + packer.compress(b"more") if synced else b""
    packed += packer.flush()

    assert zlib.decompress(packed, -zlib.MAX_WBITS) == b"".join(pieces) + b"more" * synced
