"""Applying a calibrator: every case of a manifest to calibrated maps and a segmentation on disk.

Cases are read ahead by one: while a case is calibrated and written, the members of the next are being unpacked.
Nothing is kept of a finished case, so memory is bounded by two cases whatever their number.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import nibabel
import numpy
import torch
from torch import Tensor

import segcal
from segcal.applying.files import plan_files, possible_files, write_case
from segcal.applying.inputs import input_files, input_fingerprints
from segcal.applying.maps import calibrated_maps, member_maps
from segcal.applying.record import ApplySettings, CaseEntry, Recipe, RunRecord, open_record
from segcal.applying.stored import MapFormat, StorageType, check_storage
from segcal.calibrated_members import CalibratedMembers
from segcal.cases import CaseData, Want, load_case, load_poolings
from segcal.checks.tell_tales import TellTales
from segcal.errors import Interrupted, OutputError, SegcalError
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest, ManifestCase
from segcal.types import AppliedPooling, Grid, Progress


@dataclass
class ApplyRun:
    """What a run did, by case id.

    Attributes:
        out: The folder with the files and run.json.
        done: Cases written by this run.
        redone: Those of them that an earlier run had finished from other inputs, settings or calibrator.
        skipped: Cases an earlier run had finished from the same.
        failed: Cases that could not be done, with the message; only with `keep_going`.
        n_floored: Stored probabilities of exactly 0 (and the like) that were raised to have a logarithm.
        differing: With members-probabilities: voxels by case where the map does not say the segmentation's class.
        warnings: What the user should know about the match of calibrator and data.
    """

    out: Path
    done: list[str] = field(default_factory=list)
    redone: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    n_floored: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def apply_calibrator(
    fitted: FittedCalibrator,
    manifest: Manifest,
    out: Path,
    *,
    device: torch.device,
    format: MapFormat = "nnunet",
    dtype: StorageType = "float32",
    pooling: AppliedPooling | None = None,
    resume: bool = False,
    keep_going: bool = False,
    confidence: bool = False,
    entropy: bool = False,
    force: bool = False,
    cases: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> ApplyRun:
    """Write calibrated probabilities and the segmentation of every case; see `segcal.applying.files` for the layout.

    The maps of order- and argmax-preserving methods hold the pooled decision at every voxel, in the file, at every
    dtype. Outside a case's crop the background is certain (regions: absent). Files appear whole or not at all, and
    run.json names a case only after its files are finished.

    Args:
        format: nnU-Net's `.npz`, or NIfTI with the case's true affine.
        dtype: float32; float16 (nnunet only); uint16 in steps of 1/65535 with scl_slope (nifti only).
        pooling: How members are pooled; that of the calibrator when absent. `members-probabilities` calibrates each
            member and averages then; the segmentation stays the decision of the pooled members, and voxels where
            the averaged map says otherwise are counted. Any other pooling than the calibrator's is refused.
        resume: Continue the run in `out`: skip cases whose inputs, calibrator, settings and files are unchanged.
        keep_going: Note a case that cannot be done and go on with the next; a full disk still ends the run.
        confidence, entropy: Also write these maps.
        force: Apply in spite of a mismatch that can be overridden.
        cases: Ids to apply to; all when absent.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; what was finished so far is in run.json.
    """
    check_storage(format, dtype)
    pooling = pooling or fitted.info.pooling
    warnings = tuple(fitted.check_compatible(manifest, pooling, force=force))
    chosen = manifest.cases if cases is None else tuple(manifest.case(case_id) for case_id in dict.fromkeys(cases))
    settings = ApplySettings(
        format=format,
        dtype=dtype,
        confidence=confidence,
        entropy=entropy,
        kind=manifest.kind,
        pooling=pooling,
        axes=manifest.axes,
        label_values=manifest.regions_class_order or tuple(range(manifest.n_classes)),
    )
    record = open_record(
        out,
        _fresh_record(fitted, manifest, settings, warnings),
        resume=resume,
        inputs=input_files(manifest, chosen),
        targets=(name for case in chosen for name in possible_files(case.id)),
    )
    job = _Job(fitted, manifest, out, settings, device, record)
    run = ApplyRun(out, warnings=warnings)
    try:
        _run_cases(job, run, chosen, keep_going, progress)
    except KeyboardInterrupt:
        finished = len(run.done) + len(run.skipped)
        raise Interrupted(
            f"{finished} of {len(chosen)} cases are finished in {out}; run the same command with --resume to go on"
        ) from None
    record.complete = not run.failed
    record.save(out)
    return run


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A case that was read, or found finished: then there is no data. `mean` is that of calibrated members."""

    recipe: Recipe
    data: CaseData | None
    seconds: float
    mean: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """One calibrator on one manifest into one folder, a case at a time."""

    fitted: FittedCalibrator
    manifest: Manifest
    out: Path
    settings: ApplySettings
    device: torch.device
    record: RunRecord

    def prepare(self, case: ManifestCase) -> _Prepared:
        """Read a case unless its files are there already; runs beside `finish` of the case before."""
        start = time.perf_counter()
        recipe = Recipe(
            calibrator_sha256=self.record.calibrator_sha256,
            settings=self.settings,
            inputs=input_fingerprints(self.manifest, case),
        )
        entry = self.record.cases.get(case.id)
        if entry is not None and entry.stands_for(recipe, self.out):
            return _Prepared(recipe, None, 0.0)
        if self.settings.pooling == "members-probabilities":
            members = CalibratedMembers(self.fitted, device=self.device)
            wanted = [Want(self.fitted.info.pooling)]
            data = load_poolings(
                self.manifest,
                case,
                wanted,
                device=self.device,
                with_labels=False,
                on_member=lambda _, member: members.add(member),
            )[0]
            return _Prepared(recipe, data, time.perf_counter() - start, members.mean())
        data = load_case(self.manifest, case, pooling=self.settings.pooling, device=self.device, with_labels=False)
        return _Prepared(recipe, data, time.perf_counter() - start)

    def finish(self, case: ManifestCase, prepared: _Prepared, data: CaseData) -> int:
        """Calibrate, write, and only then put the case into run.json; returns `CaseMaps.n_differing`."""
        start = time.perf_counter()
        noticed = TellTales()
        noticed.look(data)
        grid = data.grid or Grid((data.logits.shape[1], data.logits.shape[2], data.logits.shape[3]))
        files = plan_files(case.id, grid, self.settings)
        regions = self.manifest.has_regions
        if prepared.mean is None:
            maps = calibrated_maps(self.fitted, data, self.settings, regions=regions)
        else:
            maps = member_maps(prepared.mean, data.decision, data.crop, self.settings, regions=regions)
        calibrated = time.perf_counter()
        before = self.record.cases.pop(case.id, None)
        if before is not None:
            # From here on the files may be of either run, so the old entry no longer describes them.
            self.record.save(self.out)
        outputs = write_case(self.out, files, maps, grid.affine)
        for stale in () if before is None else before.outputs:
            if stale.file not in files.names:
                (self.out / stale.file).unlink(missing_ok=True)
        written = time.perf_counter()
        seconds = {"read": prepared.seconds, "calibrate": calibrated - start, "write": written - calibrated}
        self.record.cases[case.id] = CaseEntry(
            status="done",
            recipe=prepared.recipe,
            outputs=outputs,
            n_floored=data.n_floored,
            n_differing=maps.n_differing,
            warnings=tuple(noticed.warnings()),
            seconds={stage: round(value, 3) for stage, value in seconds.items()},
        )
        self.record.save(self.out)
        return maps.n_differing


