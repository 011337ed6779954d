"""Label maps and images of every format on one grid: values, axes and world coordinates."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from segcal.errors import DataError, FileFormatError, MissingFileError
from segcal.io.images import read_grid, read_image, read_labels


def oblique(seed: int) -> np.ndarray[Any, Any]:
    """A random rotation, improper ones included."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return q


def sitk_image(values: np.ndarray[Any, Any], seed: int = 0) -> SimpleITK.Image:
    image = SimpleITK.GetImageFromArray(values)
    image.SetDirection(oblique(seed).ravel().tolist())
    image.SetSpacing((0.7, 1.3, 2.9))
    image.SetOrigin((-41.0, 12.5, 88.0))
    return image


@pytest.fixture
def labels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 4, size=(4, 5, 6)).astype(np.uint8)


@pytest.mark.parametrize("ending", [".nii", ".nii.gz", ".nrrd", ".mha", ".mhd", ".gipl"])
def test_labels_of_simpleitk_are_read_in_every_format(
    tmp_path: Path, labels: np.ndarray[Any, Any], ending: str
) -> None:
    path = tmp_path / f"case{ending}"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(labels), str(path))
    found = read_labels(path)
    np.testing.assert_array_equal(found.values, labels)
    assert found.values.dtype.kind in "iu"
    assert found.grid.shape == read_grid(path).shape == (4, 5, 6)


