"""A job reads what its submitter may name and nothing else: every file behind a manifest or a folder is checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from segcal.manifest import Manifest, ManifestCase
from segcal.service.errors import RefusedPathError
from segcal.service.roots import Roots
from segcal.service.work.pointers import check_image, check_self_contained


def load_manifest(path: str | Path, roots: Roots) -> Manifest:
    """Read a manifest below the roots whose files all lie below them too."""
    manifest = Manifest.load(roots.allow(path))
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
                real = checked.allow(manifest.resolve(relative))
                if what != "member":
                    check_image(real)
            except RefusedPathError as error:
                raise RefusedPathError(f"case {case.id!r}, {what} {relative!r}: {_reason(error)}") from None


def check_folder(folder: str | Path, roots: Roots) -> Path:
    """The real path of a folder below the roots out of which no link leads.

    Raises:
        RefusedPathError: it lies elsewhere, or holds a link to elsewhere.
    """
    real = roots.allow(folder)
    for place, folders, names in os.walk(real):
        for name in (*folders, *names):
            path = Path(place, name)
            if path.is_symlink():
                roots.allow(path)
            if path.is_file():
                check_self_contained(path)
    return real


class _Checked:
    """Remembers folders: a manifest of 100,000 cases names few of them, and following links is slow."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._folders: dict[Path, Path] = {}

    def allow(self, path: Path) -> Path:
        if path.name in ("", "..") or path.is_symlink():
            return self._roots.allow(path)
        if path.parent not in self._folders:
            self._folders[path.parent] = self._roots.allow(path.parent)
        return self._folders[path.parent] / path.name


def _named(case: ManifestCase) -> Iterator[tuple[str, str]]:
    yield from (("member", member) for member in case.members)
    others = (("label", case.label), ("image", case.image), ("deployed segmentation", case.deployed))
    yield from ((what, relative) for what, relative in others if relative is not None)


def _reason(error: RefusedPathError) -> str:
    """Without the path as it was put together: the manifest's own is named instead."""
    return str(error).partition(": ")[2]
