"""Which cases a fold has seen in training: calibrating on those would calibrate to the training error."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from segcal.errors import FileFormatError, MissingFileError, UsageError
from segcal.nnunet.model import Fold, TrainedModel

SPLITS_NAME = "splits_final.json"
_NAMED = 5


@dataclass(frozen=True, slots=True)
class TrainingCases:
    """What is known about a model's training.

    Attributes:
        splits: (training ids, validation ids) of every fold, None when no splits file was found.
        images: ids of the cases in imagesTr, as far as that folder was found.
        source: the splits file.
    """

    splits: tuple[tuple[frozenset[str], frozenset[str]], ...] | None
    images: frozenset[str]
    source: Path | None

    @property
    def known(self) -> bool:
        """Whether anything at all is known."""
        return self.splits is not None or bool(self.images)

    def seen_by(self, fold: Fold) -> frozenset[str]:
        """Cases the fold may have been trained on."""
        if self.splits is None:
            return self.images
        if isinstance(fold, int) and fold < len(self.splits):
            return self.splits[fold][0]
        # `all` takes every case; a fold beyond the file has a random split that is written nowhere.
        return self.images.union(*(training | validation for training, validation in self.splits))

    def refuse_seen(self, folds: Sequence[Fold], case_ids: Collection[str]) -> None:
        """Raise UsageError if one of the folds was trained on one of the cases."""
        seen = {fold: sorted(self.seen_by(fold) & set(case_ids)) for fold in folds}
        ids = sorted({case_id for found in seen.values() for case_id in found})
        if not ids:
            return
        named = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
        folds_named = ", ".join(str(fold) for fold, found in seen.items() if found)
        why = f"according to {self.source}" if self.source else "they lie in imagesTr"
        raise UsageError(
            f"{len(ids)} of the cases were used to train fold {folds_named} ({why}): {named}. A calibrator fitted on "
            "them learns the training error and comes out overconfident. Export held-out cases, use --out-of-fold to "
            "predict every case with the fold that did not see it, or --force."
        )

    def unseen_folds(self, folds: Sequence[Fold], case_ids: Collection[str]) -> dict[str, Fold]:
        """The fold whose validation cases include each case and which was not trained on it; cases without one fail."""
        if self.splits is None:
            raise UsageError(
                f"--out-of-fold needs {SPLITS_NAME}; name it with --splits (it is in nnUNet_preprocessed)."
            )
        own: dict[str, Fold] = {}
        for fold in folds:
            if isinstance(fold, str) or fold >= len(self.splits):
                raise UsageError(f"--out-of-fold: fold {fold} has no validation cases in {self.source}; leave it out.")
            training, validation = self.splits[fold]
            for case_id in sorted((validation - training) & set(case_ids)):
                own.setdefault(case_id, fold)
        return own


def training_cases(model: TrainedModel, images: Path, splits: Path | None = None) -> TrainingCases:
    """Find out what a model was trained on.

    The splits file is the one given, or the one beside the model or in `$nnUNet_preprocessed/<dataset>`. Case ids are
    also taken from `$nnUNet_raw/<dataset>/imagesTr` and from `images` itself if that is a folder of that name.
    """
    dataset = str(model.predictor.plans_manager.dataset_name)
    if splits is not None and not splits.is_file():
        raise MissingFileError(f"{splits}: there is no such splits file.")
    places = [model.folder / SPLITS_NAME, model.folder.parent / SPLITS_NAME]
    places += [folder / dataset / SPLITS_NAME for folder in _nnunet_folder("nnUNet_preprocessed")]
    source = splits or next((path for path in places if path.is_file()), None)
    folders = [images] if images.resolve().name == "imagesTr" else []
    folders += [folder / dataset / "imagesTr" for folder in _nnunet_folder("nnUNet_raw")]
    # A file is `<case>_0000<ending>`: the id is what stands before the channel.
    cut = len(str(model.predictor.dataset_json["file_ending"])) + len("_0000")
    ids = {path.name[:-cut] for folder in folders if folder.is_dir() for path in folder.iterdir()}
    return TrainingCases(None if source is None else _read_splits(source), frozenset(ids), source)


def _nnunet_folder(variable: str) -> list[Path]:
    """The folder an environment variable of nnU-Net names, if it is set."""
    value = os.environ.get(variable)
    return [Path(value)] if value else []


def _read_splits(path: Path) -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not valid JSON ({error}); expected nnU-Net's {SPLITS_NAME}.") from error
    if not isinstance(content, list) or not all(_is_split(entry) for entry in content):
        raise FileFormatError(f'{path}: expected a list of {{"train": [ids], "val": [ids]}}, as nnU-Net writes it.')
    return tuple((frozenset(entry["train"]), frozenset(entry["val"])) for entry in content)


def _is_split(entry: object) -> bool:
    return isinstance(entry, Mapping) and all(
        isinstance(entry.get(key), list) and all(isinstance(case_id, str) for case_id in entry[key])
        for key in ("train", "val")
    )
