"""The files a job left, and which of them are shown: no way out of the job's folder, no input, nothing unfinished."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from segcal.service.api.answers import ResultFile, moment
from segcal.service.errors import UnknownError

REPORTS = frozenset({"report.html", "qa/qa.html"})
"""Pages that segcal made; see `downloads.file_answer`."""

_HIDDEN_FOLDERS = frozenset({"in"})
_HIDDEN_FILES = frozenset({"lock"})
_MOST_FILES = 200_000


def list_results(folder: Path) -> list[ResultFile]:
    """Every file of a job that may be downloaded, sorted by path."""
    found: list[ResultFile] = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        here = Path(parent).relative_to(folder)
        folders[:] = sorted(name for name in folders if _shown(here / name, is_folder=True))
        for name in names:
            path = Path(parent, name)
            if not _shown(here / name) or path.is_symlink() or len(found) >= _MOST_FILES:
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # replaced or cleaned up in this moment
            found.append(
                ResultFile(path=(here / name).as_posix(), size=status.st_size, modified=moment(status.st_mtime))
            )
    return sorted(found, key=lambda file: file.path)


def result_path(folder: Path, name: str) -> Path:
    """The file behind a name of the listing.

    Raises:
        UnknownError: there is none, or it is not to be shown. The message is the same for both.
    """
    unknown = UnknownError(f"there is no result {name[:200]!r}")
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or "\\" in name or name.startswith("/") or ".." in parts or not _shown(Path(name)):
        raise unknown
    try:
        path = folder.joinpath(*parts).resolve(strict=True)
        root = folder.resolve(strict=True)
    except (OSError, RuntimeError):
        raise unknown from None
    # A link inside the folder may lead anywhere; what counts is where it ends.
    if root not in path.parents or not _shown(path.relative_to(root)) or not path.is_file():
        raise unknown
    return path


def _shown(path: Path, *, is_folder: bool = False) -> bool:
    """Unfinished files and our own notes begin with a dot; `in/` holds what came from outside, and links to it."""
    if any(part.startswith(".") for part in path.parts):
        return False
    if path.parts[0] in _HIDDEN_FOLDERS:
        return False
    return is_folder or path.as_posix() not in _HIDDEN_FILES
