"""A trained nnU-Net model folder as an ensemble: nnU-Net's own predictor, its folds as members.

Checkpoints are pickles. nnU-Net opens them with `weights_only=False`, which runs whatever code the file holds; here
torch is told to load plain weights and to let in only the numpy scalars of the training log. `plans.json` still names
the classes that build the network, so a model folder from a stranger is to be trusted as code is.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from segcal.errors import FileFormatError, MissingFileError, UsageError
from segcal.extras import how_to_install
from segcal.io.dataset_json import DatasetLabels, read_dataset_json
from segcal.io.nifti import check_whole, is_nifti
from segcal.manifest import PredictionInfo

Fold: TypeAlias = int | Literal["all"]

FINAL_CHECKPOINT = "checkpoint_final.pth"
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORBID = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@dataclass(frozen=True, eq=False)
class ModelPlan:
    """What a trained model knows besides its weights; small, so that worker processes can be handed it.

    Attributes:
        folder: the model folder, for messages.
        folds: the members, in order.
        labels: the channels.
        plans_manager: nnU-Net's.
        configuration_manager: nnU-Net's.
        dataset_json: its content.
    """

    folder: Path
    folds: tuple[Fold, ...]
    labels: DatasetLabels
    plans_manager: Any = field(repr=False)
    configuration_manager: Any = field(repr=False)
    dataset_json: dict[str, Any] = field(repr=False)

    @property
    def label_manager(self) -> Any:
        """nnU-Net's."""
        return self.plans_manager.get_label_manager(self.dataset_json)

    def preprocess(self, image_files: Sequence[Path]) -> tuple[Tensor, dict[str, Any]]:
        """Read the channels of one case and prepare them as nnU-Net does; the result serves all folds.

        Returns:
            (channel, *preprocessed shape) and nnU-Net's properties: spacing, crop, shapes before and after.

        Raises:
            FileFormatError: an image is truncated, which nnU-Net's readers do not always notice.
        """
        for path in image_files:
            if is_nifti(path):
                check_whole(path)
        with silenced():
            worker = self.configuration_manager.preprocessor_class(verbose=False)
            data, _, properties = worker.run_case(
                [str(path) for path in image_files],
                None,
                self.plans_manager,
                self.configuration_manager,
                self.dataset_json,
            )
        return torch.as_tensor(data, device="cpu"), properties


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model folder with the weights of its folds loaded; made by `load_model`.

    Attributes:
        folder: the model folder, `TRAINER__PLANS__CONFIGURATION`.
        folds: the members, in order.
        checkpoint: name of the checkpoint file in every fold's folder.
        predictor: nnU-Net's `nnUNetPredictor`, ready to predict with all folds.
        labels: the channels, from dataset.json.
        configuration: such as `3d_fullres`.
    """

    folder: Path
    folds: tuple[Fold, ...]
    checkpoint: str
    predictor: Any = field(repr=False)
    labels: DatasetLabels
    configuration: str

    @property
    def device(self) -> torch.device:
        """Where the network runs."""
        device: torch.device = self.predictor.device
        return device

    @property
    def reader(self) -> str:
        """Name of the class that reads images, which decides the axis order of arrays."""
        name: str = self.predictor.plans_manager.image_reader_writer_class.__name__
        return name

    @property
    def prediction(self) -> PredictionInfo:
        """How this predicts: what a calibrator remembers and compares."""
        # A model trained without mirroring has no axes to mirror, whatever is asked for.
        mirroring = bool(self.predictor.use_mirroring and self.predictor.allowed_mirroring_axes)
        return PredictionInfo(mirroring=mirroring, step_size=float(self.predictor.tile_step_size), folds=self.folds)

    @cached_property
    def checkpoint_sha256(self) -> tuple[str, ...]:
        """Hash of every fold's checkpoint file, in the order of `folds`."""
        return tuple(file_sha256(_checkpoint_path(self.folder, fold, self.checkpoint)) for fold in self.folds)

    @cached_property
    def plan(self) -> ModelPlan:
        """The same without the weights."""
        one = self.predictor
        return ModelPlan(
            self.folder, self.folds, self.labels, one.plans_manager, one.configuration_manager, one.dataset_json
        )

    def member_logits(self, index: int, data: Tensor) -> Tensor:
        """What fold number `index` predicts for a preprocessed case: (class, *preprocessed shape) float16."""
        everything = self.predictor.list_of_parameters
        self.predictor.list_of_parameters = [everything[index]]
        try:
            with silenced():
                logits: Tensor = self.predictor.predict_logits_from_preprocessed_data(data).cpu()
        finally:
            self.predictor.list_of_parameters = everything
        return logits


