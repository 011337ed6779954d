"""One hash for the files behind a manifest: what was computed from them stands only while they are the same.

`Manifest.sha256` covers names, not content: predictions exported again under the same names leave it as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from segcal.io.images import read_labels
from segcal.io.members import member_fingerprint
from segcal.io.nifti import is_nifti, nifti_fingerprint
from segcal.manifest import Manifest


def data_hash(manifest: Manifest, ids: Iterable[str] | None = None) -> str:
    """Hash of the members, labels and deployed files of the given cases (all when absent), in any order of the cases.

    Members and NIfTI files are recognised by sizes and stored checksums; nothing is unpacked. Label maps of other
    formats are read.
    """
    wanted = sorted(case.id for case in manifest.cases) if ids is None else sorted(set(ids))
    digest = hashlib.sha256()
    for case_id in wanted:
        case = manifest.case(case_id)
        lines = [case_id, *(member_fingerprint(manifest.resolve(member)) for member in case.members)]
        lines += [_content(manifest.resolve(name)) for name in (case.label, case.deployed) if name is not None]
        digest.update("\n".join(lines).encode() + b"\0")
    return digest.hexdigest()


def _content(path: Path) -> str:
    if is_nifti(path):
        return nifti_fingerprint(path)
    # Of other formats the named file may be a header alone, the voxels in a file beside it (.mhd, .nhdr).
    label = read_labels(path)
    affine = None if label.grid.affine is None else label.grid.affine.tolist()
    digest = hashlib.sha256(f"{label.values.dtype.str} {label.values.shape} {affine}\n".encode())
    digest.update(label.values.tobytes())
    return digest.hexdigest()
