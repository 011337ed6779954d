"""Cross-validation to manifest: every training case predicted by the one fold that did not train on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import ManifestError, MissingFileError
from segcal.manifest import Manifest
from segcal.manifest_scan import scan
from segcal.nnunet.crops import find_crops
from segcal.nnunet.documents import FoldSplit, Plans, read_plans, read_splits
from segcal.nnunet.segmentations import lies_in_ras
from segcal.scan_folders import NPZ_ENDINGS, find_labels, in_words, relative_to

_FOLD = re.compile(r"fold_(\d+)")

_MISMATCH = (
    "every prediction is that of a single model, while nnU-Net deploys the folds together. Apply what is fitted here "
    "to the mean of the logits (folds inside nnUNetv2_predict); on the mean of probabilities (nnUNetv2_ensemble), "
    "which is less sure of itself, it corrects too much; to average probabilities, calibrate each member first "
    "(`--pooling members-probabilities` of apply and predict). Labelled cases outside the training set, predicted by "
    "all folds, are the better ground to fit on"
)


@dataclass(frozen=True, slots=True)
class OutOfFold:
    """The manifest, not yet on disk, and what there is to know about it.

    Attributes:
        manifest: one member per case, the out-of-fold prediction.
        cases_by_fold: how many cases every fold gave.
        warnings: one sentence each.
    """

    manifest: Manifest
    cases_by_fold: dict[int, int]
    warnings: tuple[str, ...]


def collect_out_of_fold(model_folder: Path, *, labels: Path, out: Path, splits: Path | None = None) -> OutOfFold:
    """Describe a model's cross-validation predictions as a manifest for calibration.

    Args:
        model_folder: `TRAINER__PLANS__CONFIG` with `fold_*/validation`, trained or validated with --npz.
        labels: labelsTr, or gt_segmentations of the preprocessed dataset.
        out: where the manifest will lie; nothing is written here.
        splits: splits_final.json; cases a fold was trained on are then left out.

    Raises:
        ManifestError: There is no out-of-fold prediction, such as with `fold_all` alone.
    """
    folds, warnings = _folds(model_folder)
    files, notes = _predictions(model_folder, folds)
    warnings += notes
    if splits is not None:
        warnings += _leave_out_training_cases(files, read_splits(splits), splits)
    chosen, notes = _one_fold_each(files)
    warnings += notes
    if not chosen:
        raise ManifestError(
            f"{model_folder}: no case is left that its fold was not trained on; is {splits} the right file?"
        )
    own = model_folder / "plans.json"
    plans = read_plans(own) if own.is_file() else None
    manifest, notes = _manifest(model_folder, chosen, labels, out, plans)
    by_fold = {fold: sum(where == fold for where, _ in chosen.values()) for fold in sorted(folds)}
    return OutOfFold(manifest, by_fold, (*warnings, *notes, _MISMATCH))


def _folds(model_folder: Path) -> tuple[dict[int, Path], list[str]]:
    if not model_folder.is_dir():
        raise MissingFileError(f"{model_folder}: there is no such folder; name the TRAINER__PLANS__CONFIG folder.")
    found = ((path, _FOLD.fullmatch(path.name)) for path in sorted(model_folder.iterdir()))
    folds = {int(match[1]): path for path, match in found if match is not None and path.is_dir()}
    trained_on_all = (model_folder / "fold_all").is_dir()
    if not folds and trained_on_all:
        raise ManifestError(
            f"{model_folder}: has fold_all only, which was trained on every case: its predictions of them show the "
            "training error, and a calibrator fitted on them would be far too sure. Train folds 0 to 4, or predict "
            "labelled cases outside the training set (`segcal nnunet export`)."
        )
    if not folds:
        raise ManifestError(
            f"{model_folder}: holds no fold_0, fold_1, …; name nnU-Net's model folder, "
            "nnUNet_results/DatasetXXX_NAME/TRAINER__PLANS__CONFIG."
        )
    return folds, ["fold_all was left out: it was trained on the cases it predicts"] if trained_on_all else []


def _predictions(model_folder: Path, folds: Mapping[int, Path]) -> tuple[dict[int, dict[str, Path]], list[str]]:
    """Saved probabilities by fold and case; what was predicted without being saved becomes a warning."""
    files: dict[int, dict[str, Path]] = {}
    notes = []
    for fold, path in folds.items():
        validation = path / "validation"
        saved = {p.name[: -len(".npz")]: p for p in _npz(validation)}
        predicted = set(find_labels(validation)) if validation.is_dir() else set()
        missing = sorted(predicted - set(saved))
        if missing or not saved:
            what = f"without saved probabilities: {in_words(missing)}" if missing else "has no validation output"
            notes.append(f"fold {fold}: {what}; make them with `{_command(model_folder, fold)}`")
        files[fold] = saved
    if not any(files.values()):
        raise ManifestError(
            f"{model_folder}: no fold has saved probabilities; nnU-Net saves them only with --npz. Without training "
            f"again: {'; '.join(_command(model_folder, fold) for fold in sorted(folds))}"
        )
    return files, notes


def _npz(folder: Path) -> Sequence[Path]:
    if not folder.is_dir():
        return []
    return [p for p in sorted(folder.iterdir()) if p.name.lower().endswith(NPZ_ENDINGS) and not p.name.startswith(".")]


def _command(model_folder: Path, fold: int) -> str:
    """The call that validates a fold again, as far as the folder's name tells it."""
    parts = model_folder.absolute().name.split("__")
    if len(parts) != 3:
        return f"nnUNetv2_train DATASET CONFIGURATION {fold} --val --npz"
    trainer, plans, configuration = parts
    extra = "" if trainer == "nnUNetTrainer" else f" -tr {trainer}"
    extra += "" if plans == "nnUNetPlans" else f" -p {plans}"
    return f"nnUNetv2_train {model_folder.absolute().parent.name} {configuration} {fold} --val --npz{extra}"


