"""Per-member logits out of trained nnU-Net models, in the geometry of the image files, with a manifest ready to fit.

Layout of the folder, for a model with folds 0 and 1:

    fold_0/<case>.npz      key `logits` (class, z, y, x) float16, key `crop`: where the network predicted
    fold_0/<case>.json     how it was predicted: checkpoint hash, mirroring, step size, versions
    fold_1/…
    manifest.yaml          written last

With several model folders (seeds) the member folders are called model_0_fold_0, model_0_fold_1, model_1_fold_0, …
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import CaseError, DataError, MismatchError, MissingFileError, SegcalError, UsageError
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write, write_text_atomic
from segcal.io.dataset_json import DatasetLabels
from segcal.manifest import Manifest
from segcal.nnunet.geometry import ImageGeometry
from segcal.nnunet.image_files import find_cases
from segcal.nnunet.model import Fold, ModelPlan, TrainedModel, file_sha256, require_nnunet
from segcal.nnunet.orientation import box_in_file_order, in_file_order
from segcal.nnunet.training_cases import TrainingCases, training_cases
from segcal.types import Progress

MANIFEST_NAME = "manifest.yaml"


@dataclass(frozen=True, slots=True)
class Export:
    """What an export wrote.

    Attributes:
        manifest: as it lies in the folder.
        warnings: what the user has to know before fitting on it.
    """

    manifest: Manifest
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """The members of one case: (model, folds as positions) pairs."""

    case_id: str
    files: tuple[Path, ...]
    members: tuple[tuple[int, int], ...]


def export_logits(
    models: Sequence[TrainedModel],
    images: Path,
    out: Path,
    *,
    labels: Path | None = None,
    splits: Path | None = None,
    out_of_fold: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Predict every image of a folder with every member and write the logits.

    Args:
        models: one, or several with the same classes; every fold of each is a member.
        images: folder of `<case>_0000<ending>` files.
        out: folder for the members and manifest.yaml.
        labels: folder of `<case><ending>` files, named in the manifest; cases without one can not be fitted on.
        splits: splits_final.json; looked for beside the model when absent.
        out_of_fold: fold k predicts only its own validation cases, so every case gets one member.
        force: export cases a member was trained on.
        resume: leave out members whose file and sidecar are already there, from the same image and checkpoint.
        progress: called after every member of every case.

    Raises:
        UsageError: a member was trained on a case, or the options do not go together.
    """
    if out_of_fold and len(models) > 1:
        raise UsageError("--out-of-fold takes one model folder: give every case the fold that did not see it.")
    check_models(models)
    cases = find_cases(images, models[0].predictor.dataset_json, models[0].reader)
    trained = [training_cases(model, images, splits) for model in models]
    warnings: list[str] = []
    if out_of_fold:
        members = _out_of_fold_members(models[0], trained[0], tuple(cases), warnings)
    else:
        if not force:
            for model, known in zip(models, trained, strict=True):
                known.refuse_seen(model.folds, cases.keys())
        warnings += _warn_of_training(trained, force)
        everyone = tuple((m, k) for m, model in enumerate(models) for k in range(len(model.folds)))
        members = dict.fromkeys(cases, everyone)
    jobs = [_Job(case_id, cases[case_id], own) for case_id, own in members.items()]
    found_labels = _labels(labels, [job.case_id for job in jobs], models[0], warnings)
    entries = [_entry(models, job, out, found_labels.get(job.case_id)) for job in jobs]
    content = manifest_content(models, entries, name=out.resolve().name or "export", out_of_fold=out_of_fold)
    # Validated before hours of prediction, written after them: a folder with a manifest is complete.
    manifest = Manifest.from_content(content, out / MANIFEST_NAME)
    _run(models, jobs, out, resume, progress)
    return Export(manifest.save(out / MANIFEST_NAME), tuple(warnings))


def manifest_content(
    models: Sequence[TrainedModel], entries: Sequence[Mapping[str, Any]], *, name: str, out_of_fold: bool = False
) -> dict[str, Any]:
    """A manifest of logits that these models predicted: channels, how they predict, the given cases."""
    info = models[0].prediction.model_dump(mode="json")
    # Out of fold every case has another single member, which no list of folds describes.
    folds = None if out_of_fold else [fold for model in models for fold in model.folds]
    return {
        "version": 1,
        "name": name,
        "kind": "logits",
        "axes": "czyx",
        **channels(models[0].labels),
        "prediction": {key: value for key, value in {**info, "folds": folds}.items() if value is not None},
        "cases": [dict(entry) for entry in entries],
    }


