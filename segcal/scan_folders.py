"""Which file of a folder belongs to which case: names without their ending are case ids."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from segcal.errors import ManifestError, MissingFileError

NPZ_ENDINGS = (".npz",)
NIFTI_ENDINGS = (".nii.gz", ".nii")
IMAGE_ENDINGS = (
    *NIFTI_ENDINGS,
    *(".nrrd", ".mha", ".mhd", ".gipl.gz", ".gipl", ".png", ".bmp", ".tif", ".tiff", ".jpg", ".jpeg"),
)
_CHANNEL = re.compile(r"_\d{4}$")


def find_members(folder: Path) -> dict[str, Path]:
    """Member files by case id: the .npz files, or the NIfTI files of a folder without .npz.

    nnU-Net writes its segmentation as `<case>.nii.gz` beside `<case>.npz`, so a NIfTI never counts beside an .npz.
    """
    for endings in (NPZ_ENDINGS, NIFTI_ENDINGS):
        if files := _by_id(folder, endings):
            return files
    raise ManifestError(
        f"{folder}: holds no .npz, .nii or .nii.gz file; name the folder the predictions of one member lie in "
        "(nnU-Net writes .npz only with --save_probabilities)"
    )


def find_labels(folder: Path) -> dict[str, Path]:
    """Label or segmentation files by case id."""
    return _by_id(folder, IMAGE_ENDINGS)


def find_images(folder: Path, ids: Collection[str]) -> dict[str, Path]:
    """One image file per case: of that name, or with nnU-Net's channel number, the lowest first."""
    known, files = set(ids), _by_id(folder, IMAGE_ENDINGS)
    found = {stem: path for stem, path in files.items() if stem in known}
    for stem, path in sorted(files.items()):
        if stem not in known:
            found.setdefault(_CHANNEL.sub("", stem), path)
    return found


def relative_to(root: Path, path: Path) -> str:
    """`path` as a manifest in the folder `root` writes it, with forward slashes."""
    path = path.absolute()
    if path.is_relative_to(root) and ".." not in path.parts:
        return path.relative_to(root).as_posix()
    # A `..` behind a linked folder leads to the parent of where the link points, so links are followed first.
    return Path(os.path.relpath(path.parent.resolve() / path.name, root.resolve())).as_posix()


def in_words(names: Sequence[str], limit: int = 8) -> str:
    """The first names of a list and how many more there are."""
    shown = ", ".join(names[:limit]) or "nothing"
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def _by_id(folder: Path, endings: Sequence[str]) -> dict[str, Path]:
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: there is no such folder; check the path")
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        stem = _stem(path.name, endings)
        if stem is None or path.name.startswith(".") or not path.is_file():
            continue
        if stem in files:
            raise ManifestError(
                f"{folder}: both {files[stem].name} and {path.name} would be the case {stem!r}; move one elsewhere"
            )
        files[stem] = path
    return files


def _stem(name: str, endings: Sequence[str]) -> str | None:
    return next((name[: -len(ending)] for ending in endings if name.lower().endswith(ending)), None)
