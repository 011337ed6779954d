"""One nnU-Net output in a watched folder: which files belong to it, whether it is whole, and what it is known by."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from segcal.scan_folders import IMAGE_ENDINGS

Signature: TypeAlias = tuple[tuple[str, int, int], ...]
"""(name, size, time of the last change in ns) of every file; another one means that somebody is still writing."""

_HASHED_BYTES = 64 << 20
_SETTINGS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Output:
    """An output as a look into the folder shows it.

    Attributes:
        case: name of the case.
        files: of it that are there: the archive, nnU-Net's properties, the segmentation.
        missing: what is not there yet, in words; empty when nothing is.
    """

    case: str
    files: Signature
    missing: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of its files."""
        return tuple(name for name, _, _ in self.files)


def outputs_in(folder: Path) -> list[Output]:
    """Every `<case>.npz` of a folder with what belongs to it, by name.

    Raises:
        OSError: the folder is not there or cannot be read.
    """
    present: dict[str, tuple[int, int]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_file():
                    status = entry.stat()
                    present[entry.name] = (status.st_size, status.st_mtime_ns)
            except OSError:
                continue  # removed since the listing, or a link that leads nowhere: no reason to miss the others
    endings = _endings(folder) if "dataset.json" in present else IMAGE_ENDINGS
    cases = sorted(name.removesuffix(".npz") for name in present if name.endswith(".npz"))
    return [_output(case, present, endings) for case in cases]


def fingerprint(folder: Path, output: Output) -> str:
    """A name for the content of an output: the same after a copy or a touch, another one after a new prediction.

    Of the archive its directory counts, which holds a checksum of every array; of the small files every byte.

    Raises:
        OSError, zipfile.BadZipFile: a file is gone, or the archive has no readable directory: it is not whole.
    """
    digest = hashlib.sha256()
    for name, size, _ in output.files:
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
        if name.endswith(".npz"):
            for entry in _directory(folder / name):
                digest.update(f"{entry.filename}\0{entry.file_size}\0{entry.CRC:08x}\0".encode("utf-8", "replace"))
        else:
            with (folder / name).open("rb") as file:
                digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()


def _directory(path: Path) -> list[zipfile.ZipInfo]:
    """What an archive says it holds; its directory is written last, so one that has it is complete."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (ValueError, NotImplementedError, EOFError) as error:
        raise zipfile.BadZipFile(str(error)) from None
    if not entries:
        raise zipfile.BadZipFile("it is empty")
    return entries


def _output(case: str, present: Mapping[str, tuple[int, int]], endings: tuple[str, ...]) -> Output:
    segmentation = next((f"{case}{ending}" for ending in endings if f"{case}{ending}" in present), None)
    names = [f"{case}.npz", f"{case}.pkl", *([segmentation] if segmentation is not None else [])]
    missing = [] if f"{case}.pkl" in present else [f"{case}.pkl"]
    if segmentation is None:
        missing.append(f"the segmentation ({case}{endings[0]})" if len(endings) == 1 else "the segmentation")
    files = tuple((name, *present[name]) for name in names if name in present)
    return Output(case, files, tuple(missing))


def _endings(folder: Path) -> tuple[str, ...]:
    """The ending of segmentations as dataset.json says it; any, if it does not."""
    try:
        path = folder / "dataset.json"
        text = path.read_text(encoding="utf-8") if path.stat().st_size <= _SETTINGS_BYTES else ""
        ending = json.loads(text)["file_ending"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return IMAGE_ENDINGS
    return (ending,) if isinstance(ending, str) and ending.startswith(".") else IMAGE_ENDINGS
