"""What .npz files may do to us: nothing. Broken and hostile files end in a clear error, good ones round trip."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from segcal.errors import FileFormatError, MissingFileError
from segcal.io import zip_reader, zip_writer
from segcal.io.archive import npz_fingerprint, open_npz, read_npz_array, read_npz_header, write_npz

ARRAYS = hnp.arrays(
    dtype=st.sampled_from([np.float16, np.float32, np.float64, np.int16, np.int64, np.uint8, np.bool_]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7),
)
LAYOUTS = [lambda a: a, np.asfortranarray, lambda a: a[..., ::-1] if a.ndim else a]


def npy_bytes(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    return stream.getvalue()


def zip_with(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def patched(path: Path, magic: bytes, offset: int, replacement: bytes) -> None:
    """Overwrite bytes at `offset` behind the first occurrence of a zip record's magic number."""
    content = bytearray(path.read_bytes())
    at = content.index(magic) + offset
    content[at : at + len(replacement)] = replacement
    path.write_bytes(content)


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


@pytest.fixture
def logits() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(3, 5, 6, 7)).astype(np.float16)


@given(array=ARRAYS, layout=st.sampled_from(range(len(LAYOUTS))))
def test_what_is_written_is_read_back_by_us_and_by_numpy(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray[Any, Any], layout: int
) -> None:
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    array = LAYOUTS[layout](array)
    write_npz(path, {"values": array, "crop": np.array([[0, 1], [0, 2], [1, 3]])})

    with np.load(path, allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["values"], array)
        np.testing.assert_array_equal(loaded["crop"], [[0, 1], [0, 2], [1, 3]])
    ours = read_npz_array(path, "values")
    np.testing.assert_array_equal(ours, array)
    assert ours.dtype == array.dtype
    assert read_npz_header(path)["values"].shape == array.shape
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@given(array=ARRAYS, packed=st.booleans(), swapped=st.booleans(), fortran=st.booleans())
def test_files_written_by_numpy_are_read(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray[Any, Any], packed: bool, swapped: bool, fortran: bool
) -> None:
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    stored = array.astype(array.dtype.newbyteorder(">")) if swapped else array
    stored = np.asfortranarray(stored) if fortran else stored
    (np.savez_compressed if packed else np.savez)(path, values=stored)

    ours = read_npz_array(path, "values")

    np.testing.assert_array_equal(ours, array)
    assert ours.dtype == array.dtype
    assert ours.dtype.isnative
    assert ours.flags.writeable


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    write_npz(tmp_path / "a.npz", {"logits": logits})
    write_npz(tmp_path / "b.npz", {"logits": logits.copy()})
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.infolist()[0].date_time == (1980, 1, 1, 0, 0, 0)


def test_archives_beyond_the_limit_of_32_bits_use_zip64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logits: np.ndarray[Any, Any]
) -> None:
    monkeypatch.setattr(zip_writer, "ZIP64_LIMIT", 600)
    path = tmp_path / "large.npz"
    small = np.arange(3, dtype=np.uint8)
    monkeypatch.setattr("segcal.io.archive._HEADER_BYTES", 128)
    write_npz(path, {"logits": logits, "small": small})

    content = path.read_bytes()
    assert b"PK\x06\x06" in content  # zip64 end record
    assert b"PK\x06\x07" in content  # and its locator
    first, second = (i for i in range(len(content)) if content[i : i + 4] == CENTRAL)
    sizes = struct.unpack_from("<2L", content, first + 20)
    assert sizes == (0xFFFFFFFF, 0xFFFFFFFF)  # large member: sizes in the extra field
    assert struct.unpack_from("<L", content, second + 42) == (0xFFFFFFFF,)  # far member: offset in the extra field
    assert struct.unpack_from("<2L", content, second + 20) != (0xFFFFFFFF, 0xFFFFFFFF)
    with np.load(path, allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["logits"], logits)
        np.testing.assert_array_equal(loaded["small"], small)
    np.testing.assert_array_equal(read_npz_array(path, "logits"), logits)
    np.testing.assert_array_equal(read_npz_array(path, "small"), small)


