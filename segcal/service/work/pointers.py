"""Image formats whose header may name another file as the place of the voxels: only those that hold them are read.

MetaImage (.mha, .mhd) and NRRD (.nrrd) can point anywhere on the machine, past every check of their own path.
"""

from __future__ import annotations

import re
from pathlib import Path

from segcal.scan_folders import IMAGE_ENDINGS
from segcal.service.errors import RefusedPathError

_HEADER_BYTES = 1 << 20
_META = re.compile(rb"ElementDataFile[ \t]*[=:]?[ \t]*([^\r\n]*)", re.IGNORECASE)
_NRRD = re.compile(rb"^[ \t]*data ?file[ \t]*:", re.MULTILINE | re.IGNORECASE)
_WAY_OUT = "save it as .nii.gz, or as .mha or .nrrd with the voxels in the same file"


def check_image(path: Path, given: str) -> None:
    """Refuse an image file whose ending is not one that is read here, or whose voxels lie elsewhere.

    Args:
        path: the real file.
        given: the name it was asked for by. A reader goes by the ending of that one, where it is a link.

    Raises:
        RefusedPathError: a reader that goes by the content, or by the header, could be led to any file.
    """
    for name in (path.name, given):
        if not name.lower().endswith(IMAGE_ENDINGS):
            raise RefusedPathError(f"{name!r}: not an image format that is read here; {_WAY_OUT}")
    check_self_contained(path, given)


def check_self_contained(path: Path, given: str) -> None:
    """Refuse an image that keeps its voxels in another file, by the real file's ending or by that of a link to it.

    A file that cannot be opened passes: whoever reads it says what is wrong with it.
    """
    for name in {path.name.lower(), given.lower()}:
        _check_as(path, name)


def _check_as(path: Path, name: str) -> None:
    if name.endswith((".mhd", ".nhdr", ".hdr", ".img")):
        raise RefusedPathError(f"{name!r}: the format keeps its voxels in another file; {_WAY_OUT}")
    if not name.endswith((".mha", ".nrrd")):
        return
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_BYTES)
    except OSError:
        return
    if not (_nrrd_is_whole(start) if name.endswith(".nrrd") else _meta_is_whole(start)):
        raise RefusedPathError(f"{name!r}: its header names another file as the place of the voxels; {_WAY_OUT}")


def _nrrd_is_whole(start: bytes) -> bool:
    """Whether the header ends within `start` and does not mention a data file."""
    header, end, _ = start.replace(b"\r\n", b"\n").partition(b"\n\n")
    return bool(end) and _NRRD.search(header) is None


def _meta_is_whole(start: bytes) -> bool:
    """Whether the place of the voxels is mentioned, and is this file wherever it is mentioned."""
    places = _META.findall(start)
    return bool(places) and all(place.strip().upper() == b"LOCAL" for place in places)
