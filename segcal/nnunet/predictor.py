"""nnU-Net's predictor with calibrated probabilities; importing this module imports nnU-Net."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.nnunet.hook import calibrated_export
from segcal.nnunet.model import Fold, require_nnunet, silenced, weights_only
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
        use_folds: Sequence[Fold] | None,
        checkpoint_name: str = "checkpoint_final.pth",
    ) -> None:
        """As nnU-Net does, from plain weights only; then check that the calibrator was fitted for such a model.

        Raises:
            MismatchError: the model has other classes.
        """
        with weights_only():
            super().initialize_from_trained_model_folder(model_training_output_dir, use_folds, checkpoint_name)
        info: dict[str, Any] = {
            "mirroring": bool(self.use_mirroring and self.allowed_mirroring_axes),
            "step_size": float(self.tile_step_size),
        }
        if use_folds is not None:
            info["folds"] = list(use_folds)
        n_members = len(self.list_of_parameters)
        for sentence in check_channels(
            self.fitted, model_labels(self.label_manager), n_members=n_members, prediction=info
        ):
            warnings.warn(sentence, stacklevel=2)

    # nnU-Net looks at the signatures of its own methods (`wraps` keeps them) to note the arguments of a run.

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
