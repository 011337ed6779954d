"""Slices drawn by the server: the right voxels, the right way up, in the right colours."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from segcal.errors import FileFormatError, ParameterError
from segcal.report.palette import class_colours
from segcal.service.errors import UnknownError
from segcal.service.web.layers import LayerCache
from segcal.service.web.slices import DIMMED, FILL, NO_IMAGE, SliceStyle, draw_slice, share_colours
from segcal.service.web.view import AXES, Axis, read_view, slice_orientation
from tests.service.view_data import SHAPE, affine_of, volumes, write_view

CODES = ["RAS", "LPS", "LAS", "RPI", "PIR", "SRA", "ASL"]
SIZE = 24 * 5
"""Pixels: a whole number of them for every voxel along each side of every slice."""


def pixels(png: bytes) -> NDArray[np.uint8]:
    """(row, column, 3)."""
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


def one_per_voxel(picture: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.uint8]:
    """The pixel in the middle of each voxel."""
    height, width = picture.shape[:2]
    at = [((np.arange(n) + 0.5) * pixels / n).astype(int) for n, pixels in ((rows, height), (columns, width))]
    return picture[at[0][:, None], at[1]]


def body_position(code: str, zyx: tuple[int, int, int]) -> dict[str, int]:
    """How far a voxel lies towards the patient's left, back and feet."""
    found = {}
    for letter, place in zip(code, zyx[::-1], strict=True):
        towards, sign = {"L": ("L", 1), "R": ("L", -1), "P": ("P", 1), "A": ("P", -1), "I": ("I", 1), "S": ("I", -1)}[
            letter
        ]
        found[towards] = sign * place
    return found


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("axis", AXES)
def test_every_voxel_lies_where_a_radiologist_looks_for_it(tmp_path: Path, code: str, axis: Axis) -> None:
    """Columns run to the patient's left (sagittal: to the back), rows to the feet (axial: to the back)."""
    image = write_view(tmp_path, affine_of(code))["image"]
    index = 1
    across = AXES.index(axis)
    side = [n for k, n in enumerate(SHAPE) if k != across]
    # The axes that remain, by the side of the body they run along; code[2 - k] belongs to array axis k.
    plane = {"L": "sagittal", "R": "sagittal", "A": "coronal", "P": "coronal", "S": "axial", "I": "axial"}[
        code[2 - across]
    ]
    column, row = {"axial": ("L", "P"), "coronal": ("L", "I"), "sagittal": ("P", "I")}[plane]

    places: dict[int, tuple[int, int]] = {}
    for zyx in np.ndindex(*SHAPE):
        if zyx[across] == index:
            where = body_position(code, (zyx[0], zyx[1], zyx[2]))
            places[int(image[zyx])] = (where[row], where[column])
    order = sorted(places, key=places.__getitem__)
    n_rows = len({place[0] for place in places.values()})
    expected = np.array(order).reshape(n_rows, -1)
    assert sorted(expected.shape) == sorted(side)

    picture = pixels(draw_slice(tmp_path, "image", axis, index, SliceStyle(low=0, high=119)))
    seen = one_per_voxel(picture, *expected.shape)
    np.testing.assert_array_equal(seen[:, :, 0], np.rint(255 * (expected.astype(np.float32) / np.float32(119))))
    assert slice_orientation(affine_of(code), axis).plane == plane


def test_without_any_turn_a_slice_is_the_array(tmp_path: Path) -> None:
    """LPS is how radiological pictures lie already, so the axial slice is `volume[index]` to the pixel."""
    image = write_view(tmp_path, affine_of("LPS"))["image"]
    picture = one_per_voxel(pixels(draw_slice(tmp_path, "image", "z", 2)), 5, 6)
    np.testing.assert_array_equal(picture[:, :, 1], np.rint(255 * (image[2].astype(np.float32) / np.float32(119))))


def test_millimetres_are_square(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("LPS", (1.0, 2.0, 3.0)))
    sizes = {axis: pixels(draw_slice(tmp_path, "image", axis, 0, SliceStyle(size=300))).shape[:2] for axis in AXES}
    assert sizes == {"z": (300, 180), "y": (300, 150), "x": (300, 250)}  # 10 x 6, 12 x 6 and 12 x 10 mm


