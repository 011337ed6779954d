"""Maps that segcal has calibrated already: they look like any ensemble's, and a second time makes them worse."""

from __future__ import annotations

import json
from pathlib import Path

from segcal.manifest import Manifest

RECORDS = ("run.json", "segcal_predict.json")
"""What `segcal apply`, `nnunet postprocess` and `nnunet predict` leave beside their maps."""

_MOST_BYTES = 64 << 20


def calibrated_folder(manifest: Manifest) -> Path | None:
    """The first folder of members in which, or above whose `probabilities/`, a record names a true calibrator."""
    if manifest.kind != "probabilities":
        return None
    folders = dict.fromkeys(manifest.resolve(member).parent for case in manifest.cases for member in case.members)
    for folder in folders:
        places = (folder, folder.parent) if folder.name == "probabilities" else (folder,)
        if any(_names_calibrator(place / name) for place in places for name in RECORDS):
            return folder
    return None


def _names_calibrator(record: Path) -> bool:
    try:
        if record.stat().st_size > _MOST_BYTES:
            return False
        content = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    # `identity` only pools: its maps are an ensemble's, and may well be calibrated.
    return isinstance(content, dict) and "calibrator_sha256" in content and content.get("method") != "identity"
