"""nnU-Net's `<case>.pkl` read without trusting it: the box it predicted in, and nothing is ever executed.

A pickle is a program; nnU-Net's needs half a dozen functions of numpy. Those are replaced by stand-ins of this module
that hold plain numbers, and everything else a file may ask for is refused by name.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from segcal.errors import FileFormatError
from segcal.io.zip_reader import opened
from segcal.types import Box

LIMIT_BYTES = 256 * 2**20
"""Real files have a few hundred bytes, those of a validation with `class_locations` some megabytes."""

_KINDS_OF_NUMBERS = "biuf"


@dataclass(frozen=True, slots=True)
class Properties:
    """What nnU-Net noted when it cropped an image, in the axis order of its plans (after `transpose_forward`).

    Attributes:
        shape: of the image before cropping.
        box: half-open part of it that the network saw.
    """

    shape: tuple[int, int, int]
    box: Box

    @property
    def is_whole(self) -> bool:
        """Whether nothing was cropped away."""
        return all((low, high) == (0, n) for (low, high), n in zip(self.box, self.shape, strict=True))

    def in_image_order(self, transpose_backward: tuple[int, int, int]) -> Properties:
        """The same in the axis order of the image and of the saved probabilities, (z, y, x)."""
        a, b, c = transpose_backward
        return Properties(
            (self.shape[a], self.shape[b], self.shape[c]),
            (self.box[a], self.box[b], self.box[c]),
        )


def read_properties(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> Properties | None:
    """Read the crop from a case's `.pkl`.

    Returns:
        None for the file `nnUNetv2_ensemble --save_npz` left before nnU-Net 2.8, which holds an array instead of
        properties.

    Raises:
        FileFormatError: The file is too large, damaged, no properties, or asks for anything but numbers and arrays.
    """
    content = _unpickled(path, limit_bytes)
    if isinstance(content, _Array):
        return None
    if not isinstance(content, dict):
        raise FileFormatError(
            f"{path}: holds a {type(content).__name__}; expected the properties nnU-Net writes beside saved "
            "probabilities. Remove the file, and the crop is taken from the probabilities."
        )
    try:
        shape = tuple(_whole(n) for n in content["shape_before_cropping"])
        bounds = tuple((_whole(low), _whole(high)) for low, high in content["bbox_used_for_cropping"])
        inside = all(0 <= low < high <= n for (low, high), n in zip(bounds, shape, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: has no readable shape_before_cropping and bbox_used_for_cropping "
            f"({type(error).__name__}: {error}); expected nnU-Net's properties."
        ) from error
    if len(shape) != 3 or not inside:
        raise FileFormatError(f"{path}: the box {bounds} does not lie in an image of shape {shape}.")
    return Properties((shape[0], shape[1], shape[2]), (bounds[0], bounds[1], bounds[2]))


def _whole(value: Any) -> int:
    if isinstance(value, bool | np.bool_) or int(value) != value:
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


def _unpickled(path: Path, limit_bytes: int) -> Any:
    with opened(path) as file:
        size = path.stat().st_size
        if size > limit_bytes:
            raise FileFormatError(
                f"{path}: has {size:,} bytes, more than the limit of {limit_bytes:,}; nnU-Net's properties are small. "
                "Remove the file, and the crop is taken from the probabilities."
            )
        try:
            return _NumbersOnly(file).load()
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from None
        except (OSError, KeyboardInterrupt):
            raise
        except Exception as error:  # a damaged pickle can fail in any way its operations can
            raise FileFormatError(
                f"{path}: not a readable pickle, truncated or damaged ({type(error).__name__}: {error}). "
                "Remove the file, and the crop is taken from the probabilities."
            ) from error


class _NumbersOnly(pickle.Unpickler):
    """Knows the names nnU-Net's properties use, by harmless stand-ins, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _ALLOWED.get((module, name))
        if stand_in is None:
            raise FileFormatError(
                f"asks for {module}.{name}, which no properties of nnU-Net need; such a file can run any program "
                "when it is opened the usual way, so it was not read. Find out where it comes from, and remove it."
            )
        return stand_in

    def persistent_load(self, pid: Any) -> Any:
        raise FileFormatError("refers to objects outside the file; expected nnU-Net's properties.")


class _Type:
    """Stands for a numpy.dtype. A real one can be told by a pickle that its bytes are pointers."""

    def __init__(self, text: Any, align: Any = False, copy: Any = True) -> None:
        if not isinstance(text, str) or np.dtype(text).kind not in _KINDS_OF_NUMBERS:
            raise FileFormatError(f"holds values of the type {text!r}; expected plain numbers.")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        _, order, *structure = state
        if any(part is not None for part in structure[:3]):
            raise FileFormatError("holds structured values; expected plain numbers.")
        self.dtype = self.dtype.newbyteorder("=" if order == "|" else order)


class _Array:
    """Stands for a numpy.ndarray; made empty and filled by the next operation of the pickle."""

    values: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, of, fortran, raw = state
        self.values = _array_of_bytes(raw, of, shape, "F" if fortran else "C").values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


def _array_of_bytes(raw: Any, of: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.values = np.frombuffer(raw, dtype=of.dtype).reshape(shape, order=order)
    return array


def _scalar(of: Any, raw: Any) -> Any:
    return _array_of_bytes(raw, of, (1,), "C").values[0]


def _empty_array(subtype: Any, shape: Any, typecode: Any) -> _Array:
    return _Array()


def _latin1(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise FileFormatError(f"wants to encode text as {encoding!r}; expected latin1.")
    return text.encode("latin1")


def _names() -> Mapping[tuple[str, str], Any]:
    functions: dict[str, Callable[..., Any]] = {"scalar": _scalar, "_reconstruct": _empty_array}
    allowed: dict[tuple[str, str], Any] = {
        ("numpy", "dtype"): _Type,
        # Only ever an argument of `_reconstruct`; text cannot be called.
        ("numpy", "ndarray"): "ndarray",
        ("_codecs", "encode"): _latin1,
    }
    for core in ("numpy._core", "numpy.core"):  # numpy 2 and numpy 1
        allowed |= {(f"{core}.multiarray", name): function for name, function in functions.items()}
        allowed[f"{core}.numeric", "_frombuffer"] = _array_of_bytes
    return MappingProxyType(allowed)


_ALLOWED = _names()