def _run_cases(
    job: _Job, run: ApplyRun, cases: Sequence[ManifestCase], keep_going: bool, progress: Progress | None
) -> None:
    noticed = TellTales()
    with closing(_read_ahead(cases, job.prepare)) as reading:
        for index, (case, reader) in enumerate(reading):
            if progress is not None:
                progress("apply", index, len(cases))
            before = job.record.cases.get(case.id)
            try:
                prepared = reader.result()
                if prepared.data is None:
                    run.skipped.append(case.id)
                    continue
                n_differing = job.finish(case, prepared, prepared.data)
            except OutputError:
                raise
            except SegcalError as error:
                left = () if before is None else before.outputs
                job.record.cases[case.id] = CaseEntry(status="failed", error=str(error), outputs=left)
                job.record.save(job.out)
                if not keep_going:
                    raise
                run.failed[case.id] = str(error)
                continue
            noticed.look(prepared.data)
            run.done.append(case.id)
            run.n_floored += prepared.data.n_floored
            if prepared.mean is not None:
                run.differing[case.id] = n_differing
            if before is not None and before.status == "done":
                run.redone.append(case.id)
    run.warnings = (*run.warnings, *noticed.warnings())
    if progress is not None:
        progress("apply", len(cases), len(cases))


def _read_ahead(
    cases: Sequence[ManifestCase], prepare: Callable[[ManifestCase], _Prepared]
) -> Generator[tuple[ManifestCase, Future[_Prepared]]]:
    """Cases in order, each with its reading under way; the next one starts when a case is handed out."""
    if not cases:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="segcal-apply") as reader:
        ahead = reader.submit(prepare, cases[0])
        try:
            for case, following in zip(cases, [*cases[1:], None], strict=True):
                current = ahead
                current.exception()  # waits, so that never more than two cases are in memory
                if following is not None:
                    ahead = reader.submit(prepare, following)
                yield case, current
        finally:
            ahead.cancel()


def _fresh_record(
    fitted: FittedCalibrator, manifest: Manifest, settings: ApplySettings, warnings: tuple[str, ...]
) -> RunRecord:
    versions = {
        "segcal": segcal.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "nibabel": nibabel.__version__,
    }
    return RunRecord(
        calibrator_sha256=fitted.sha256,
        method=fitted.info.method,
        manifest_name=manifest.name,
        manifest_sha256=manifest.sha256,
        settings=settings,
        versions=versions,
        warnings=warnings,
    )
