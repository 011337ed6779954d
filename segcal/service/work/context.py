"""What a job has to work with: where it may read and write, who is told, and on what machine its cases run."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from segcal.case_map import CaseMap
from segcal.errors import OutputError
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.service.errors import UnknownError
from segcal.service.files import ServiceFiles
from segcal.service.requests import JobRequest
from segcal.service.roots import Roots
from segcal.types import Progress

CLEARINGS = 10
"""How often a folder is cleared before it is given up, a second apart."""


@dataclass(frozen=True, slots=True)
class WorkContext:
    """The same for every job of a worker.

    Attributes:
        files: layout of the data folder.
        roots: folders that jobs may read.
        progress: told (stage, done, total).
        case_map: where cases are worked on.
        device: where voxels are processed.
    """

    files: ServiceFiles
    roots: Roots
    progress: Progress
    case_map: CaseMap
    device: torch.device


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of one job and what lies in it, see `ServiceFiles`; `path` is absolute.

    Attributes:
        sources: folders that the job's request names; what it reads lies there.
    """

    path: Path
    data: Path
    sources: tuple[Path, ...] = ()

    @classmethod
    def of(cls, job_id: str, files: ServiceFiles, request: JobRequest | None = None) -> JobFolder:
        manifest, *folders = (getattr(request, name, None) for name in ("manifest", "folder", "source"))
        sources = [Path(manifest).parent] if manifest else []
        sources += [Path(folder) for folder in folders if folder]
        return cls(files.job(job_id).absolute(), files.data.absolute(), tuple(sources))

    @property
    def given(self) -> Path:
        return self.path / "in"

    @property
    def out(self) -> Path:
        return self.path / "out"

    @property
    def qa(self) -> Path:
        return self.path / "qa"

    @property
    def view(self) -> Path:
        return self.path / "view"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def said(self, text: str) -> str:
        """A message without the places of this service, which are nobody's business: `in/case.npz: truncated`.

        Files of a manifest are named as the manifest names them: where it lies, the request says.
        """
        places = {str(p) for folder in (self.path, self.data) for p in (folder, folder.resolve())}
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(f"{place}/", "").replace(place, "the service's folder")
        for source in self.sources:
            text = re.sub(rf"(?<![^\s('\"`]){re.escape(str(source))}/", "", text)
        return text

    def said_all(self, messages: dict[str, str]) -> dict[str, str]:
        """The same for messages by case id."""
        return {case_id: self.said(text) for case_id, text in messages.items()}

    def existing(self, *names: str) -> tuple[str, ...]:
        """Those of the names, relative to the job's folder, that are there."""
        return tuple(name for name in names if (self.path / name).is_file())


def fresh(folder: Path) -> Path:
    """An empty folder; what an attempt that was killed left in it is gone, so that nothing of it shows.

    Raises:
        OutputError: somebody keeps writing into it: a task that a Dask worker has not given up yet.
    """
    for _ in range(CLEARINGS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return folder
        time.sleep(1.0)
    raise OutputError(f"{folder.name}: cannot be cleared; another process is still writing into it")


def stored_calibrator(sha256: str, files: ServiceFiles) -> FittedCalibrator:
    """The calibrator of that hash in the data folder."""
    path = files.calibrator(sha256)
    if not path.is_file():
        raise UnknownError(f"calibrator {sha256[:12]}…: its file is not there; upload it again")
    return load_calibrator(path)
