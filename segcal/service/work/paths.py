"""A job reads what its submitter may name and nothing else: every file behind a manifest or a folder is checked."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from segcal.manifest import Manifest, ManifestCase
from segcal.service.errors import RefusedPathError
from segcal.service.roots import Roots
from segcal.service.work.pointers import check_image, check_self_contained


def load_manifest(path: str | Path, roots: Roots) -> Manifest:
    """Read a manifest below the roots whose files all lie below them too.

    It is read by the path that was given, so that messages name that one and not where links lead.
    """
    real = roots.allow(path)
    _refuse_special(real, _mode(real))
    manifest = Manifest.load(path)
    check_manifest(manifest, roots)
    return manifest


def check_manifest(manifest: Manifest, roots: Roots) -> None:
    """Refuse a manifest that names a file outside the roots: by `..`, through a link, or by way of an image's header.

    Whether the files exist is not said here: that is found out, case by case, when they are read. A link that is
    changed between this check and the reading is beyond it; whoever can do that can already write below a root.

    Raises:
        RefusedPathError: names the case and the file as the manifest does.
    """
    checked = _Checked(roots)
    for case in manifest.cases:
        for what, relative in _named(case):
            try:
                given = manifest.resolve(relative)
                real = checked.allow(given)
                if what != "member":
                    check_image(real, given.name)
            except RefusedPathError as error:
                raise RefusedPathError(f"case {case.id!r}, {what} {relative!r}: {_reason(error)}") from None


def check_folder(folder: str | Path, roots: Roots) -> Path:
    """The real path of a folder below the roots out of which no link leads.

    Raises:
        RefusedPathError: it lies elsewhere, or holds a link to elsewhere or a pipe.
    """
    real, checked = roots.allow(folder), _Checked(roots)
    for place, folders, names in os.walk(real):
        for name in (*folders, *names):
            check_self_contained(checked.allow(Path(place, name)), name)
    return real


class _Checked:
    """Remembers folders: a manifest of 100,000 cases names few of them, and following links is slow."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._folders: dict[Path, Path] = {}

    def allow(self, path: Path) -> Path:
        mode = _mode(path)
        if path.name in ("", "..") or stat.S_ISLNK(mode):
            real = self._roots.allow(path)
            mode = _mode(real)
        else:
            if path.parent not in self._folders:
                self._folders[path.parent] = self._roots.allow(path.parent)
            real = self._folders[path.parent] / path.name
        _refuse_special(real, mode)
        return real


def _mode(path: Path) -> int:
    """What kind of thing a path is, links not followed; 0 when there is nothing."""
    try:
        return path.lstat().st_mode
    except (OSError, ValueError):
        return 0


def _refuse_special(path: Path, mode: int) -> None:
    """A pipe would keep its reader waiting for ever; what is not there is found out when it is read."""
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RefusedPathError(f"{path.name!r}: neither a file nor a folder")


def _named(case: ManifestCase) -> Iterator[tuple[str, str]]:
    yield from (("member", member) for member in case.members)
    others = (("label", case.label), ("image", case.image), ("deployed segmentation", case.deployed))
    yield from ((what, relative) for what, relative in others if relative is not None)


def _reason(error: RefusedPathError) -> str:
    """Without the path as it was put together: the manifest's own is named instead."""
    return str(error).partition(": ")[2]