@given(seed=st.integers(0, 10_000))
def test_an_oblique_image_of_simpleitk_lies_where_nibabel_says(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("oblique")
    image = sitk_image(np.zeros((3, 4, 5), dtype=np.int16), seed)
    SimpleITK.WriteImage(image, str(folder / "a.nii.gz"))
    SimpleITK.WriteImage(image, str(folder / "a.nrrd"))

    by_nibabel = nib.load(folder / "a.nii.gz").affine
    for name in ("a.nii.gz", "a.nrrd"):
        grid = read_labels(folder / name).grid
        np.testing.assert_allclose(grid.affine, by_nibabel, atol=1e-4)
        np.testing.assert_array_equal(read_grid(folder / name).affine, grid.affine)
    # And voxel by voxel: the same point in ITK's LPS world, x and y turned.
    index = (4, 1, 2)
    itk = np.array(image.TransformIndexToPhysicalPoint(index)) * [-1, -1, 1]
    affine = read_grid(folder / "a.nrrd").affine
    assert affine is not None
    np.testing.assert_allclose((affine @ [*index, 1])[:3], itk, atol=1e-9)


def test_an_oblique_image_of_nibabel_survives_simpleitk(tmp_path: Path, labels: np.ndarray[Any, Any]) -> None:
    affine = np.eye(4)
    affine[:3, :3] = oblique(7) @ np.diag([0.7, 1.3, 2.9])
    affine[:3, 3] = [10, -20, 30]
    nib.save(nib.Nifti1Image(labels.T, affine), tmp_path / "a.nii.gz")
    SimpleITK.WriteImage(SimpleITK.ReadImage(str(tmp_path / "a.nii.gz")), str(tmp_path / "b.mha"))

    first, second = read_labels(tmp_path / "a.nii.gz"), read_labels(tmp_path / "b.mha")

    np.testing.assert_array_equal(first.values, labels)
    np.testing.assert_array_equal(second.values, labels)
    np.testing.assert_allclose(first.grid.affine, affine, atol=1e-5)
    np.testing.assert_allclose(second.grid.affine, affine, atol=1e-4)
    assert first.grid.agrees_with(second.grid)


def test_a_sheared_nifti_that_itk_refuses_is_read(tmp_path: Path, labels: np.ndarray[Any, Any]) -> None:
    affine = np.array([[1, 0.4, 0, 0], [0, 1, 0, 0], [0, 0, 2.0, 0], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(labels.T, affine), tmp_path / "a.nii.gz")
    found = read_labels(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(found.values, labels)
    np.testing.assert_allclose(found.grid.affine, affine, atol=1e-6)


@pytest.mark.parametrize("ending", [".nii.gz", ".nrrd"])
def test_labels_stored_as_floats_must_be_whole_numbers(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"case{ending}"
    values = np.array([[[0.0, 1.0], [2.0, 3.0]]], dtype=np.float32)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(path))
    found = read_labels(path)
    assert found.values.dtype.kind == "i"
    np.testing.assert_array_equal(found.values, values)
    for bad in (0.5, np.nan, np.inf, 1e20):
        values[0, 0, 1] = bad
        SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(path))
        with pytest.raises(DataError, match=r"case.*not whole numbers in 1 voxel,.*nearest neighbour"):
            read_labels(path)


def test_a_4d_label_with_one_channel_is_a_label_and_with_two_is_not(
    tmp_path: Path, labels: np.ndarray[Any, Any]
) -> None:
    nib.save(nib.Nifti1Image(labels.T[..., np.newaxis], np.eye(4)), tmp_path / "one.nii.gz")
    np.testing.assert_array_equal(read_labels(tmp_path / "one.nii.gz").values, labels)
    nib.save(nib.Nifti1Image(np.stack([labels.T] * 2, axis=-1), np.eye(4)), tmp_path / "two.nii.gz")
    SimpleITK.WriteImage(
        SimpleITK.GetImageFromArray(np.stack([labels] * 2, -1), isVector=True), str(tmp_path / "v.mha")
    )
    for name in ("two.nii.gz", "v.mha"):
        with pytest.raises(DataError, match=f"{name}: has 2 channels"):
            read_labels(tmp_path / name)


def write_gray_png(path: Path, values: np.ndarray[Any, Any], bits: int) -> None:
    """A gray PNG of any bit depth, written by hand because Pillow writes 1, 8 and 16 only."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">L", len(content)) + name + content + struct.pack(">L", zlib.crc32(name + content))

    height, width = values.shape
    rows = b""
    for row in values:
        text = "".join(f"{int(value):0{bits}b}" for value in row)
        text += "0" * (-len(text) % 8)
        rows += b"\0" + int(text, 2).to_bytes(len(text) // 8)
    header = struct.pack(">2L5B", width, height, bits, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_gray_png_labels_of_every_bit_depth(tmp_path: Path, bits: int) -> None:
    values = np.random.default_rng(bits).integers(0, 2**bits, size=(5, 7))
    write_gray_png(tmp_path / "a.png", values, bits)
    found = read_labels(tmp_path / "a.png")
    np.testing.assert_array_equal(found.values, values[np.newaxis])
    assert found.values.dtype.kind in "iu"
    assert found.grid.shape == read_grid(tmp_path / "a.png").shape == (1, 5, 7)
    assert found.grid.affine is None


@pytest.mark.parametrize("n_colours", [2, 4, 16, 200])
def test_labels_of_an_image_with_a_palette_are_the_indices(tmp_path: Path, n_colours: int) -> None:
    values = np.random.default_rng(0).integers(0, n_colours, size=(5, 7)).astype(np.uint8)
    image = Image.new("P", (7, 5))
    image.putdata(values.ravel().tolist())
    image.putpalette(np.random.default_rng(1).integers(0, 255, size=3 * n_colours).tolist())
    for name in ("a.png", "a.bmp"):
        image.save(tmp_path / name)
        np.testing.assert_array_equal(read_labels(tmp_path / name).values, values[np.newaxis])


def test_colour_png_is_a_picture_but_no_label(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, size=(5, 7, 3)).astype(np.uint8)
    Image.fromarray(values).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png.*colour image \(RGB\)"):
        read_labels(tmp_path / "a.png")
    picture = read_image(tmp_path / "a.png")
    assert picture.values.dtype == np.float32
    np.testing.assert_array_equal(picture.values, values.transpose(2, 0, 1)[:, np.newaxis])


def test_flat_images_without_geometry_have_none(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 5, size=(5, 7)).astype(np.uint8)
    volume = np.random.default_rng(0).integers(0, 5, size=(3, 5, 7)).astype(np.uint8)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(tmp_path / "a.tif"))
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(volume), str(tmp_path / "b.tif"))
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(tmp_path / "a.bmp"))
    for name, expected in (("a.tif", values[np.newaxis]), ("a.bmp", values[np.newaxis]), ("b.tif", volume)):
        found = read_labels(tmp_path / name)
        np.testing.assert_array_equal(found.values, expected)
        assert found.grid.affine is None


def test_images_become_channels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 4, 5, 6)).astype(np.float32)
    nib.save(nib.Nifti1Image(values.transpose(3, 2, 1, 0), np.eye(4)), tmp_path / "a.nii.gz")
    vector = SimpleITK.GetImageFromArray(values.transpose(1, 2, 3, 0), isVector=True)
    SimpleITK.WriteImage(vector, str(tmp_path / "a.mha"))
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values, isVector=False), str(tmp_path / "a.nrrd"))
    for name in ("a.nii.gz", "a.mha", "a.nrrd"):
        np.testing.assert_array_equal(read_image(tmp_path / name).values, values)
    SimpleITK.WriteImage(sitk_image(values[0].astype(np.int16)), str(tmp_path / "b.mha"))
    single = read_image(tmp_path / "b.mha")
    np.testing.assert_array_equal(single.values, values[:1].astype(np.int16))
    assert single.values.dtype == np.float32


@pytest.mark.parametrize("name", ["a.png", "a.nrrd", "a.mha", "a.nii.gz", "a.xyz"])
def test_files_that_are_no_images_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is no image" * 100)
    for read in (read_labels, read_image, read_grid):
        with pytest.raises(FileFormatError, match=name):
            read(tmp_path / name)
        with pytest.raises(MissingFileError, match="nowhere"):
            read(tmp_path / f"nowhere_{name}")


def content_end(path: Path) -> int:
    """Bytes that matter: the last 12 of a PNG are an end marker without content."""
    return path.stat().st_size - (12 if path.suffix == ".png" else 0)


@pytest.mark.parametrize("ending", [".png", ".mha", ".nii.gz"])
def test_truncated_images_are_refused(tmp_path: Path, labels: np.ndarray[Any, Any], ending: str) -> None:
    path = tmp_path / f"a{ending}"
    values = labels[0] if ending == ".png" else labels
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(values), str(path))
    content = path.read_bytes()
    for length in (content_end(path) - 1, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(FileFormatError, match=path.name):
            read_labels(path)


@pytest.mark.parametrize("ending", [".png", ".nii.gz"])
def test_a_flipped_byte_in_a_label_map_is_noticed(tmp_path: Path, labels: np.ndarray[Any, Any], ending: str) -> None:
    path = tmp_path / f"a{ending}"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(labels[0] if ending == ".png" else labels), str(path))
    content = path.read_bytes()
    for position in range(len(content) // 2, content_end(path)):
        changed = bytearray(content)
        changed[position] ^= 0x21
        path.write_bytes(changed)
        with pytest.raises(FileFormatError, match=path.name):
            read_labels(path)


@pytest.mark.parametrize("ending", [".png", ".mha", ".nii.gz"])
def test_the_limit_is_checked_before_voxels_are_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    shape = (100, 100) if ending == ".png" else (10, 100, 100)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(np.zeros(shape, dtype=np.uint8)), str(path))
    with pytest.raises(FileFormatError, match="limit"):
        read_labels(path, limit_bytes=9_999)


def test_real_labels_and_images_share_a_grid(hippocampus: Path) -> None:
    labels = read_labels(min((hippocampus / "labels").glob("*.nii.gz")))
    picture = read_image(min((hippocampus / "images").glob("*.nii.gz")))
    assert labels.grid.agrees_with(picture.grid)
    assert picture.values.shape == (1, *labels.values.shape)
    by_itk = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(min((hippocampus / "labels").glob("*.nii.gz")))))
    np.testing.assert_array_equal(labels.values, by_itk)