def channels(labels: DatasetLabels) -> dict[str, Any]:
    """The keys of a manifest that describe a model's channels."""
    content: dict[str, Any] = {"ignore_label": labels.ignore_label}
    if labels.regions is None:
        return {"classes": list(labels.classes or ()), **content}
    regions = [{"name": name, "labels": list(values)} for name, values in labels.regions]
    return {"regions": regions, "regions_class_order": list(labels.regions_class_order or ()), **content}


def _run(
    models: Sequence[TrainedModel], jobs: Sequence[_Job], out: Path, resume: bool, progress: Progress | None
) -> None:
    total, done = sum(len(job.members) for job in jobs), 0
    for job in jobs:
        recipes = {position: _recipe(models[position[0]], position[1], job) for position in job.members}
        left = [
            p for p in job.members if not (resume and _is_there(out / _member_file(models, p, job.case_id), recipes[p]))
        ]
        done += len(job.members) - len(left)
        for position, geometry, values in _predicted(models, job, left):
            _write_member(out / _member_file(models, position, job.case_id), recipes[position], geometry, values)
            done += 1
            if progress is not None:
                progress("export", done, total)


def _predicted(
    models: Sequence[TrainedModel], job: _Job, members: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], ImageGeometry, NDArray[np.float16]]]:
    """Logits of one case by the given members; images are preprocessed once per model."""
    for m, model in enumerate(models):
        folds = [k for own, k in members if own == m]
        if not folds:
            continue
        with naming(job.case_id, "preprocessing by nnU-Net"):
            data, properties = model.plan.preprocess(job.files)
        geometry = ImageGeometry(model.plan, properties)
        for k in folds:
            with naming(job.case_id, "the network of nnU-Net"):
                logits = model.member_logits(k, data)
            check_finite(logits, job.case_id, model.plan, k)
            yield (m, k), geometry, in_file_order(geometry.member(logits), properties)


@contextmanager
def naming(case_id: str, doing: str) -> Iterator[None]:
    """Give errors from outside segcal the name of the case; nnU-Net's own say no name."""
    try:
        yield
    except SegcalError:
        raise
    except Exception as error:
        raise CaseError(f"{case_id}: {doing} failed ({type(error).__name__}: {error}).") from error


def check_finite(logits: Tensor, case_id: str, model: ModelPlan, index: int) -> None:
    """nnU-Net itself writes NaN without a word; here it is an error."""
    n_bad = int((~torch.isfinite(logits)).sum())
    if n_bad:
        raise DataError(
            f"{case_id}: fold {model.folds[index]} of {model.folder} predicts {n_bad:,} of {logits.numel():,} logits "
            "as NaN or beyond half precision. A network that diverged in training does that: leave the fold out "
            "with -f, or train it again."
        )


def _recipe(model: TrainedModel, index: int, job: _Job) -> dict[str, Any]:
    """Everything a member's file depends on."""
    info = model.prediction
    return {
        "checkpoint": model.checkpoint,
        "checkpoint_sha256": model.checkpoint_sha256[index],
        "configuration": model.configuration,
        "fold": model.folds[index],
        "images_sha256": [file_sha256(path) for path in job.files],
        "mirroring": info.mirroring,
        "nnunetv2": require_nnunet(),
        "plans": str(model.predictor.plans_manager.plans_name),
        "reader": model.reader,
        "step_size": info.step_size,
        "trainer": str(model.predictor.trainer_name),
    }


def _write_member(path: Path, recipe: Mapping[str, Any], geometry: ImageGeometry, values: NDArray[np.float16]) -> None:
    crop = box_in_file_order(geometry.crop, geometry.shape, geometry.properties)
    spacing = [float(value) for value in geometry.properties["spacing"]]
    with atomic_write(path) as temporary:
        write_npz(temporary, {"logits": values, "crop": np.asarray(crop, dtype=np.int64)})
    # Last: a sidecar that says the right things then stands beside a finished file.
    sidecar = {**recipe, "crop": crop, "spacing_mm": spacing}
    write_text_atomic(path.with_suffix(".json"), json.dumps(sidecar, indent=1, sort_keys=True) + "\n")