def _leave_out_training_cases(
    files: Mapping[int, dict[str, Path]], splits: Sequence[FoldSplit], path: Path
) -> list[str]:
    """Remove cases that are training cases of their fold; say where the splits cannot tell."""
    notes = []
    for fold, found in files.items():
        if fold >= len(splits):
            notes.append(f"{path} has {len(splits)} folds, so nothing says what fold {fold} was trained on")
            continue
        split = splits[fold]
        trained = sorted(set(found) & split.train)
        if trained:
            notes.append(f"splits overlap: left out, fold {fold} was trained on them: {in_words(trained)}")
            for case_id in trained:
                del found[case_id]
        unknown = sorted(set(found) - split.val)
        if unknown:
            notes.append(f"fold {fold} predicted cases that {path.name} does not give it: {in_words(unknown)}")
    return notes


def _one_fold_each(files: Mapping[int, Mapping[str, Path]]) -> tuple[dict[str, tuple[int, Path]], list[str]]:
    """The fold and file of every case; of several folds the first."""
    chosen: dict[str, tuple[int, Path]] = {}
    repeated: set[str] = set()
    for fold in sorted(files):
        for case_id, path in files[fold].items():
            if case_id in chosen:
                repeated.add(case_id)
            else:
                chosen[case_id] = (fold, path)
    notes = (
        [f"splits overlap: validated by several folds, the first one was taken: {in_words(sorted(repeated))}"]
        if repeated
        else []
    )
    return dict(sorted(chosen.items())), notes


def _manifest(
    model_folder: Path, chosen: Mapping[str, tuple[int, Path]], labels: Path, out: Path, plans: Plans | None
) -> tuple[Manifest, list[str]]:
    ground_truth = find_labels(labels)
    without = [case_id for case_id in chosen if case_id not in ground_truth]
    if len(without) == len(chosen):
        raise ManifestError(
            f"{labels}: no label belongs to a case (it has {in_words(sorted(ground_truth), 3)}; the cases are "
            f"{in_words(list(chosen), 3)})."
        )
    if plans is not None and plans.reorients:
        _refuse_turned(plans, [ground_truth[case_id] for case_id in chosen if case_id in ground_truth])
    fields = _fields(model_folder, chosen, out)
    files = {case_id: path for case_id, (_, path) in chosen.items()}
    crops = find_crops(files, plans, regions="regions" in fields)
    root = out.absolute().parent
    cases = []
    for case_id, path in files.items():
        case: dict[str, Any] = {"id": case_id, "members": [relative_to(root, path)]}
        if case_id in ground_truth:
            case["label"] = relative_to(root, ground_truth[case_id])
        if case_id in crops.boxes:
            case["crop"] = [list(bounds) for bounds in crops.boxes[case_id]]
        cases.append(case)
    # nnU-Net's validation always mirrors and steps by half a patch.
    content = {**fields, "prediction": {"mirroring": True, "step_size": 0.5}, "cases": cases}
    notes = [f"no label in {labels}: {in_words(without)}"] if without else []
    return Manifest.from_content(content, out), notes + crops.notes


def _fields(model_folder: Path, chosen: Mapping[str, tuple[int, Path]], out: Path) -> dict[str, Any]:
    """Everything but the cases, from the model's dataset.json and the first file."""
    first = next(path for _, path in chosen.values())
    own = model_folder / "dataset.json"
    found = scan(
        [first.parent],
        kind="probabilities",
        out=out,
        dataset_json=own if own.is_file() else None,
        name=model_folder.absolute().parent.name or None,
    )
    content = found.manifest.model_dump(mode="json", exclude_none=True)
    return {key: value for key, value in content.items() if key not in ("cases", "splits")}


def _refuse_turned(plans: Plans, paths: Sequence[Path]) -> None:
    turned = [path for path in paths if not lies_in_ras(path)]
    if turned:
        raise ManifestError(
            f"{turned[0]}: lies as its file says, while {plans.reader} turned the predictions to RAS, so labels and "
            f"predictions do not fit ({len(turned)} of {len(paths)} cases). Turn the labels to RAS "
            "(nibabel.as_closest_canonical) into another folder and name that with --labels."
        )