def load_model(
    folder: Path,
    *,
    folds: Sequence[Fold] | None = None,
    checkpoint: str = FINAL_CHECKPOINT,
    device: torch.device,
    mirroring: bool = True,
    step_size: float = 0.5,
) -> TrainedModel:
    """Load a trained model folder into nnU-Net's own predictor.

    Args:
        folder: holds plans.json, dataset.json and fold_0, fold_1, …
        folds: the members; None takes every numbered fold that has the checkpoint.
        checkpoint: file name in the folds' folders.
        device: where to predict.
        mirroring: test-time augmentation, as far as the model was trained with it.
        step_size: of the sliding window, as a share of the patch.

    Raises:
        UsageError: nnunetv2 is not installed, or the model is the second stage of a cascade.
        MissingFileError: the folder or a checkpoint is not there.
        FileFormatError: a checkpoint holds something else than weights.
    """
    require_nnunet()
    if not 0 < step_size <= 1:
        raise UsageError(f"step_size {step_size}: expected a share of the patch, above 0 and at most 1.")
    for name in ("plans.json", "dataset.json"):
        if not (folder / name).is_file():
            raise MissingFileError(
                f"{folder / name}: there is no such file. Expected a trained model folder of nnU-Net v2 "
                "(nnUNet_results/DatasetXXX_Name/TRAINER__PLANS__CONFIGURATION)."
            )
    labels = read_dataset_json(folder / "dataset.json")
    chosen = _chosen_folds(folder, folds, checkpoint)
    predictor, configuration = _predictor(folder, chosen, checkpoint, device, mirroring, step_size)
    stage = predictor.configuration_manager.previous_stage_name
    if stage is not None:
        raise UsageError(
            f"{folder}: the second stage of a cascade, it needs the segmentation of `{stage}` as input, which segcal "
            "does not feed. Predict with `nnUNetv2_predict --save_probabilities -prev_stage_predictions …` and use "
            "`segcal nnunet postprocess`, or calibrate a configuration without a previous stage."
        )
    return TrainedModel(folder, chosen, checkpoint, predictor, labels, configuration)


def require_nnunet() -> str:
    """The installed version of nnunetv2; an error that says how to install it where there is none."""
    try:
        return version("nnunetv2")
    except PackageNotFoundError:
        raise UsageError(
            "nnunetv2 is not installed, and this command runs nnU-Net itself. Install the extra: "
            f"{how_to_install('nnunet')}"
        ) from None


@contextmanager
def silenced() -> Iterator[None]:
    """Keep what nnU-Net prints off stdout, where a command's results go."""
    with redirect_stdout(io.StringIO()):
        yield


@contextmanager
def weights_only() -> Iterator[None]:
    """Within this block `torch.load` unpickles weights and numpy scalars and nothing else, whatever its caller asks."""
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORBID)}
    os.environ[_FORCE] = "1"
    try:
        # nnU-Net keeps the training log, with numpy numbers in it, beside the weights.
        with torch.serialization.safe_globals(_log_types()):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def parse_fold(text: str) -> Fold:
    """`0`, `1`, … or `all`."""
    if text == "all":
        return "all"
    if not re.fullmatch(r"\d+", text):
        raise UsageError(f"fold {text!r}: expected a number or `all`.")
    return int(text)


def _predictor(
    folder: Path, folds: Sequence[Fold], checkpoint: str, device: torch.device, mirroring: bool, step_size: float
) -> tuple[Any, str]:
    """nnU-Net's predictor and the name of its configuration, which the predictor itself does not keep."""
    with silenced():
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

        predictor = nnUNetPredictor(
            tile_step_size=step_size,
            use_gaussian=True,
            use_mirroring=mirroring,
            perform_everything_on_device=True,
            device=device,
            allow_tqdm=False,
        )
        try:
            with weights_only():
                predictor.initialize_from_trained_model_folder(str(folder), tuple(folds), checkpoint)
                first = torch.load(_checkpoint_path(folder, folds[0], checkpoint), map_location="cpu")
        except (pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
            raise FileFormatError(
                f"{folder}: a `{checkpoint}` cannot be loaded as plain weights that fit plans.json ({error}). Expected "
                "checkpoints written by nnU-Net v2; one that needs other Python objects is not opened, because that "
                "would run code from the file."
            ) from error
    return predictor, str(first["init_args"]["configuration"])


def _chosen_folds(folder: Path, folds: Sequence[Fold] | None, checkpoint: str) -> tuple[Fold, ...]:
    names = (path.parent.name.removeprefix("fold_") for path in folder.glob(f"fold_*/{checkpoint}"))
    found = {parse_fold(name) for name in names if name == "all" or name.isdecimal()}  # not `fold_0_old`
    there = sorted(fold for fold in found if isinstance(fold, int))
    if folds is None:
        if not there:
            hint = " There is a fold_all; ask for it with -f all." if "all" in found else ""
            raise MissingFileError(f"{folder}: no fold_*/{checkpoint} in it.{hint}")
        return tuple(there)
    if len(set(folds)) != len(folds) or not folds:
        raise UsageError(f"folds {list(folds)}: expected each fold once, and at least one.")
    for fold in folds:
        if fold not in found:
            raise MissingFileError(
                f"{_checkpoint_path(folder, fold, checkpoint)}: there is no such file; folds with that checkpoint: "
                f"{', '.join(map(str, there)) or 'none'}{', all' if 'all' in found else ''}."
            )
    return tuple(folds)


def _checkpoint_path(folder: Path, fold: Fold, checkpoint: str) -> Path:
    return folder / f"fold_{fold}" / checkpoint


def _log_types() -> list[Any]:
    # numpy 1 and 2 keep the same function under different names; a pickle says the name of the writer's version.
    scalar = np.float64(0).__reduce__()[0]
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    dtypes = [np.dtypes.Float64DType, np.dtypes.Float32DType, np.dtypes.Int64DType, np.dtypes.Int32DType]
    return [np.dtype, *((scalar, name) for name in names), *dtypes]


def file_sha256(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
