"""Images to calibrated predictions in one go: nnU-Net predicts, segcal pools and calibrates, nnU-Net writes.

For calibrators that preserve the decision and pool logits the segmentation is nnU-Net's own. nnU-Net sums its folds
and resamples in half precision, so a pool in single precision decides otherwise at near-ties; its decision is
therefore taken from its own numbers and handed to the calibrator as the reference.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcal.applying.stored import StorageType, check_storage
from segcal.errors import Interrupted, MismatchError, OutputError, SegcalError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.io.atomic import remove_unfinished, write_text_atomic
from segcal.manifest import Manifest
from segcal.nnunet.export import check_models, manifest_content
from segcal.nnunet.image_files import find_cases
from segcal.nnunet.model import TrainedModel
from segcal.nnunet.predict_record import PredictedEntry, PredictRecord, fresh_record, load_record
from segcal.nnunet.predict_steps import (
    PredictFormat,
    PredictJob,
    PreparedCase,
    WrittenCase,
    finish_and_write,
    member_logits,
    prepare_case,
)
from segcal.nnunet.workers import Task, WorkerDiedError, Workers, default_workers, first_done
from segcal.types import AppliedPooling, Progress

_SUBFOLDERS = ("probabilities",)
"""Where a run writes below its folder."""


@dataclass(frozen=True, slots=True)
class PredictRun:
    """What a run did.

    Attributes:
        out: the folder.
        cases: finished, in order; those of an earlier run included.
        skipped: those of them that an earlier run had finished.
        failed: with the message; only with `keep_going`.
        differing: with members-probabilities: voxels by case where the map names another class than the segmentation.
        warnings: what the user has to know.
    """

    out: Path
    cases: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: Mapping[str, str]
    differing: Mapping[str, int]
    warnings: tuple[str, ...]


def predict_folder(
    model: TrainedModel | Sequence[TrainedModel],
    fitted: FittedCalibrator,
    images: Path,
    out: Path,
    *,
    pooling: AppliedPooling | None = None,
    format: PredictFormat = "nnunet",
    dtype: StorageType = "float32",
    n_preprocessing: int | None = 0,
    n_export: int | None = 0,
    resume: bool = False,
    keep_going: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> PredictRun:
    """Predict and calibrate every image of a folder, as `nnUNetv2_predict --save_probabilities` would lay it out.

    Written per case: the segmentation by nnU-Net's own writer; `<case>.npz` with the calibrated `probabilities` (and
    `crop`) and `<case>.pkl` with nnU-Net's properties, and/or `probabilities/<case>.nii.gz` in the geometry of the
    image; once: dataset.json, plans.json and a record of the run.

    Args:
        model: one, or several of the same dataset; all their folds are the members.
        fitted: decides how the members are pooled.
        images: folder of `<case>_0000<ending>` files.
        out: folder for the results; made when it is not there.
        pooling: that of the calibrator when absent. `members-probabilities` calibrates each member and averages then;
            the segmentation stays that of nnU-Net's mean logits.
        format: nnU-Net's `.npz`, NIfTI, or both.
        dtype: of the stored probabilities; float16 with nnunet, uint16 with nifti only.
        n_preprocessing: worker processes that prepare the next cases; 0 for none, None chooses by `default_workers`.
        n_export: worker processes that pool, calibrate and write; likewise. The result is the same to the byte, and
            at most `n_preprocessing + n_export + 1` cases are in memory.
        resume: skip cases that an earlier run finished with the same calibrator, models, images and options.
        keep_going: note a case that fails and go on; a full disk still ends the run.
        force: apply although something differs that `check_compatible` lets be forced.
        progress: called after every case.

    Raises:
        CaseError: nnU-Net fails on a case, or a worker process died.
        Interrupted: Ctrl-C or SIGTERM; what was finished so far is in the record.
    """
    models = (model,) if isinstance(model, TrainedModel) else tuple(model)
    job = _job(models, fitted, pooling, format, dtype, out)
    cases = find_cases(images, models[0].predictor.dataset_json, models[0].reader)
    if out.resolve() == images.resolve():
        raise UsageError(f"{out}: is the folder of the images; choose another folder with -o.")
    warnings = check_applicable(models, fitted, pooling=pooling, force=force)
    record, left, notes = _opened(models, job, cases, resume)
    _write_json(out / "dataset.json", models[0].predictor.dataset_json)
    _write_json(out / "plans.json", models[0].predictor.plans_manager.plans)
    record.save(out)
    ledger = _Ledger(record, out, keep_going, len(left), progress)
    wanted = (default_workers(len(left)) if n is None else n for n in (n_preprocessing, n_export))
    try:
        with Workers(next(wanted), job) as preparing, Workers(next(wanted), job) as finishing:
            _run(models, job, left, preparing, finishing, ledger)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(cases) - len(left) + ledger.n_done} of {len(cases)} cases are finished in {out}; run the same "
            "command with --continue_prediction to go on"
        ) from None
    finally:
        if ledger.worker_died:
            remove_unfinished(out, _SUBFOLDERS)
    done = tuple(case_id for case_id in cases if record.cases[case_id].status == "done")
    each = job.pooling == "members-probabilities"
    return PredictRun(
        out,
        done,
        tuple(case_id for case_id in cases if case_id not in left),
        ledger.failed,
        {case_id: record.cases[case_id].n_differing for case_id in done} if each else {},
        tuple(warnings + notes),
    )


def check_applicable(
    model: TrainedModel | Sequence[TrainedModel],
    fitted: FittedCalibrator,
    *,
    pooling: AppliedPooling | None = None,
    force: bool = False,
) -> list[str]:
    """Compare calibrator and models: errors for other classes, warnings for other folds, mirroring or step size."""
    models = (model,) if isinstance(model, TrainedModel) else tuple(model)
    n_members = sum(len(one.folds) for one in models)
    case = {"id": "any", "members": [f"member_{k}/any.npz" for k in range(n_members)]}
    manifest = Manifest.model_validate(manifest_content(models, [case], name="predict"))
    return fitted.check_compatible(manifest, pooling or fitted.info.pooling, force=force)


def _job(
    models: Sequence[TrainedModel],
    fitted: FittedCalibrator,
    pooling: AppliedPooling | None,
    format: PredictFormat,
    dtype: StorageType,
    out: Path,
) -> PredictJob:
    for one in ("nnunet", "nifti") if format == "both" else (format,):
        check_storage(one, dtype)
    check_models(models)
    for model in models:
        if model.reader != models[0].reader:
            raise MismatchError(
                f"{model.folder}: reads images with {model.reader}, {models[0].folder} with {models[0].reader}; the "
                "two may turn images differently. Export the logits (`segcal nnunet export`) and use `segcal apply`."
            )
    plans = tuple(model.plan for model in models)
    return PredictJob(plans, fitted, pooling or fitted.info.pooling, format, dtype, out)


def _opened(
    models: Sequence[TrainedModel], job: PredictJob, cases: Mapping[str, tuple[Path, ...]], resume: bool
) -> tuple[PredictRecord, dict[str, tuple[Path, ...]], list[str]]:
    """The record to go on with, the cases that are left to do, and what to say about it."""
    record = fresh_record(models, job)
    before = load_record(job.out) if resume else None
    if before is None:
        return record, dict(cases), []
    changed = record.differences(before)
    if changed:
        note = f"the earlier run in {job.out} differs in {', '.join(changed)}, so all cases are predicted again"
        return record, dict(cases), [note]
    remove_unfinished(job.out, _SUBFOLDERS)
    entries = {case_id: before.cases[case_id] for case_id in cases if case_id in before.cases}
    record.cases |= {case_id: entry for case_id, entry in entries.items() if entry.stands_for(cases[case_id], job.out)}
    return record, {case_id: files for case_id, files in cases.items() if case_id not in record.cases}, []


@dataclass
class _Ledger:
    """Keeps the record of a run while its cases come in."""

    record: PredictRecord
    out: Path
    keep_going: bool
    n_cases: int
    progress: Progress | None
    failed: dict[str, str] = field(default_factory=dict)
    n_done: int = 0
    worker_died: bool = False

    def done(self, case_id: str, case: WrittenCase) -> None:
        self.record.cases[case_id] = PredictedEntry(
            status="done", images_sha256=case.images_sha256, outputs=case.outputs, n_differing=case.n_differing
        )
        self.n_done += 1
        self._noted()

    def fail(self, case_id: str, error: SegcalError) -> None:
        """Note a failed case; raises the error unless the run goes on."""
        self.record.cases[case_id] = PredictedEntry(status="failed", error=str(error))
        self.failed[case_id] = str(error)
        self.worker_died |= isinstance(error, WorkerDiedError)
        if isinstance(error, OutputError):
            raise error
        self._noted()
        if not self.keep_going:
            raise error

    def _noted(self) -> None:
        self.record.save(self.out)
        if self.progress is not None:
            self.progress("predict", self.n_done + len(self.failed), self.n_cases)


def _run(
    models: Sequence[TrainedModel],
    job: PredictJob,
    cases: Mapping[str, tuple[Path, ...]],
    preparing: Workers[PredictJob],
    finishing: Workers[PredictJob],
    ledger: _Ledger,
) -> None:
    """Every case through the three steps; the networks run here, the other steps in workers where there are any."""
    under_way: list[Task[WrittenCase]] = []

    def take(task: Task[WrittenCase]) -> None:
        under_way.remove(task)
        try:
            ledger.done(task.case_id, task.result())
        except SegcalError as error:
            ledger.fail(task.case_id, error)

    for case_id, prepared in _prepared(job, cases, preparing):
        try:
            if isinstance(prepared, SegcalError):
                raise prepared
            logits = member_logits(models, prepared)
            if len(finishing) == 0:
                ledger.done(case_id, finish_and_write(job, prepared, logits))
                continue
            predicted = tuple(logits)
        except SegcalError as error:
            ledger.fail(case_id, error)
            continue
        # No more cases are handed out than there are processes: a case that waits costs as much memory as any.
        while len(under_way) >= len(finishing):
            take(first_done(under_way))
        under_way.append(finishing.submit(case_id, finish_and_write, prepared.without_data(), predicted))
    while under_way:
        take(first_done(under_way))


def _prepared(
    job: PredictJob, cases: Mapping[str, tuple[Path, ...]], preparing: Workers[PredictJob]
) -> Iterator[tuple[str, PreparedCase | SegcalError]]:
    """Cases in order, preprocessed or with the error; as many ahead as there are processes."""
    waiting = deque(cases.items())
    running: deque[Task[PreparedCase]] = deque()
    while waiting or running:
        if len(preparing) == 0:
            case_id, files = waiting.popleft()
            yield case_id, _outcome(lambda own=case_id, of=files: prepare_case(job, own, of))
            continue
        while waiting and len(running) < len(preparing):
            case_id, files = waiting.popleft()
            running.append(preparing.submit(case_id, prepare_case, case_id, files))
        task = running.popleft()
        outcome = _outcome(task.result)
        if waiting:  # its process is free for the next case while the networks look at this one
            case_id, files = waiting.popleft()
            running.append(preparing.submit(case_id, prepare_case, case_id, files))
        yield task.case_id, outcome


def _outcome(step: Any) -> PreparedCase | SegcalError:
    try:
        result: PreparedCase = step()
    except SegcalError as error:
        return error
    return result


def _write_json(path: Path, content: Any) -> None:
    write_text_atomic(path, json.dumps(content, indent=4) + "\n")
