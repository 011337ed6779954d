"""Where the service keeps files below its data folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

JOB_FOLDERS = ("in", "out", "qa", "view")
"""Subfolders of a job's folder; all of it belongs to the one child that has the job."""


@dataclass(frozen=True, slots=True)
class ServiceFiles:
    """The layout of a data folder.

    segcal.db                       the store, unless it is elsewhere
    calibrators/<sha256>.safetensors
    uploads/                        what is being received; nothing in it survives a restart
    jobs/<id>/in/                   what was uploaded for the job, links to a watched output
    jobs/<id>/out/                  what the library wrote: maps, tables, calibrators
    jobs/<id>/qa/                   qa.csv, qa.json, qa.html
    jobs/<id>/view/<number>/        layers of a case, uint8 or int16 NIfTI
    jobs/<id>/report.html
    pruned/<id>/                    a job's folder that is being removed
    """

    data: Path

    @property
    def calibrators(self) -> Path:
        return self.data / "calibrators"

    @property
    def uploads(self) -> Path:
        return self.data / "uploads"

    @property
    def pruned(self) -> Path:
        return self.data / "pruned"

    def calibrator(self, sha256: str) -> Path:
        return self.calibrators / f"{sha256}.safetensors"

    def job(self, job_id: str) -> Path:
        return self.data / "jobs" / job_id


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk before the store tells of them: a power cut must not part the two."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
