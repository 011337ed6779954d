"""Small cases on disk for the tests of the service's work, and a way to run a job on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from segcal.case_map import CaseMap, in_process
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.service.files import ServiceFiles
from segcal.service.requests import JobRequest, read_request
from segcal.service.work.run import Outcome, run_job
from tests.apply_data import rotated, temperature, write_manifest
from tests.qa.batches import blob, remembering
from tests.service.real_results import store_calibrator, work_context

JOB = "0" * 24
SHAPE = (8, 16, 16)


def calibrator() -> FittedCalibrator:
    """Temperature scaling that remembers five calibration cases, so that every z-score exists."""
    known = {"free_energy_mean": [9.0, 10, 11, 12, 13], "free_energy_std": [4.0, 5, 6, 7, 8]}
    return remembering(temperature(2.0), **known, confidence_mean=[0.95, 0.96, 0.97, 0.98, 0.99])


def labelled_cases(root: Path, names: Iterable[str] = ("a", "b", "c"), n_members: int = 2) -> Manifest:
    """Cases with members, an oblique image of real numbers and a label of their own."""
    root.mkdir(parents=True, exist_ok=True)
    cases = {name: [blob(10 * k + m, noise=2.0) for m in range(n_members)] for k, name in enumerate(names)}
    manifest = write_manifest(root, cases, affine=rotated())
    for k, name in enumerate(cases):
        rng = np.random.default_rng(k)
        image = rng.normal(300.0, 120.5, SHAPE).astype(np.float32)
        nib.save(nib.Nifti1Image(image.T, rotated()), root / f"images/{name}_0000.nii.gz")
        (root / "labels").mkdir(exist_ok=True)
        label = blob(k, noise=3.0).argmax(0).astype(np.uint8)
        nib.save(nib.Nifti1Image(label.T, rotated()), root / f"labels/{name}.nii.gz")
    content = manifest.model_dump(mode="json", exclude_none=True)
    for case in content["cases"]:
        case["label"] = f"labels/{case['id']}.nii.gz"
    return Manifest.from_content(content, manifest.path).save(manifest.path)


def run(
    data: Path,
    request: Mapping[str, Any] | JobRequest,
    *roots: Path,
    job_id: str = JOB,
    fitted: FittedCalibrator | None = None,
    case_map: CaseMap = in_process,
) -> Outcome:
    """Do a job; a mapping without a calibrator gets `fitted`, or `calibrator()`."""
    if isinstance(request, Mapping):
        values = dict(request)
        if values["kind"] in ("apply", "qa", "case"):
            values.setdefault("calibrator", store_calibrator(fitted or calibrator(), data))
        request = read_request(values)
    return run_job(job_id, request, work_context(data, *roots, case_map=case_map))


def job_folder(data: Path, job_id: str = JOB) -> Path:
    return ServiceFiles(data).job(job_id)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but run.json, which says how long things took."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.json"
    }


def layer(folder: Path, name: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(z, y, x) numbers, (z, y, x) stored integers and affine of a layer, by a reader that is not ours."""
    image: Any = nib.load(folder / f"{name}.nii.gz")
    return np.asarray(image.dataobj).T, np.asarray(image.dataobj.get_unscaled()).T, image.affine