def test_the_window_ends_are_black_and_white_and_what_lies_beyond_is_cut(tmp_path: Path) -> None:
    image = write_view(tmp_path, affine_of("LPS"))["image"]
    seen = one_per_voxel(pixels(draw_slice(tmp_path, "image", "z", 1, SliceStyle(low=35, high=50))), 5, 6)[:, :, 0]
    np.testing.assert_array_equal(seen == 0, image[1] <= 35)
    np.testing.assert_array_equal(seen == 255, image[1] >= 50)


def test_a_threshold_uncovers_the_image_and_nothing_else_changes(tmp_path: Path) -> None:
    made = write_view(tmp_path, affine_of("LPS"))
    style = SliceStyle(threshold=0.4, opacity=1.0)
    seen = one_per_voxel(pixels(draw_slice(tmp_path, "p1", "z", 1, style)), 5, 6)
    grey = one_per_voxel(pixels(draw_slice(tmp_path, "image", "z", 1)), 5, 6)
    stored = made["p1"][1].astype(int)
    assert 0 < (stored >= 102).sum() < stored.size  # 102 is 0.4
    scale = np.rint(255 * share_colours()).astype(int)
    expected = np.where((stored >= 102)[:, :, None], scale[stored], grey)
    np.testing.assert_array_equal(seen, expected)


def test_opacity_mixes_scale_and_image(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("LPS"))
    drawn = {
        opacity: pixels(draw_slice(tmp_path, "entropy", "z", 1, SliceStyle(opacity=opacity))).astype(float)
        for opacity in (0.0, 0.5, 1.0)
    }
    np.testing.assert_allclose(drawn[0.5], (drawn[0.0] + drawn[1.0]) / 2, atol=1.01)
    np.testing.assert_array_equal(drawn[0.0], pixels(draw_slice(tmp_path, "image", "z", 1)))


def test_classes_are_filled_and_outlined_in_the_colours_of_the_report(tmp_path: Path) -> None:
    labels = np.zeros((1, 8, 8), dtype=np.uint8)
    labels[0, 1:7, 1:7] = 2
    image = np.full((1, 8, 8), 60, dtype=np.int16)
    write_view(tmp_path, affine_of("LPS"), layers={"image": image, "segmentation": labels})
    picture = pixels(draw_slice(tmp_path, "segmentation", "z", 0, SliceStyle(low=0, high=100, size=80)))
    colour = [int(class_colours(2)[1][k : k + 2], 16) for k in (1, 3, 5)]
    below = DIMMED * 0.6 * 255
    np.testing.assert_allclose(picture[40, 40], below + FILL * (np.array(colour) - below), atol=1)
    assert picture[10, 40].tolist() == colour  # the outermost pixel of the class
    np.testing.assert_allclose(picture[9, 40], below, atol=1)  # the pixel beside it
    np.testing.assert_allclose(picture[0, 0], below, atol=1)


def test_without_geometry_a_slice_is_shown_as_the_array_lies(tmp_path: Path) -> None:
    """The identity that stands in the file then is no orientation, though it reads like RAS."""
    image = write_view(tmp_path, affine_of("RAS"), geometry=False)["image"]
    shown = one_per_voxel(pixels(draw_slice(tmp_path, "image", "z", 2)), 5, 6)[:, :, 0]
    np.testing.assert_array_equal(shown, np.rint(255 * (image[2].astype(np.float32) / np.float32(119))))


def test_what_a_true_label_leaves_out_is_grey(tmp_path: Path) -> None:
    labels = np.full((1, 8, 8), 3, dtype=np.uint8)
    write_view(tmp_path, affine_of("LPS"), layers={"segmentation": labels})
    red, green, blue = pixels(draw_slice(tmp_path, "segmentation", "z", 0))[40, 40]
    assert red == green == blue > 0.75 * 0.2 * 255


def test_without_an_image_layers_stand_on_dark_grey(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("LPS"), without=("image",))
    seen = pixels(draw_slice(tmp_path, "p1", "z", 1, SliceStyle(threshold=1.0)))
    assert (seen == round(255 * NO_IMAGE)).all()


