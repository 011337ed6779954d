"""What a case is made from, recognised without reading it: a finished case is done again only when this changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from segcal.applying.record import InputFile
from segcal.io.images import read_grid
from segcal.io.members import member_fingerprint
from segcal.io.nifti import is_nifti
from segcal.manifest import Manifest, ManifestCase


def input_fingerprints(manifest: Manifest, case: ManifestCase) -> tuple[InputFile, ...]:
    """What a case is made from: its members and, where they carry no geometry, the file that does."""
    found = [
        InputFile(file=name, fingerprint=member_fingerprint(manifest.resolve(name), case.crop)) for name in case.members
    ]
    if is_nifti(manifest.resolve(case.members[0])):
        return tuple(found)
    for name in (case.label, case.deployed, case.image):
        if name is not None:
            grid = read_grid(manifest.resolve(name))
            affine = None if grid.affine is None else grid.affine.tolist()
            found.append(InputFile(file=name, fingerprint=f"grid:{list(grid.shape)}:{affine}"))
            if affine is not None:
                break
    return tuple(found)


def input_files(manifest: Manifest, cases: Sequence[ManifestCase]) -> set[Path]:
    """Every file the manifest names for these cases, links followed."""
    names = (name for case in cases for name in (*case.members, case.label, case.image, case.deployed))
    return {manifest.resolve(name).resolve() for name in names if name is not None}
