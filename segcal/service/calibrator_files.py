"""Calibrator files in the data folder: checked by the reader, kept under their hash."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from segcal.io.atomic import TEMPORARY_PREFIX, atomic_write
from segcal.service.files import ServiceFiles
from segcal.service.model import CalibratorRecord
from segcal.service.store import Store

_LEFTOVER_S = 3600.0


def import_calibrator(path: Path, name: str, files: ServiceFiles, store: Store) -> CalibratorRecord:
    """Check a calibrator file, keep a copy of it and make it known; what is known already stays as it was.

    Raises:
        FileFormatError, MissingFileError: as `load_calibrator`.
    """
    record = keep_calibrator(path, name, files, created=store.now())
    store.calibrators.add(record)
    return store.calibrators.get(record.sha256)


def keep_calibrator(path: Path, name: str, files: ServiceFiles, *, created: float) -> CalibratorRecord:
    """Check a calibrator file and copy it under its hash, whole or not at all; the store is not told yet."""
    # Not at the top: a server that shows what there is needs no torch, which is three quarters of its memory.
    from segcal.fitted import load_calibrator

    info = load_calibrator(path).info
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    _remove_old_leftovers(files.calibrators)
    with atomic_write(files.calibrator(sha256)) as temporary:
        temporary.write_bytes(content)
    return CalibratorRecord(
        sha256=sha256,
        name=name,
        method=info.method,
        pooling=info.pooling,
        kind=info.kind,
        classes=info.classes,
        created=created,
        retired=None,
        info=json.loads(info.to_json()),
    )


def _remove_old_leftovers(folder: Path) -> None:
    """Clear away what processes that were killed left half-written; never what another one is writing now."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                leftover.unlink()