def test_the_same_slice_has_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("RAS"))
    assert draw_slice(tmp_path, "p1", "y", 2) == draw_slice(tmp_path, "p1", "y", 2, cache=LayerCache())
    drawn = {draw_slice(tmp_path, layer, axis, k) for layer in ("p1", "image") for axis in AXES for k in (0, 1)}
    assert len(drawn) == 12


@pytest.mark.parametrize(("axis", "index"), [("z", 4), ("y", 5), ("x", 6), ("z", -1)])
def test_a_slice_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path, axis: Axis, index: int) -> None:
    write_view(tmp_path, affine_of("RAS"))
    last = SHAPE[AXES.index(axis)] - 1
    with pytest.raises(UnknownError, match=f"no slice {index} across {axis}; there are 0 to {last}"):
        draw_slice(tmp_path, "image", axis, index)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("RAS"))
    with pytest.raises(UnknownError, match="no layer 'p9' of this case; there are image, segmentation"):
        draw_slice(tmp_path, "p9", "z", 0)
    with pytest.raises(UnknownError, match=r"no layer '\.\./\.\./secret'"):
        draw_slice(tmp_path, "../../secret", "z", 0)
    with pytest.raises(ParameterError, match="expected one of z, y, x"):
        draw_slice(tmp_path, "image", "w", 0)  # type: ignore[arg-type]
    with pytest.raises(UnknownError, match="not there"):
        draw_slice(tmp_path / "gone", "image", "z", 0)
    (tmp_path / "p1.nii.gz").unlink()
    with pytest.raises(UnknownError, match=r"p1\.nii\.gz: this layer is not there"):
        draw_slice(tmp_path, "p1", "z", 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low": 5, "high": 5}, "low 5 is not below high 5"),
        ({"low": float("nan")}, "finite"),
        ({"high": float("inf")}, "finite"),
        ({"threshold": 1.5}, "0 to 1"),
        ({"opacity": -0.1}, "0 to 1"),
        ({"size": 100_000}, "32 to 2048"),
    ],
)
def test_a_style_outside_its_limits_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        SliceStyle(**values)  # type: ignore[arg-type]


def test_a_damaged_description_is_named(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("RAS"))
    (tmp_path / "view.json").write_text("{")
    with pytest.raises(FileFormatError, match=r"view\.json: not JSON"):
        read_view(tmp_path)
    (tmp_path / "view.json").write_text(json.dumps({"shape": [1, 2]}))
    with pytest.raises(FileFormatError, match=r"view\.json: not what a job writes"):
        read_view(tmp_path)


def test_the_cache_holds_no_more_than_it_may_and_drops_what_was_not_used(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("RAS"))
    n_voxels = int(np.prod(SHAPE))
    cache = LayerCache(max_bytes=2 * n_voxels)  # two uint8 volumes
    first = cache.get(tmp_path / "p0.nii.gz")
    cache.get(tmp_path / "p1.nii.gz")
    assert cache.get(tmp_path / "p0.nii.gz") is first
    cache.get(tmp_path / "p2.nii.gz")  # p1 goes, p0 was used after it
    assert cache.nbytes == 2 * n_voxels
    assert cache.get(tmp_path / "p0.nii.gz") is first


def test_a_layer_written_anew_is_read_anew(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("RAS"))
    cache = LayerCache()
    before = cache.get(tmp_path / "p1.nii.gz")
    changed = volumes()
    changed["p1"] = np.full(SHAPE, 9, dtype=np.uint8)
    write_view(tmp_path, affine_of("RAS"), layers=changed)
    assert (cache.get(tmp_path / "p1.nii.gz").stored == 9).all()
    assert not (before.stored == 9).all()


def test_threads_that_want_the_same_layer_get_one_object(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("RAS"))
    cache, start, found = LayerCache(), threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        found.append(cache.get(tmp_path / "image.nii.gz"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(volume) for volume in found}) == 1


def test_a_damaged_layer_fails_for_everybody_and_is_not_kept(tmp_path: Path) -> None:
    write_view(tmp_path, affine_of("RAS"))
    cache = LayerCache()
    (tmp_path / "p1.nii.gz").write_bytes(b"nothing")
    for _ in range(2):
        with pytest.raises(FileFormatError, match=r"p1\.nii\.gz"):
            cache.get(tmp_path / "p1.nii.gz")
    assert cache.nbytes == 0
