"""Real results of the service's work, for its tests and to look at: hippocampus cases, or the phantom without them.

results = hippocampus_results(hippocampus, data)   # a few cases with images and labels, QA'd, with layers
results.folder / results.outcome.cases[0].view     # layers of the first case
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from segcal.case_map import CaseMap, in_process
from segcal.demo.phantom import make_phantom
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit
from segcal.manifest import Manifest, Split
from segcal.service.files import ServiceFiles
from segcal.service.model import new_id
from segcal.service.requests import ApplyRequest, JobRequest
from segcal.service.roots import Roots
from segcal.service.work.run import Outcome, WorkContext, run_job


@dataclass(frozen=True)
class Results:
    """One finished job in a data folder: what the worker hands to the store."""

    data: Path
    job_id: str
    request: JobRequest
    outcome: Outcome
    fitted: FittedCalibrator

    @property
    def folder(self) -> Path:
        return ServiceFiles(self.data).job(self.job_id)


def work_context(data: Path, *roots: Path, case_map: CaseMap = in_process) -> WorkContext:
    """A context that tells nobody about progress."""

    def silent(stage: str, done: int, total: int) -> None:
        pass

    return WorkContext(ServiceFiles(data), Roots.of(roots), silent, case_map, torch.device("cpu"))


def store_calibrator(fitted: FittedCalibrator, data: Path) -> str:
    """Put a calibrator where jobs look for it; returns its hash."""
    fitted.save(ServiceFiles(data).calibrator(fitted.sha256))
    return fitted.sha256


def quick_fit(manifest: Manifest, calibration: Sequence[str]) -> FittedCalibrator:
    """cms_ap with a fixed regulariser: nothing is tuned, so a few cases take a second or two."""
    return fit(manifest, method="cms_ap", split=Split(calibration=tuple(calibration)), lambda_=1e-3, mu=1e-3)


def applied(
    manifest: Manifest, fitted: FittedCalibrator, data: Path, cases: Sequence[str], job_id: str = ""
) -> Results:
    """Apply a calibrator to some cases as a worker would, with QA and layers."""
    job_id = job_id or new_id()
    request = ApplyRequest(
        calibrator=store_calibrator(fitted, data), manifest=str(manifest.path), cases=list(cases), batch=manifest.name
    )
    outcome = run_job(job_id, request, work_context(data, manifest.root))
    return Results(data, job_id, request, outcome, fitted)


def hippocampus_results(
    hippocampus: Path, data: Path, *, n_cases: int = 6, n_calibration: int = 8, cases: Sequence[str] = ()
) -> Results:
    """Cases of the really trained ensemble: fitted on calibration cases of split 0, applied to its first test cases.

    Or to `cases`: hippocampus_199, _219, _222 and _243 have many flags.
    """
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    split = manifest.split_ids(0)
    fitted = quick_fit(manifest, split.calibration[:n_calibration])
    return applied(manifest, fitted, data, cases or split.test[:n_cases])


def phantom_results(folder: Path, data: Path, *, n_cases: int = 4) -> Results:
    """The same from drawn data, which need nothing on the machine: cases of the home site and of the other one."""
    manifest = Manifest.load(make_phantom(folder, n_cases=10 + n_cases, n_other_site=2, shape=(16, 40, 40)))
    split = manifest.splits[0]
    return applied(manifest, quick_fit(manifest, split.calibration), data, split.test[-n_cases:])
