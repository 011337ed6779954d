"""nnU-Net's predictor with calibrated probabilities; importing this module imports nnU-Net."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.device import resolve_device
from segcal.errors import UsageError
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.nnunet.hook import calibrated_export
from segcal.nnunet.image_files import find_cases
from segcal.nnunet.model import FINAL_CHECKPOINT, Fold, require_nnunet, silenced, weights_only
from segcal.nnunet.pooled_logits import calibrated_case, check_channels, check_pooling, model_labels

require_nnunet()

with silenced():
    from nnunetv2.inference.data_iterators import PreprocessAdapterFromNpy
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor


class CalibratedPredictor(nnUNetPredictor):  # type: ignore[misc]  # nnunetv2 has no types
    """An `nnUNetPredictor` whose probabilities, written or returned, are calibrated; segmentations are nnU-Net's.

    Args:
        calibrator: file written by `segcal fit --pooling logits`.
        options: of `nnUNetPredictor`: use_mirroring, tile_step_size, device, …
    """

    def __init__(self, calibrator: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        self.calibrator_path = Path(calibrator).resolve()
        self.fitted = load_calibrator(self.calibrator_path)
        check_pooling(self.fitted, str(self.calibrator_path))

    def initialize_from_trained_model_folder(
        self,
        model_training_output_dir: str,
        use_folds: Sequence[Fold | str] | str | None,
        checkpoint_name: str = FINAL_CHECKPOINT,
    ) -> None:
        """As nnU-Net does, from plain weights only; then check that the calibrator was fitted for such a model.

        Raises:
            MismatchError: the model has other classes.
        """
        if use_folds is None:
            use_folds = self.auto_detect_available_folds(model_training_output_dir, checkpoint_name)
        with weights_only():
            super().initialize_from_trained_model_folder(model_training_output_dir, use_folds, checkpoint_name)
        for sentence in _differences(self.fitted, self, use_folds):
            warnings.warn(sentence, stacklevel=2)

    # nnU-Net looks at the signatures of its own methods (`wraps` keeps them) to note the arguments of a run.

    @wraps(nnUNetPredictor.predict_from_files)
    def predict_from_files(self, *args: Any, **kwargs: Any) -> Any:
        with calibrated_export(self.calibrator_path, always=False):
            return super().predict_from_files(*args, **kwargs)

    @wraps(nnUNetPredictor.predict_from_data_iterator)
    def predict_from_data_iterator(self, *args: Any, **kwargs: Any) -> Any:
        with calibrated_export(self.calibrator_path, always=False):
            return super().predict_from_data_iterator(*args, **kwargs)

    @wraps(nnUNetPredictor.predict_from_files_sequential)
    def predict_from_files_sequential(self, *args: Any, **kwargs: Any) -> Any:
        with calibrated_export(self.calibrator_path, always=False):
            return super().predict_from_files_sequential(*args, **kwargs)

    @wraps(nnUNetPredictor.predict_single_npy_array)
    def predict_single_npy_array(self, *args: Any, **kwargs: Any) -> Any:
        with calibrated_export(self.calibrator_path, always=False):
            return super().predict_single_npy_array(*args, **kwargs)


def checking_predictor(fitted: FittedCalibrator, warn: Callable[[str], None]) -> type:
    """A class for nnU-Net's commands that says before the prediction, not after hours of it, what does not fit."""

    class CheckingPredictor(nnUNetPredictor):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            try:
                resolve_device(str(options["device"].type))
            except UsageError as error:
                raise UsageError(f"{error} nnU-Net's commands take cuda unless told `-device cpu`.") from None
            super().__init__(**options)

        def initialize_from_trained_model_folder(
            self, model_training_output_dir: str, use_folds: Any, checkpoint_name: str = FINAL_CHECKPOINT
        ) -> None:
            super().initialize_from_trained_model_folder(model_training_output_dir, use_folds, checkpoint_name)
            for sentence in _differences(fitted, self, use_folds):
                warn(sentence)

        def _manage_input_and_output_lists(self, images: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(images, str):
                reader = self.plans_manager.image_reader_writer_class.__name__
                cases = find_cases(Path(images), self.dataset_json, reader)
                images = [[str(path) for path in files] for files in cases.values()]
            return super()._manage_input_and_output_lists(images, *args, **kwargs)

    return CheckingPredictor


def calibrated_probabilities(
    predictor: Any, image_array: NDArray[Any], properties: Mapping[str, Any], fitted: FittedCalibrator
) -> NDArray[np.float32]:
    """Predict one image with any initialised `nnUNetPredictor` and calibrate.

    Args:
        predictor: its folds are averaged as logits, in nnU-Net's own half precision.
        image_array: (channel, z, y, x) as the reader named in plans.json gives it.
        properties: the reader's; nnU-Net needs `spacing`.
        fitted: calibrator for pooled logits.

    Returns:
        (class, z, y, x) float32.
    """
    check_pooling(fitted, "the calibrator")
    managers = (predictor.plans_manager, predictor.configuration_manager, predictor.label_manager)
    check_channels(fitted, model_labels(predictor.label_manager))
    with silenced():
        adapter = PreprocessAdapterFromNpy(
            [image_array], [None], [dict(properties)], [None], managers[0], predictor.dataset_json, managers[1]
        )
        prepared = next(adapter)
        logits = predictor.predict_logits_from_preprocessed_data(prepared["data"]).cpu()
        _, values, _ = calibrated_case(fitted, logits, *managers, prepared["data_properties"], as_probabilities=True)
    assert values is not None  # a calibrator was given
    return values


def _differences(fitted: FittedCalibrator, predictor: Any, use_folds: Sequence[Fold | str] | str) -> list[str]:
    """Refuse a calibrator of other classes; warnings where the loaded model predicts otherwise than at the fit."""
    folds = [use_folds] if isinstance(use_folds, str) else use_folds
    prediction = {
        "mirroring": bool(predictor.use_mirroring and predictor.allowed_mirroring_axes),
        "step_size": float(predictor.tile_step_size),
        "folds": [fold if fold == "all" else int(fold) for fold in folds],
    }
    labels, n_members = model_labels(predictor.label_manager), len(predictor.list_of_parameters)
    return check_channels(fitted, labels, n_members=n_members, prediction=prediction)
