"""A folder of saved probabilities to a calibrated copy of it; nnU-Net itself is not needed.

The copy holds what nnU-Net's folder held, under the same names: `<case>.npz` with the calibrated map under the key
`probabilities`, the segmentation in the format and geometry of the original, `<case>.pkl`, dataset.json, plans.json;
and run.json. Cleaned label maps, when asked for, lie in `postprocessed/`: the segmentation beside the probabilities
stays the one they say.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segcal.apply import ApplyRun, apply_calibrator
from segcal.applying.folders import manifest_of_folders
from segcal.applying.stored import StorageType
from segcal.case_map import CaseMap, in_process
from segcal.counted import count
from segcal.errors import MissingFileError, OutputError, SegcalError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.io.atomic import atomic_write
from segcal.io.images import read_labels
from segcal.manifest import Manifest
from segcal.nnunet.components import clean_labels
from segcal.nnunet.crops import find_crops
from segcal.nnunet.documents import Plans, read_plans, read_postprocessing
from segcal.nnunet.segmentations import in_file_orientation, is_flat_nifti, read_written, write_like
from segcal.scan_folders import NPZ_ENDINGS, find_labels, in_words
from segcal.types import Box, Progress

CLEANED = "postprocessed"
"""Subfolder of cleaned label maps, named as nnU-Net names its own."""

_PREDICTED = "predict_from_raw_data_args.json"
"""What nnUNetv2_predict leaves in its folder, and nnUNetv2_ensemble does not."""


@dataclass
class PostprocessRun:
    """What was done with a folder.

    Attributes:
        applied: the run of the calibrator.
        changed: voxels in which a case's segmentation differs from the original.
        cleaned: voxels the label post-processing then changed, when it was asked for.
        failed: cases left out, with the message.
        notes: what the user should know.
        manifest: what the folder was taken for: one member a case, with its box.
    """

    applied: ApplyRun
    manifest: Manifest
    changed: dict[str, int] = field(default_factory=dict)
    cleaned: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{count(len(self.applied.done), 'case')} written to {self.applied.out}"]
        if self.applied.skipped:
            parts.append(f"{len(self.applied.skipped)} already finished")
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        if self.changed:
            parts.append(f"{sum(self.changed.values()):,} voxels of the segmentations changed")
        if self.cleaned:
            parts.append(f"{sum(self.cleaned.values()):,} voxels cleaned in {CLEANED}/")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """For machines."""
        return {
            "out": self.applied.out,
            "done": self.applied.done,
            "skipped": self.applied.skipped,
            "failed": self.failed,
            "changed_voxels": self.changed,
            "cleaned_voxels": self.cleaned,
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class _Folder:
    """nnU-Net's output: its plans, if it has any, and the segmentation of every case."""

    path: Path
    plans: Plans | None
    segmentations: Mapping[str, Path]

    @property
    def reorients(self) -> bool:
        return self.plans is not None and self.plans.reorients

    def written_by_apply(self, case_id: str) -> bool:
        """Whether `segcal apply` by itself writes the segmentation as nnU-Net did."""
        path = self.segmentations[case_id]
        return path.name.lower().endswith((".nii.gz", ".png")) and not self.reorients and not is_flat_nifti(path)


def postprocess_folder(
    fitted: FittedCalibrator,
    folder: Path,
    out: Path,
    *,
    device: torch.device,
    postprocessing_json: Path | None = None,
    plans: Path | None = None,
    dataset_json: Path | None = None,
    dtype: StorageType = "float32",
    resume: bool = False,
    keep_going: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    case_map: CaseMap = in_process,
) -> PostprocessRun:
    """Write a calibrated copy of a folder that `nnUNetv2_predict --save_probabilities` made.

    The folder counts as the single, already pooled member. Outside the box nnU-Net cropped to, the background stays
    certain (regions: absent).

    Args:
        postprocessing_json: also write label maps cleaned as nnU-Net's postprocessing.json says.
        plans, dataset_json: instead of those in the folder.
        dtype: of the stored maps, float32 or float16.
        resume: skip the cases an earlier run finished.
        keep_going: list cases that cannot be read, calibrated or cleaned, and go on.
        force: apply a method that needs logits.
        case_map: where the cases are calibrated; here, one after the other, by default.
    """
    steps = None if postprocessing_json is None else read_postprocessing(postprocessing_json)
    source = _opened(folder, plans)
    found = manifest_of_folders(fitted, [folder], kind="probabilities", dataset_json=dataset_json)
    manifest = found.manifest
    files = {case.id: manifest.resolve(case.members[0]) for case in manifest.cases}
    crops = find_crops(files, source.plans, regions=manifest.has_regions, keep_going=keep_going)
    if len(crops.failed) == len(files):
        raise UsageError(f"{folder}: no case can be read; the first one says: {next(iter(crops.failed.values()))}")
    described = _described(manifest, source, crops.boxes)
    applied = apply_calibrator(
        fitted,
        described,
        out,
        device=device,
        dtype=dtype,
        resume=resume,
        keep_going=keep_going,
        force=force,
        cases=[case_id for case_id in files if case_id not in crops.failed],
        progress=progress,
        case_map=case_map,
    )
    run = PostprocessRun(applied, described, failed=crops.failed | applied.failed)
    run.notes += [*found.unmatched, *_unmatched(source, files), *crops.notes, *applied.warnings]
    run.notes += _other_average(fitted, folder)
    for case_id in (*applied.done, *applied.skipped):
        try:
            _finish_case(run, source, case_id, steps)
        except OutputError:
            raise
        except SegcalError as error:
            if not keep_going:
                raise
            run.failed[case_id] = f"calibrated, but its segmentation could not be finished: {error}"
    if fitted.info.preserves is not None:
        run.notes += _strange_originals(run.changed)
    finished = {*applied.done, *applied.skipped}
    names = {"plans.json": plans, "dataset.json": dataset_json}
    names |= {f"{case_id}.pkl": None for case_id in sorted(finished & crops.with_properties)}
    names |= {f"{case_id}.json": None for case_id in sorted(finished)}
    _copy_documents(folder, out, names)
    return run