def test_small_archives_are_plain_zip_files(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    write_npz(tmp_path / "a.npz", {"logits": logits})
    assert b"PK\x06\x06" not in (tmp_path / "a.npz").read_bytes()


@pytest.mark.parametrize("packed", [True, False])
def test_a_file_truncated_anywhere_is_refused(tmp_path: Path, logits: np.ndarray[Any, Any], packed: bool) -> None:
    path = tmp_path / "a.npz"
    (np.savez_compressed if packed else np.savez)(path, logits=logits)
    content = path.read_bytes()
    cut = tmp_path / "cut.npz"
    for length in [*range(0, len(content), 13), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(FileFormatError, match=r"cut\.npz"):
            read_npz_array(cut, "logits")


def test_a_flipped_byte_never_gives_other_values(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, logits=logits)
    content = path.read_bytes()
    damaged = tmp_path / "damaged.npz"
    n_refused = 0
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 0x5A
        damaged.write_bytes(changed)
        try:
            values = read_npz_array(damaged, "logits")
        except FileFormatError:
            n_refused += 1
        else:  # dates and attributes may change without harm
            np.testing.assert_array_equal(values, logits)
    assert n_refused > 0.9 * len(range(0, len(content), 3))


class CountingInflater:
    """isal's decompressor that remembers how much it unpacked."""

    unpacked = 0

    def __init__(self, flag: int) -> None:
        self._real = REAL_INFLATER(flag)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece: bytes = self._real.decompress(data, max_length)
        type(self).unpacked += len(piece)
        return piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


REAL_INFLATER = zip_reader.igzip_lib.IgzipDecompressor


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> type[CountingInflater]:
    monkeypatch.setattr(CountingInflater, "unpacked", 0)
    monkeypatch.setattr(zip_reader.igzip_lib, "IgzipDecompressor", CountingInflater)
    return CountingInflater


def test_a_bomb_is_unpacked_only_to_the_size_it_declares(tmp_path: Path, unpacked: type[CountingInflater]) -> None:
    array = np.zeros((1, 2, 3, 4), dtype=np.float32)
    declared = npy_bytes(array)
    path = zip_with(tmp_path / "bomb.npz", {"logits.npy": declared + bytes(50_000_000)})
    crc = struct.pack("<L", zlib.crc32(declared))
    for magic, crc_at, size_at in ((LOCAL, 14, 22), (CENTRAL, 16, 24)):
        patched(path, magic, crc_at, crc)
        patched(path, magic, size_at, struct.pack("<L", len(declared)))

    with pytest.raises(FileFormatError, match=r"bomb\.npz.*more than the size it declares"):
        read_npz_array(path, "logits")
    assert unpacked.unpacked <= len(declared) + 1


def test_a_header_that_declares_too_much_is_refused_before_unpacking(
    tmp_path: Path, unpacked: type[CountingInflater]
) -> None:
    path = tmp_path / "huge.npz"
    np.savez_compressed(path, logits=np.zeros((4, 100, 100, 100), dtype=np.float32))

    with pytest.raises(
        FileFormatError,
        match=r"huge\.npz.*\(4, 100, 100, 100\).*16,000,000 bytes.*limit of 15,999,999.*no option.*smaller type",
    ):
        read_npz_array(path, "logits", limit_bytes=15_999_999)
    assert unpacked.unpacked <= 2**14
    assert read_npz_array(path, "logits", limit_bytes=16_000_000).shape == (4, 100, 100, 100)


def test_a_shape_unlike_the_size_of_the_entry_is_refused_before_unpacking(
    tmp_path: Path, unpacked: type[CountingInflater]
) -> None:
    content = npy_bytes(np.zeros((40, 10), dtype=np.float32)).replace(b"(40, 10)", b"(40, 99)")
    path = zip_with(tmp_path / "a.npz", {"logits.npy": content + bytes(100_000)})
    with pytest.raises(FileFormatError, match="declares 15,840 bytes of data but 101,600 are packed"):
        read_npz_array(path, "logits")
    assert unpacked.unpacked <= 2**14


@pytest.mark.parametrize("shape", ["(-4, 10)", "(True, 9)", "(4.0, 1)", "[40, 10]", "(1" + "," * 5])
def test_an_impossible_shape_is_refused(tmp_path: Path, shape: str) -> None:
    content = npy_bytes(np.zeros((40, 10), dtype=np.float32))
    content = content.replace(b"(40, 10)", shape.encode().ljust(8)[:8])
    path = zip_with(tmp_path / "a.npz", {"logits.npy": content})
    with pytest.raises(FileFormatError, match=r"a\.npz"):
        read_npz_array(path, "logits")


@pytest.mark.parametrize("header", [b"", b"\x93NUMPY", b"\x93NUMPY\x03\x00" + bytes(200), b"{" * 500, b"(" * 9000])
def test_a_damaged_npy_header_is_refused(tmp_path: Path, header: bytes) -> None:
    framed = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    for number, content in enumerate((header, framed)):
        path = zip_with(tmp_path / f"{number}.npz", {"logits.npy": content})
        with pytest.raises(FileFormatError, match="header"):
            read_npz_array(path, "logits")


@pytest.mark.parametrize(
    "array",
    [np.array([{"a": 1}, None], dtype=object), np.array(["text"]), np.zeros(3, dtype="f4,i4"), np.zeros(3, complex)],
    ids=["object", "text", "structured", "complex"],
)
def test_only_plain_numbers_are_read(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    path = zip_with(tmp_path / "a.npz", {"logits.npy": npy_bytes(array)})
    with pytest.raises(FileFormatError, match="plain numbers"):
        read_npz_array(path, "logits")
    with pytest.raises(ValueError, match="plain numbers"):
        write_npz(tmp_path / "b.npz", {"logits": array})


@pytest.mark.parametrize("name", ["../logits.npy", "/logits.npy", "a/b.npy", "logits.txt", "logits", "a b.npy", ".npy"])
def test_names_that_do_not_belong_in_an_npz_are_refused(tmp_path: Path, name: str) -> None:
    path = zip_with(tmp_path / "a.npz", {"logits.npy": npy_bytes(np.zeros(3)), name: b"x"})
    with pytest.raises(FileFormatError, match="does not belong"):
        read_npz_array(path, "logits")


def test_a_name_hidden_behind_a_nul_byte_is_refused(tmp_path: Path) -> None:
    path = zip_with(tmp_path / "a.npz", {"logits.npyXevil": npy_bytes(np.zeros(3))})
    path.write_bytes(path.read_bytes().replace(b"logits.npyX", b"logits.npy\0"))
    with pytest.raises(FileFormatError, match="does not belong"):
        read_npz_array(path, "logits")


def test_too_many_or_no_entries_are_refused(tmp_path: Path) -> None:
    content = npy_bytes(np.zeros(3))
    many = zip_with(tmp_path / "many.npz", {f"a{n}.npy": content for n in range(zip_reader.MAX_ENTRIES + 1)})
    with pytest.raises(FileFormatError, match="65 entries"):
        read_npz_array(many, "a0")
    with pytest.raises(FileFormatError, match="0 entries"):
        read_npz_array(zip_with(tmp_path / "none.npz", {}), "a0")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("logits.npy", npy_bytes(np.zeros(3)))
        archive.writestr("logits.npy", npy_bytes(np.ones(3)))
    with pytest.raises(FileFormatError, match="twice"):
        read_npz_array(path, "logits")


@pytest.mark.parametrize(("magic", "offset"), [(LOCAL, 6), (CENTRAL, 8)], ids=["local", "directory"])
def test_an_encrypted_entry_is_refused(tmp_path: Path, magic: bytes, offset: int) -> None:
    path = zip_with(tmp_path / "a.npz", {"logits.npy": npy_bytes(np.zeros(3))})
    patched(path, magic, offset, b"\x01\x00")
    with pytest.raises(FileFormatError, match="encrypted"):
        read_npz_array(path, "logits")


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_packing_methods_are_refused(tmp_path: Path, method: int) -> None:
    path = zip_with(tmp_path / "a.npz", {"logits.npy": npy_bytes(np.zeros(3))}, method)
    with pytest.raises(FileFormatError, match=f"method {method}"):
        read_npz_array(path, "logits")


def test_a_directory_that_names_another_entry_is_refused(tmp_path: Path) -> None:
    path = zip_with(tmp_path / "a.npz", {"logits.npy": npy_bytes(np.zeros(3))})
    patched(path, LOCAL, 30, b"labels")
    with pytest.raises(FileFormatError, match="not where the zip directory says"):
        read_npz_array(path, "logits")


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    path = zip_with(tmp_path / "a.npz", {"logits.npy": npy_bytes(np.zeros(3))}, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(bytes(24), bytes(23) + b"\x40", 1))
    with pytest.raises(FileFormatError, match=r"a\.npz: entry 'logits\.npy' fails its checksum"):
        read_npz_array(path, "logits")


def test_verifying_refuses_what_reading_refuses(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, {"logits": logits})
    whole = path.read_bytes()
    n_refused = 0
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        refusals = []
        for verify in (False, True):
            try:
                with open_npz(path) as reader:
                    if verify:
                        reader.verify("logits")
                    else:
                        reader.array("logits")
                refusals.append("")
            except FileFormatError as error:
                refusals.append(str(error))
        assert refusals[0] == refusals[1]
        n_refused += bool(refusals[0])
    assert n_refused > 10


def test_verifying_holds_a_few_megabytes_of_a_large_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, {"logits": np.zeros((3, 32, 512, 512), dtype=np.float32)})
    with open_npz(path) as reader:
        tracemalloc.start()
        try:
            reader.verify("logits")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 16 << 20 < 3 * 32 * 512 * 512 * 4


def test_missing_files_keys_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        read_npz_array(tmp_path / "nowhere.npz", "logits")
    with pytest.raises(FileFormatError, match=tmp_path.name):
        read_npz_array(tmp_path, "logits")
    write_npz(tmp_path / "a.npz", {"labels": np.zeros(3)})
    with pytest.raises(FileFormatError, match="no array `logits`, only `labels`"):
        read_npz_array(tmp_path / "a.npz", "logits")
    with pytest.raises(ValueError, match="cannot be the name"):
        write_npz(tmp_path / "b.npz", {"../evil": np.zeros(3)})


def test_many_threads_read_the_same_and_other_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(2, 8, 30, 30 + n)).astype(np.float32) for n in range(6)]
    for n, array in enumerate(arrays):
        write_npz(tmp_path / f"{n}.npz", {"logits": array})
    with ThreadPoolExecutor(8) as executor:
        read = list(executor.map(lambda n: read_npz_array(tmp_path / f"{n % 6}.npz", "logits"), range(120)))
    for n, values in enumerate(read):
        np.testing.assert_array_equal(values, arrays[n % 6])


