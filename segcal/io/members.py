"""What one member of an ensemble predicted for one case: a file in, an array (class, z, y, x) out.

Logits and probabilities are told apart by the declared kind and the key in the file, never by values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from segcal.errors import FileFormatError, UsageError, WrongKindError
from segcal.io.archive import DEFAULT_LIMIT_BYTES, AnyArray, NpzReader, npz_fingerprint, open_npz
from segcal.io.nifti import is_nifti, nifti_fingerprint, read_nifti, read_nifti_header, scaled_values
from segcal.types import Box, Grid, Kind

__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "Axes",
    "Member",
    "MemberHeader",
    "member_fingerprint",
    "read_member",
    "read_member_header",
]

Axes: TypeAlias = Literal["czyx", "cxyz", "cyx"]
"""Order of the axes in .npz files; nnU-Net's is czyx. NIfTI files have their own fixed order."""

DeclaredCrop: TypeAlias = Sequence[Sequence[int]] | None
"""A box as people write it: [low, high) per axis, in the order of the array in the file."""

_KINDS: tuple[Kind, Kind] = ("logits", "probabilities")
_MAX_SIDECAR_BYTES = 2**24
_MAX_CROP_BYTES = 1024


@dataclass(frozen=True, slots=True)
class MemberHeader:
    """What a member file declares, read without unpacking its values.

    Attributes:
        shape: (class, z, y, x), whatever the order in the file.
        dtype: as stored.
        kind: logits or probabilities.
        crop: box the network predicted in; None when the file does not say.
    """

    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    kind: Kind
    crop: Box | None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Member:
    """One member's prediction.

    Attributes:
        values: (class, z, y, x), C-contiguous, dtype as stored (scaled NIfTI integers: float32).
        kind: logits or probabilities.
        crop: box the network predicted in; values outside it mean nothing.
        grid: where the array lies, known for NIfTI only.
        path: the file, for messages.
        step: smallest positive value of a file that stores multiples of a slope; None for floats.
    """

    values: AnyArray = field(repr=False)
    kind: Kind
    crop: Box | None = None
    grid: Grid | None = None
    path: Path = Path("<memory>")
    step: float | None = None


def read_member_header(path: Path, *, kind: Kind, axes: str = "czyx", crop: DeclaredCrop = None) -> MemberHeader:
    """Read shape, dtype and crop of a member file; see `read_member`."""
    if is_nifti(path):
        nifti = read_nifti_header(path)
        shape = _array_shape(path, nifti.shape, nifti.dtype, "czyx", scaled=nifti.scaled)
        return MemberHeader(shape, nifti.dtype, kind, _crop(path, None, crop, "czyx", shape))
    with _opened_npz(path) as reader:
        return _npz_header(path, reader, kind, axes, crop)


