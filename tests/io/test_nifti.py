"""NIfTI in and out: the order of the axes, the affine, scaled integers, and files that are broken."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from segcal.errors import FileFormatError, MissingFileError
from segcal.io import nifti
from segcal.io.nifti import check_whole, nifti_fingerprint, read_nifti, read_nifti_header, scaled_values, write_nifti

AFFINE = np.array([[-0.9, 0.1, 0.0, 40.0], [0.1, 0.8, 0.2, -30.0], [0.0, -0.2, 2.5, 7.5], [0.0, 0.0, 0.0, 1.0]])
VOLUMES = hnp.arrays(
    dtype=st.sampled_from([np.float32, np.float64, np.int16, np.uint8, np.uint16, np.int32]),
    shape=hnp.array_shapes(min_dims=3, max_dims=4, min_side=1, max_side=6),
)


@given(values=VOLUMES, ending=st.sampled_from([".nii", ".nii.gz"]))
def test_what_is_written_is_read_back_by_us_and_transposed_by_nibabel(
    tmp_path_factory: pytest.TempPathFactory, values: np.ndarray[Any, Any], ending: str
) -> None:
    path = tmp_path_factory.mktemp("nii") / f"case{ending}"
    write_nifti(path, values, affine=AFFINE)

    ours, header = read_nifti(path)
    np.testing.assert_array_equal(ours, values)
    assert ours.dtype == values.dtype
    assert ours.flags.c_contiguous
    assert not header.scaled
    np.testing.assert_allclose(header.affine, AFFINE, atol=1e-6)
    assert header.grid.shape == values.shape[-3:]

    theirs = nib.load(path)
    np.testing.assert_array_equal(np.asanyarray(theirs.dataobj), values.T)
    np.testing.assert_allclose(theirs.affine, AFFINE, atol=1e-6)
    assert theirs.header.get_xyzt_units()[0] == "mm"


@pytest.mark.parametrize("image", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_files_of_nibabel_are_read_in_either_version_and_byte_order(
    tmp_path: Path, image: Any, swapped: bool, ending: str
) -> None:
    values = np.random.default_rng(0).normal(size=(4, 5, 6, 3)).astype(np.float32)
    header = image.header_class(endianness=">" if swapped else "<")
    header.set_data_dtype(np.float32)
    header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"x" * 1000))
    nib.save(image(values, AFFINE, header), tmp_path / f"a{ending}")

    ours, found = read_nifti(tmp_path / f"a{ending}")

    np.testing.assert_array_equal(ours, values.transpose(3, 2, 1, 0))
    assert ours.dtype.isnative
    np.testing.assert_allclose(found.affine, AFFINE, atol=1e-6)


def test_a_flat_image_gets_a_z_axis(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.int16).reshape(4, 3)
    nib.save(nib.Nifti1Image(values, np.eye(4)), tmp_path / "a.nii")
    ours, _ = read_nifti(tmp_path / "a.nii")
    np.testing.assert_array_equal(ours, values.T[np.newaxis])


def test_scaled_integers_mean_what_nibabel_says(tmp_path: Path) -> None:
    probabilities = np.random.default_rng(1).random((3, 4, 5, 6)).astype(np.float32)
    path = tmp_path / "a.nii.gz"
    write_nifti(path, probabilities, affine=AFFINE, scale=1 / 65535)

    stored, header = read_nifti(path)
    assert stored.dtype == np.uint16
    assert header.slope == pytest.approx(1 / 65535)
    values = scaled_values(stored, header)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, np.asanyarray(nib.load(path).dataobj).T, rtol=1e-6)
    np.testing.assert_allclose(values, probabilities, atol=0.51 / 65535)


def test_integers_handed_in_with_a_scale_are_stored_as_they_are(tmp_path: Path) -> None:
    levels = np.array([[[0, 1, 65534, 65535]]], dtype=np.uint16)
    write_nifti(tmp_path / "a.nii", levels, affine=None, scale=1 / 65535)
    stored, header = read_nifti(tmp_path / "a.nii")
    np.testing.assert_array_equal(stored, levels)
    assert scaled_values(stored, header)[0, 0].tolist() == pytest.approx([0, 1 / 65535, 65534 / 65535, 1])


@pytest.mark.parametrize("bad", [-0.1, 1.5, np.nan])
def test_values_that_do_not_fit_the_integers_are_refused(tmp_path: Path, bad: float) -> None:
    values = np.full((2, 2, 2), 0.5, dtype=np.float32)
    values[0, 1, 0] = bad
    with pytest.raises(ValueError, match="cannot be stored"):
        write_nifti(tmp_path / "a.nii", values, affine=None, scale=1 / 65535)


def test_half_precision_is_refused_because_nifti_has_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no float16"):
        write_nifti(tmp_path / "a.nii", np.zeros((2, 2, 2), dtype=np.float16), affine=None)


def test_the_same_values_give_the_same_bytes(tmp_path: Path) -> None:
    values = np.random.default_rng(2).normal(size=(4, 5, 6)).astype(np.float32)
    write_nifti(tmp_path / "a.nii.gz", values, affine=AFFINE)
    write_nifti(tmp_path / "b.nii.gz", values.copy(), affine=AFFINE)
    assert (tmp_path / "a.nii.gz").read_bytes() == (tmp_path / "b.nii.gz").read_bytes()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "a.nii.gz"
    write_nifti(path, np.random.default_rng(3).normal(size=(3, 4, 5)).astype(np.float32), affine=AFFINE)
    return path


def test_a_file_that_begins_otherwise_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.nii").write_bytes(b"\xff" * 400)
    with pytest.raises(FileFormatError, match="damaged \\(it does not begin as a header does\\)"):
        read_nifti_header(tmp_path / "a.nii")


def test_a_file_truncated_anywhere_is_refused(tmp_path: Path, packed: Path) -> None:
    plain = gzip.decompress(packed.read_bytes())
    for name, content in (("cut.nii.gz", packed.read_bytes()), ("cut.nii", plain)):
        for length in [*range(0, len(content), 7), len(content) - 1]:
            (tmp_path / name).write_bytes(content[:length])
            with pytest.raises(FileFormatError, match="cut"):
                read_nifti(tmp_path / name)
            with pytest.raises(FileFormatError, match="cut"):
                check_whole(tmp_path / name)
        (tmp_path / name).write_bytes(content)
        check_whole(tmp_path / name)


def test_a_flipped_byte_in_the_packed_voxels_is_noticed(tmp_path: Path, packed: Path) -> None:
    good, _ = read_nifti(packed)
    content = packed.read_bytes()
    path = tmp_path / "damaged.nii.gz"
    for position in range(len(content) // 2, len(content)):
        changed = bytearray(content)
        changed[position] ^= 0x21
        path.write_bytes(changed)
        with pytest.raises(FileFormatError, match="damaged"):
            read_nifti(path)
    assert good.shape == (3, 4, 5)


def with_header(path: Path, offset: int, layout: str, *values: float) -> None:
    content = bytearray(gzip.decompress(path.read_bytes()))
    struct.pack_into(layout, content, offset, *values)
    path.write_bytes(gzip.compress(bytes(content)))


def test_more_data_than_declared_is_refused_and_left_packed(packed: Path) -> None:
    packed.write_bytes(gzip.compress(gzip.decompress(packed.read_bytes()) + bytes(30_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="more data than its header declares"):
            read_nifti(packed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_a_header_that_declares_too_much_is_refused_before_unpacking(packed: Path) -> None:
    with_header(packed, 40, "<8h", 4, 30000, 30000, 30000, 5, 1, 1, 1)
    with pytest.raises(FileFormatError, match=r"\(5, 30000, 30000, 30000\).*limit.*no option.*smaller type"):
        read_nifti(packed)


@pytest.mark.parametrize(
    ("offset", "layout", "values"),
    [
        (0, "<i", (349,)),
        (40, "<8h", (3, 5, -4, 3, 1, 1, 1, 1)),
        (40, "<8h", (5, 5, 4, 3, 2, 2, 1, 1)),
        (70, "<h", (9999,)),
        (70, "<h", (128,)),  # RGB
        (70, "<h", (32,)),  # complex
        (108, "<f", (3e9,)),
        (280, "<f", (float("nan"),)),
        (344, "<4s", (b"ni1\0",)),
    ],
    ids=["size", "negative", "5-d", "dtype", "colour", "complex", "offset", "affine", "pair"],
)
def test_a_damaged_header_is_refused(packed: Path, offset: int, layout: str, values: tuple[Any, ...]) -> None:
    with_header(packed, offset, layout, *values)
    with pytest.raises(FileFormatError, match=r"a\.nii\.gz"):
        read_nifti(packed)


def test_reading_holds_one_copy_of_the_voxels(tmp_path: Path) -> None:
    values = np.random.default_rng(4).normal(size=(4, 20, 200, 200)).astype(np.float32)
    write_nifti(tmp_path / "a.nii.gz", values, affine=AFFINE)
    tracemalloc.start()
    try:
        read, _ = read_nifti(tmp_path / "a.nii.gz")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read.nbytes <= peak < 1.3 * read.nbytes


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        read_nifti_header(tmp_path / "nowhere.nii.gz")


def test_files_of_several_gzip_members_are_read(packed: Path) -> None:
    good, _ = read_nifti(packed)
    plain = gzip.decompress(packed.read_bytes())
    packed.write_bytes(gzip.compress(plain[:400]) + gzip.compress(plain[400:]) + gzip.compress(b""))
    again, _ = read_nifti(packed)
    np.testing.assert_array_equal(again, good)


@pytest.mark.parametrize("ending", [".nii", ".nii.gz", "block"])
def test_the_fingerprint_follows_the_content(tmp_path: Path, ending: str) -> None:
    path = tmp_path / ("a.nii" if ending == ".nii" else "a.nii.gz")

    def save(value: float) -> str:
        write_nifti(path, np.full((3, 4, 5), value, dtype=np.float32), affine=AFFINE)
        if ending == "block":
            path.write_bytes(path.read_bytes() + gzip.compress(b"", mtime=0))
        return nifti_fingerprint(path)

    first = save(1.0)
    assert save(1.0) == first
    assert save(2.0) != first


def test_the_fingerprint_of_a_packed_file_unpacks_nothing(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the file was unpacked")

    monkeypatch.setattr(nifti, "_GzipFile", never)
    assert nifti_fingerprint(packed).startswith("nii.gz:")


def test_real_labels_are_read_as_nibabel_reads_them(hippocampus: Path) -> None:
    path = min((hippocampus / "labels").glob("*.nii.gz"))
    ours, header = read_nifti(path)
    theirs = nib.load(path)
    np.testing.assert_array_equal(scaled_values(ours, header), np.asanyarray(theirs.dataobj).T)
    np.testing.assert_array_equal(header.affine, theirs.affine)