def test_reading_holds_one_copy_of_the_array(tmp_path: Path) -> None:
    array = np.random.default_rng(2).normal(size=(4, 20, 200, 200)).astype(np.float32)
    path = tmp_path / "a.npz"
    write_npz(path, {"logits": array})
    tracemalloc.start()
    try:
        values = read_npz_array(path, "logits")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert values.nbytes <= peak < 1.3 * values.nbytes


def test_writing_makes_no_second_copy_of_the_array(tmp_path: Path) -> None:
    array = np.zeros((4, 150, 300, 300), dtype=np.float32)
    tracemalloc.start()
    try:
        write_npz(tmp_path / "a.npz", {"logits": array})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.4 * array.nbytes


def test_the_fingerprint_follows_the_content(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, {"logits": logits})
    first = npz_fingerprint(path)
    write_npz(path, {"logits": logits.copy()})
    assert npz_fingerprint(path) == first
    logits[0, 0, 0, 0] += 1
    write_npz(path, {"logits": logits})
    assert npz_fingerprint(path) != first


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are of POSIX")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    # Were it opened, this would hang: hold a writer so that opening returns and the test fails instead.
    writer = os.open(tmp_path / "a.npz", os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"PK")
    try:
        with pytest.raises(FileFormatError, match=r"a\.npz: is neither a file nor a link to one"):
            read_npz_header(tmp_path / "a.npz")
    finally:
        os.close(writer)
