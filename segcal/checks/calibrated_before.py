"""Maps that segcal has calibrated already: they look like any ensemble's, and a second time makes them worse."""

from __future__ import annotations

import json
from pathlib import Path

from segcal.errors import SegcalError
from segcal.io.archive import open_npz
from segcal.manifest import Manifest

CALIBRATOR_KEY = "calibrator_sha256"
"""Names the calibrator: in a record, and as 32 bytes in an .npz that nnU-Net's own run left without a record."""

RECORDS = ("run.json", "segcal_predict.json")
"""What `segcal apply`, `nnunet postprocess` and `nnunet predict` leave beside their maps."""

_MOST_BYTES = 64 << 20
_HASH_BYTES = 32


def calibrated_folder(manifest: Manifest) -> Path | None:
    """The first folder of members in which a record, one above its `probabilities/`, or a map names a calibrator."""
    if manifest.kind != "probabilities":
        return None
    members = [manifest.resolve(member) for case in manifest.cases for member in case.members]
    for folder in dict.fromkeys(path.parent for path in members):
        places = (folder, folder.parent) if folder.name == "probabilities" else (folder,)
        if any(_names_calibrator(place / name) for place in places for name in RECORDS):
            return folder
    return next((path.parent for path in members if calibrator_of(path) is not None), None)


def calibrator_of(path: Path) -> str | None:
    """Hash of the calibrator that an .npz names in itself; None where there is no such file, or it names none."""
    try:
        with open_npz(path) as reader:
            named = CALIBRATOR_KEY in reader.entries
            return reader.array(CALIBRATOR_KEY, limit_bytes=_HASH_BYTES).tobytes().hex() if named else None
    except (SegcalError, OSError):  # told by whoever reads the maps
        return None


def _names_calibrator(record: Path) -> bool:
    try:
        if record.stat().st_size > _MOST_BYTES:
            return False
        content = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    # `identity` only pools: its maps are an ensemble's, and may well be calibrated.
    return isinstance(content, dict) and CALIBRATOR_KEY in content and content.get("method") != "identity"