def _opened(folder: Path, plans: Path | None) -> _Folder:
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: there is no such folder; name the output of nnUNetv2_predict.")
    if not any(path.name.lower().endswith(NPZ_ENDINGS) for path in folder.iterdir()):
        raise MissingFileError(
            f"{folder}: holds no .npz; nnU-Net saves probabilities only when asked to: "
            "nnUNetv2_predict … --save_probabilities"
        )
    own = folder / "plans.json"
    path = plans or (own if own.is_file() else None)
    return _Folder(folder, None if path is None else read_plans(path), find_labels(folder))


def _described(manifest: Manifest, source: _Folder, boxes: Mapping[str, Box]) -> Manifest:
    """The manifest with what the folder says about each case: the box, and the file that knows the geometry."""
    content = manifest.model_dump(mode="json", exclude_none=True)
    for case in content["cases"]:
        if case["id"] in boxes:
            case["crop"] = [list(bounds) for bounds in boxes[case["id"]]]
        if case["id"] in source.segmentations and source.written_by_apply(case["id"]):
            case["deployed"] = source.segmentations[case["id"]].name
    return Manifest.from_content(content, manifest.path)


def _finish_case(run: PostprocessRun, source: _Folder, case_id: str, steps: list[frozenset[int]] | None) -> None:
    """Bring the segmentation into the original's form, compare the two, clean it if asked to."""
    original, out = source.segmentations.get(case_id), run.applied.out
    if original is None:
        return
    target = out / original.name
    if not source.written_by_apply(case_id):
        _rewrite(out, case_id, original, target, reorient=source.reorients)
    labels = read_labels(target).values
    before = read_labels(original).values
    run.changed[case_id] = int(np.count_nonzero(labels != before))
    if steps is not None:
        cleaned = clean_labels(labels, steps)
        run.cleaned[case_id] = int(np.count_nonzero(cleaned != labels))
        write_like(original, cleaned, out / CLEANED / original.name)


def _rewrite(out: Path, case_id: str, original: Path, target: Path, *, reorient: bool) -> None:
    # Without geometry, which only the original's format can hold, `segcal apply` writes one of these two.
    plain = next((p for p in (out / f"segmentation/{case_id}.npz", out / f"{case_id}.png") if p.exists()), None)
    if plain is None:
        return  # an earlier run brought it here
    labels: Any = read_written(plain)
    write_like(original, in_file_orientation(labels, original) if reorient else labels, target)
    if plain != target:
        plain.unlink()
    if plain.parent != out and not any(plain.parent.iterdir()):
        plain.parent.rmdir()


def _unmatched(source: _Folder, files: Mapping[str, Path]) -> list[str]:
    alone = sorted(set(source.segmentations) - set(files))
    without = sorted(set(files) - set(source.segmentations))
    notes = [f"left out, a segmentation without .npz: {in_words(alone)}"] if alone else []
    if without:
        notes.append(
            f"no segmentation beside the probabilities: {in_words(without)}; theirs was written without geometry"
        )
    return notes


def _other_average(fitted: FittedCalibrator, folder: Path) -> list[str]:
    """A folder counts as one member, so nothing else compares how its folds were averaged with what was fitted on."""
    info = fitted.info
    if info.pooling == "logits" or info.n_members == 1 or not (folder / _PREDICTED).is_file():
        return []
    return [
        "pooling differs: the calibrator was fitted on the mean of the members' probabilities, while nnUNetv2_predict, "
        f"whose {_PREDICTED} is in the folder, averages the logits of its folds; calibration may not carry over "
        "(fit with --pooling logits; no matter if a single fold predicted)"
    ]


def _strange_originals(changed: Mapping[str, int]) -> list[str]:
    strange = [case_id for case_id, count in changed.items() if count]
    if not strange:
        return []
    return [
        f"the original segmentation is not what its own probabilities say: {in_words(strange)}; it was post-processed "
        "or belongs to another run. The calibrated folder holds the decision of the probabilities"
    ]


def _copy_documents(folder: Path, out: Path, names: Mapping[str, Path | None]) -> None:
    """Copy what nnU-Net's own tools look for beside the maps, from the folder or from the file named instead."""
    for name, instead in names.items():
        path = instead or folder / name
        if path.is_file():
            with atomic_write(out / name) as temporary:
                shutil.copyfile(path, temporary)