def _is_there(path: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether a member's file was finished from exactly this."""
    try:
        sidecar = json.loads(path.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return False
    return path.is_file() and all(sidecar.get(key) == value for key, value in recipe.items())


def _member_file(models: Sequence[TrainedModel], position: tuple[int, int], case_id: str) -> str:
    m, k = position
    fold = f"fold_{models[m].folds[k]}"
    return f"{fold if len(models) == 1 else f'model_{m}_{fold}'}/{case_id}.npz"


def _entry(models: Sequence[TrainedModel], job: _Job, out: Path, label: Path | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": job.case_id,
        "members": [_member_file(models, position, job.case_id) for position in job.members],
        "image": _relative(job.files[0], out),
    }
    return entry if label is None else {**entry, "label": _relative(label, out)}


def _relative(path: Path, folder: Path) -> str:
    # A `..` behind a linked folder leads to the parent of where the link points, so the links of folders are followed.
    return Path(os.path.relpath(path.parent.resolve() / path.name, folder.resolve())).as_posix()


def check_models(models: Sequence[TrainedModel]) -> None:
    """Refuse models that cannot be members of one ensemble: other classes, other input."""
    for model in models:
        if model.labels != models[0].labels:
            raise MismatchError(
                f"{model.folder}: its dataset.json names other channels than that of {models[0].folder}; the members "
                "of one ensemble need the same classes."
            )
        if model.predictor.dataset_json["file_ending"] != models[0].predictor.dataset_json["file_ending"]:
            raise MismatchError(f"{model.folder}: reads another file ending than {models[0].folder}.")
        if _channels(model) != _channels(models[0]):
            raise MismatchError(
                f"{model.folder}: takes the channels {', '.join(_channels(model))}, {models[0].folder} takes "
                f"{', '.join(_channels(models[0]))}; the members of one ensemble need the same images."
            )


def _channels(model: TrainedModel) -> list[str]:
    content = model.predictor.dataset_json
    return [str(name) for name in content.get("channel_names", content.get("modality", {})).values()]


def _out_of_fold_members(
    model: TrainedModel, trained: TrainingCases, case_ids: Sequence[str], warnings: list[str]
) -> dict[str, tuple[tuple[int, int], ...]]:
    own: Mapping[str, Fold] = trained.unseen_folds(model.folds, case_ids)
    left = [case_id for case_id in case_ids if case_id not in own]
    if not own:
        raise UsageError(
            f"--out-of-fold: no image is a validation case of the folds {model.folds} in {trained.source}."
        )
    if left:
        warnings.append(
            f"{len(left)} images are validation cases of none of these folds and were left out: {', '.join(left[:5])}"
        )
    warnings.append(
        "out of fold every case is predicted by a single model; an ensemble of the folds is usually better calibrated, "
        "so a calibrator fitted here may correct more than the ensemble needs. `--pooling members-probabilities` of "
        "apply and predict calibrates each member and averages then"
    )
    return {case_id: ((0, model.folds.index(own[case_id])),) for case_id in case_ids if case_id in own}


def _warn_of_training(trained: Sequence[TrainingCases], force: bool) -> list[str]:
    if force:
        return ["cases may have been used in training (--force); a calibrator fitted on those comes out overconfident"]
    if all(known.known for known in trained):
        return []
    return [
        "no splits_final.json and no imagesTr were found, so nobody checked whether a case was used in training; "
        "name the file with --splits"
    ]


def _labels(folder: Path | None, case_ids: Sequence[str], model: TrainedModel, warnings: list[str]) -> dict[str, Path]:
    if folder is None:
        return {}
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: there is no such folder of labels.")
    ending = str(model.predictor.dataset_json["file_ending"])
    paths = {case_id: folder / f"{case_id}{ending}" for case_id in case_ids}
    missing = [case_id for case_id, path in paths.items() if not path.is_file()]
    if len(missing) == len(paths):
        raise MissingFileError(f"{folder}: no label named `<case>{ending}` for any of the cases, such as {missing[0]}.")
    if missing:
        warnings.append(f"{len(missing)} cases have no label in {folder}: {', '.join(missing[:5])}")
    return {case_id: path for case_id, path in paths.items() if path.is_file()}
