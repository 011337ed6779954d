"""nnU-Net's pickles: real ones are read, whatever else they hold is neither believed nor executed."""

from __future__ import annotations

import os
import pickle
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segcal.errors import FileFormatError, MissingFileError
from segcal.nnunet.properties import read_properties
from tests.nnunet.folders import properties

SHAPE = (6, 7, 8)
BOX = ((1, 4), (0, 7), (3, 8))


def pickled(folder: Path, content: Any, protocol: int = 4) -> Path:
    path = folder / "case.pkl"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_properties_of_every_pickle_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    read = read_properties(pickled(tmp_path, properties(SHAPE, BOX), protocol))

    assert read is not None
    assert (read.shape, read.box, read.is_whole) == (SHAPE, BOX, False)


def test_properties_written_with_numpy_1_are_read(tmp_path: Path) -> None:
    path = pickled(tmp_path, properties(SHAPE, BOX), protocol=2)
    old = path.read_bytes().replace(b"numpy._core", b"numpy.core")
    assert b"numpy.core.multiarray" in old
    path.write_bytes(old)

    read = read_properties(path)

    assert read is not None
    assert read.box == BOX


def test_numbers_may_lie_in_arrays_of_any_byte_order(tmp_path: Path) -> None:
    content = {
        "shape_before_cropping": np.array(SHAPE, dtype=">i2"),
        "bbox_used_for_cropping": np.array(BOX, order="F"),
    }
    for protocol in (2, 5):
        read = read_properties(pickled(tmp_path, content, protocol))

        assert read is not None
        assert (read.shape, read.box) == (SHAPE, BOX)
    assert np.dtype("int16").isnative


@given(forward=st.sampled_from(list(permutations(range(3)))))
def test_the_box_comes_back_to_the_order_of_the_image(
    tmp_path_factory: pytest.TempPathFactory, forward: tuple[int, int, int]
) -> None:
    image = np.zeros(SHAPE)
    image[tuple(slice(low, high) for low, high in BOX)] = 1
    where = np.argwhere(image.transpose(forward))
    content = {
        "shape_before_cropping": image.transpose(forward).shape,
        "bbox_used_for_cropping": [[low, high + 1] for low, high in zip(where.min(0), where.max(0), strict=True)],
    }
    a, b, c = (forward.index(axis) for axis in range(3))

    read = read_properties(pickled(tmp_path_factory.mktemp("pkl"), content))

    assert read is not None
    back = read.in_image_order((a, b, c))
    assert (back.shape, back.box) == (SHAPE, BOX)


def test_an_array_in_place_of_properties_counts_as_absent(tmp_path: Path) -> None:
    assert read_properties(pickled(tmp_path, np.ones((3, 2, 2, 2), dtype=np.float32))) is None


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_nothing_in_a_pickle_is_executed(tmp_path: Path, protocol: int, deep: bool) -> None:
    marker = tmp_path / "executed"
    bomb = Calls(os.system, f"touch {marker}")
    path = pickled(tmp_path, properties(SHAPE, BOX) | {"class_locations": [bomb]} if deep else bomb, protocol)

    with pytest.raises(FileFormatError, match=r"case\.pkl: asks for (posix|nt)\.system"):
        read_properties(path)

    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the pickle would have done harm, otherwise this test shows nothing"


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (eval, ("1 + 1",)),
        (getattr, ("text", "upper")),
        (np.load, ("file.npy",)),
        (np.fromfile, ("file",)),
        (np.ndarray, ((10**13,),)),
        (np.dtype, ("O",)),
        (np.dtype, ("V1000000000",)),
        (pickle.loads, (b"N.",)),
    ],
)
def test_functions_that_properties_do_not_need_are_refused(
    tmp_path: Path, function: Any, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(FileFormatError, match=r"case\.pkl"):
        read_properties(pickled(tmp_path, Calls(function, *arguments)))


class PointersInNumbers:
    """A float type told that its bytes are pointers; numpy believes such a pickle and crashes when it follows them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("f8", False, True), (3, "<", None, {"a": (np.dtype("f8"), 0)}, ("a",), 8, 8, 63)


def test_a_type_with_a_structure_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="structured"):
        read_properties(pickled(tmp_path, PointersInNumbers()))


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {},
        {"shape_before_cropping": SHAPE},
        {"shape_before_cropping": SHAPE, "bbox_used_for_cropping": [[0, 6], [0, 7]]},
        {"shape_before_cropping": SHAPE, "bbox_used_for_cropping": [[0, 7], [0, 7], [0, 8]]},
        {"shape_before_cropping": SHAPE, "bbox_used_for_cropping": [[3, 3], [0, 7], [0, 8]]},
        {"shape_before_cropping": SHAPE, "bbox_used_for_cropping": [[0.5, 3], [0, 7], [0, 8]]},
        {"shape_before_cropping": SHAPE[:2], "bbox_used_for_cropping": [[0, 6], [0, 7]]},
        {"shape_before_cropping": "abc", "bbox_used_for_cropping": [[0, 6], [0, 7], [0, 8]]},
    ],
)
def test_what_is_not_properties_is_refused_by_name(tmp_path: Path, content: Any) -> None:
    with pytest.raises(FileFormatError, match=r"case\.pkl"):
        read_properties(pickled(tmp_path, content))


def test_damaged_and_oversized_files_are_refused(tmp_path: Path) -> None:
    path = pickled(tmp_path, properties(SHAPE, BOX))
    whole = path.read_bytes()
    with pytest.raises(FileFormatError, match="limit of 100"):
        read_properties(path, limit_bytes=100)
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(FileFormatError, match=r"case\.pkl"):
            read_properties(path)
    with pytest.raises(MissingFileError):
        read_properties(tmp_path / "absent.pkl")


@given(noise=st.binary(max_size=200))
def test_noise_is_an_error_or_no_properties(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "case.pkl"
    path.write_bytes(noise)
    with pytest.raises(FileFormatError, match=r"case\.pkl"):
        read_properties(path)
