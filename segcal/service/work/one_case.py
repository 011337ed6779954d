"""Jobs of one case: an output that appeared in a watched folder, or an uploaded archive."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from segcal.errors import DataError, MissingFileError
from segcal.fitted import FittedCalibrator
from segcal.io.archive import read_npz_header
from segcal.manifest import Manifest
from segcal.nnunet.crops import find_crops
from segcal.service.requests import CaseRequest
from segcal.service.roots import Roots
from segcal.service.watched_output import Output, fingerprint
from segcal.service.work.applying import Written, apply_to_folder, apply_to_manifest, look_and_finish
from segcal.service.work.context import JobFolder, WorkContext, fresh, stored_calibrator
from segcal.service.work.outcome import Outcome
from segcal.service.work.pointers import check_self_contained
from segcal.types import Kind

DOCUMENTS = ("dataset.json", "plans.json")
"""What nnU-Net leaves beside its outputs: the names of the classes, and the order of axes in the .pkl."""


def run_case(request: CaseRequest, job: JobFolder, context: WorkContext) -> Outcome:
    """Calibrate one case and look at it."""
    fitted = stored_calibrator(request.calibrator, context.files)
    if request.source is None:
        written = _uploaded(request.case, fitted, job, context)
    else:
        source = Path(request.source)
        folder = link_output(source, request, job, context.roots)
        check_unchanged(source, request)
        written = apply_to_folder(fitted, folder, job, context)
    outcome = look_and_finish(written, fitted, request.calibrator, job, context, qa=True)
    if request.source is not None:
        check_unchanged(Path(request.source), request)  # nothing was mixed from two predictions
    return outcome


def link_output(source: Path, request: CaseRequest, job: JobFolder, roots: Roots) -> Path:
    """A folder of links to the files of one output, named as the watched one; the other outputs are not in it.

    The service itself names `source`, because somebody told it to watch there. A link in it may still lead anywhere,
    so the files have to lie below it, or below a root.

    Raises:
        MissingFileError: the output is no longer there.
    """
    allowed = Roots.of((*roots.folders, source))
    wanted = {name: allowed.allow(source / name) for name in request.files}
    for name, path in wanted.items():
        if not path.is_file():
            raise MissingFileError(
                f"{request.case}: {name} is gone from the watched folder; put it back and try the job again"
            )
        check_self_contained(path, name)
    wanted |= {name: allowed.allow(source / name) for name in DOCUMENTS if (source / name).is_file()}
    folder = fresh(job.given) / (source.name or "watched")
    folder.mkdir()
    for name, path in wanted.items():
        (folder / name).symlink_to(path)
    return folder


def check_unchanged(source: Path, request: CaseRequest) -> None:
    """An output that was predicted again is no longer what the job is about.

    Raises:
        DataError: the files are not those that were found.
    """
    if not request.fingerprint:
        return
    try:
        states = [(name, (source / name).stat()) for name in request.files]
        found = Output(request.case, tuple((name, s.st_size, s.st_mtime_ns) for name, s in states), ())
        unchanged = fingerprint(source, found) == request.fingerprint
    except (OSError, zipfile.BadZipFile):
        unchanged = False
    if not unchanged:
        raise DataError(
            f"{request.case}: was predicted again, or removed, after it had been found; a new prediction gets a job of "
            "its own"
        )


def _uploaded(case_id: str, fitted: FittedCalibrator, job: JobFolder, context: WorkContext) -> Written:
    """An archive alone: the calibrator says what its channels are, and nobody where its voxels lie."""
    path = job.given / f"{case_id}.npz"
    kind: Kind = "logits" if "logits" in read_npz_header(path) else "probabilities"
    case: dict[str, Any] = {"id": case_id, "members": [path.name]}
    if kind == "probabilities":
        boxes = find_crops({case_id: path}, None, regions=fitted.info.regions).boxes
        case |= {"crop": [list(bounds) for bounds in boxes[case_id]]} if case_id in boxes else {}
    content = {"version": 1, "name": case_id, "kind": kind, "cases": [case], **_channels(fitted)}
    return apply_to_manifest(fitted, Manifest.from_content(content, job.given / "manifest.yaml"), job, context)


def _channels(fitted: FittedCalibrator) -> dict[str, Any]:
    names = fitted.info.classes
    if not fitted.info.regions:
        return {"classes": list(names)}
    # Which label values a region stands for is written in dataset.json, which was not uploaded: they are numbered.
    regions = [{"name": name, "labels": [index]} for index, name in enumerate(names, start=1)]
    return {"regions": regions, "regions_class_order": list(range(1, len(names) + 1))}
