"""Applying without a manifest: one is made in memory from folders of predictions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from segcal.errors import FileFormatError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.io.archive import read_npz_header
from segcal.io.nifti import is_nifti
from segcal.manifest_scan import ScanResult, scan
from segcal.scan_folders import find_members
from segcal.types import Kind


def manifest_of_folders(
    fitted: FittedCalibrator,
    members: Sequence[Path],
    *,
    kind: Kind | None = None,
    images: Path | None = None,
    dataset_json: Path | None = None,
) -> ScanResult:
    """A manifest, never written, of what lies in member folders.

    Its channels are described by the dataset.json found beside the members, as nnU-Net leaves one there, and are then
    compared with the calibrator's. Where there is none, the calibrator's own class names are taken and only their
    number can be checked.

    Args:
        fitted: The calibrator that will be applied.
        members: One folder per member, in the order of fitting.
        kind: What the files hold; read off the key of the first `.npz` when absent.
        images: Folder of the images; they say where the voxels lie, which `.npz` files do not.
        dataset_json: Says the classes, instead of one found beside the members.
    """
    # Paths relative to what the folders share: the record of a run then does not depend on where it was started.
    root = Path(os.path.commonpath([folder.resolve() for folder in members]))
    target = root / "manifest.yaml"
    kind = kind or _kind_in(members[0])
    found = scan(members, kind=kind, out=target, images=images, dataset_json=dataset_json)
    numbered = tuple(f"class_{index}" for index in range(found.manifest.n_classes))
    if found.manifest.classes == numbered and len(fitted.info.classes) == len(numbered):
        return scan(members, kind=kind, out=target, images=images, classes=fitted.info.classes)
    return found


def _kind_in(folder: Path) -> Kind:
    first = next(iter(find_members(folder).values()))
    if is_nifti(first):
        raise UsageError(
            f"{first}: a NIfTI does not say whether it holds logits or probabilities; say it with --kind logits or "
            "--kind probabilities."
        )
    keys = tuple(read_npz_header(first))
    kinds: list[Kind] = [kind for kind in ("logits", "probabilities") if kind in keys]
    if len(kinds) != 1:
        raise FileFormatError(
            f"{first}: holds {', '.join(keys)}; expected one of the keys `logits` and `probabilities`. "
            "Say which is meant with --kind."
        )
    return kinds[0]