def read_member(
    path: Path,
    *,
    kind: Kind,
    axes: str = "czyx",
    crop: DeclaredCrop = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Member:
    """Read one member of one case.

    `.npz`: key `logits` or `probabilities`, float16, float32 or float64, axes as declared. `.nii`, `.nii.gz`: 4-D,
    x-y-z-class on disk. A `crop` (3 x 2, half-open, in the axis order of the array) may stand in the npz or under
    the key `crop` of a `<case>.json` beside the file.

    Args:
        path: the file.
        kind: what the manifest says the file holds; an .npz whose key says otherwise is refused.
        axes: order of the axes in an .npz: czyx, cxyz, or cyx for 2-D images, which get z = 1.
        crop: the box as the manifest gives it, for a file that does not say it itself; both must agree.
        limit_bytes: a file that declares a larger array is refused before anything is unpacked.
    """
    if is_nifti(path):
        return _read_nifti_member(path, kind, crop, limit_bytes)
    with _opened_npz(path) as reader:
        header = _npz_header(path, reader, kind, axes, crop)
        values = reader.array(kind, limit_bytes=limit_bytes)
    return Member(_ordered(values, axes, header.shape), kind, header.crop, None, path)


def member_fingerprint(path: Path, crop: DeclaredCrop = None) -> str:
    """Text that changes when the member or its crop changes; sizes and stored checksums, nothing is unpacked."""
    content = nifti_fingerprint(path) if is_nifti(path) else npz_fingerprint(path)
    boxes = [box for box in (_sidecar_crop(path), crop) if box is not None]
    return content + "".join(f";crop:{json.dumps(box, separators=(',', ':'))}" for box in boxes)


def _read_nifti_member(path: Path, kind: Kind, crop: DeclaredCrop, limit_bytes: int) -> Member:
    declared = read_member_header(path, kind=kind, crop=crop)
    stored, header = read_nifti(path, limit_bytes=limit_bytes)
    step = abs(header.slope) if header.scaled and header.dtype.kind in "iu" else None
    return Member(scaled_values(stored, header), kind, declared.crop, header.grid, path, step)


def _opened_npz(path: Path) -> AbstractContextManager[NpzReader]:
    if path.suffix.lower() != ".npz":
        raise FileFormatError(f"{path}: a member file is .npz, .nii or .nii.gz, not {path.suffix!r}.")
    return open_npz(path)


def _npz_header(path: Path, reader: NpzReader, kind: Kind, axes: str, crop: DeclaredCrop) -> MemberHeader:
    if kind not in reader.entries:
        raise _wrong_key(path, kind, tuple(reader.entries))
    header = reader.header(kind)
    shape = _array_shape(path, header.shape, header.dtype, axes)
    stored_crop = reader.array("crop", limit_bytes=_MAX_CROP_BYTES) if "crop" in reader.entries else None
    return MemberHeader(shape, header.dtype, kind, _crop(path, stored_crop, crop, axes, shape))


def _wrong_key(path: Path, kind: Kind, keys: tuple[str, ...]) -> FileFormatError:
    found = ", ".join(f"`{key}`" for key in keys)
    other = next((k for k in _KINDS if k in keys), None)
    if other is not None:
        return WrongKindError(
            f"{path}: holds the key `{other}` but the manifest declares `kind: {kind}`. "
            f"Set `kind: {other}` or name the files that hold {kind}."
        )
    if "softmax" in keys:
        return FileFormatError(
            f"{path}: holds the key `softmax`, a file of nnU-Net v1. Version 1 saved only the cropped part of the "
            "image, so the array does not fit the labels; it is not supported. Predict again with nnU-Net v2 "
            "(`nnUNetv2_predict --save_probabilities`)."
        )
    return FileFormatError(f"{path}: holds {found}, expected the key `{kind}`.")


def _array_shape(
    path: Path, stored: tuple[int, ...], dtype: np.dtype[Any], axes: str, *, scaled: bool = False
) -> tuple[int, int, int, int]:
    """Shape as (class, z, y, x) after checking that the file can hold a prediction at all."""
    if axes not in get_args(Axes):
        raise UsageError(f"unknown axes {axes!r}: expected one of {', '.join(get_args(Axes))}.")
    if not (dtype.kind == "f" and dtype.itemsize <= 8) and not (scaled and dtype.kind in "iu"):
        raise FileFormatError(
            f"{path}: values have dtype {dtype}; expected float16, float32 or float64 "
            "(or a NIfTI whose integers carry a scl_slope)."
        )
    if len(stored) != len(axes):
        hint = " For 2-D images saved without a z axis set `axes: cyx` in the manifest." if len(stored) == 3 else ""
        raise FileFormatError(
            f"{path}: the array has {len(stored)} axes {stored}, expected {len(axes)} ({', '.join(axes)}).{hint}"
        )
    if 0 in stored:
        raise FileFormatError(f"{path}: the array is empty, its shape is {stored}.")
    c, *space = stored
    z, y, x = {"czyx": space, "cxyz": space[::-1], "cyx": [1, *space]}[axes]
    return c, z, y, x


def _ordered(values: AnyArray, axes: str, shape: tuple[int, int, int, int]) -> AnyArray:
    """The array as (class, z, y, x) in C order."""
    # Fortran order does not come from nnU-Net; such a file costs a second copy for a moment.
    values = np.ascontiguousarray(values)
    if axes != "cxyz":
        return values.reshape(shape)
    # One class at a time, back into the memory it came from.
    ordered = values.reshape(shape)
    for c in range(shape[0]):
        ordered[c] = values[c].transpose().copy()
    return ordered


def _crop(
    path: Path, stored: AnyArray | None, declared: DeclaredCrop, axes: str, shape: tuple[int, int, int, int]
) -> Box | None:
    """The box as (z, y, x) from the array in the file, the sidecar or the manifest; those that say it must agree."""
    found = {
        "its own crop": None if stored is None else stored.tolist(),
        "the one beside it": _sidecar_crop(path),
        "the manifest's": declared,
    }
    boxes = {where: _box(path, crop, axes, shape) for where, crop in found.items() if crop is not None}
    first = next(iter(boxes.items()), None)
    for where, box in boxes.items():
        if first is not None and box != first[1]:
            raise FileFormatError(f"{path}: {first[0]} {first[1]} and {where} {box} differ; remove one.")
    return None if first is None else first[1]


def _box(path: Path, crop: Any, axes: str, shape: tuple[int, int, int, int]) -> Box:
    try:
        rows = [(int(low), int(high)) for low, high in crop]
        if any(value != int(value) for row in crop for value in row):
            raise ValueError
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"{path}: crop {crop!r} is not three pairs of whole numbers (half-open box).") from error
    if axes == "cyx" and len(rows) == 2:
        rows = [(0, 1), *rows]
    if axes == "cxyz":
        rows = rows[::-1]
    if len(rows) != 3 or any(not 0 <= low < high <= n for (low, high), n in zip(rows, shape[1:], strict=False)):
        raise FileFormatError(
            f"{path}: crop {crop!r} does not lie inside the array of shape {shape[1:]} (z, y, x); "
            "expected [low, high) per axis in the order of the array."
        )
    return rows[0], rows[1], rows[2]


def _sidecar_crop(path: Path) -> Any:
    sidecar = path.with_name(path.name.removesuffix(".gz")).with_suffix(".json")
    try:
        with sidecar.open("rb") as file:
            content = json.loads(file.read(_MAX_SIDECAR_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{sidecar}: not readable as JSON ({error}); repair or remove it.") from error
    return content.get("crop") if isinstance(content, dict) else None
