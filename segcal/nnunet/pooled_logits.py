"""The mean logits that nnU-Net hands to its export, calibrated in image geometry; nnU-Net resamples and decides."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.applying.maps import calibrated_maps
from segcal.applying.record import ApplySettings
from segcal.cases import CaseData
from segcal.errors import DataError, MismatchError
from segcal.fitted import FittedCalibrator
from segcal.io.dataset_json import DatasetLabels
from segcal.manifest import Manifest
from segcal.nnunet.export import channels
from segcal.types import Box


def calibrated_case(
    fitted: FittedCalibrator | None,
    logits: Any,
    plans_manager: Any,
    configuration_manager: Any,
    label_manager: Any,
    properties: Mapping[str, Any],
    *,
    as_probabilities: bool,
    num_threads_torch: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.float32] | None, Box]:
    """Bring nnU-Net's pooled logits into image geometry, decide as nnU-Net does, and calibrate.

    nnU-Net's own function does the resampling and the deciding; the logits it resampled are noted on the way.

    Args:
        fitted: None leaves the probabilities out.
        logits: (class, *preprocessed shape) mean over the folds.
        plans_manager: nnU-Net's.
        configuration_manager: nnU-Net's.
        label_manager: nnU-Net's.
        properties: nnU-Net's record of the preprocessing.
        as_probabilities: decide by probabilities, as nnU-Net does when they are asked for, instead of by logits; the
            two can differ where two classes are tied.
        num_threads_torch: handed on to nnU-Net; None leaves nnU-Net's default.

    Returns:
        nnU-Net's segmentation (z, y, x), calibrated probabilities (class, z, y, x), and the crop box.
    """
    from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

    noted: list[Any] = []
    threads = () if num_threads_torch is None else (num_threads_torch,)
    given = (logits, plans_manager, configuration_manager, _noting(label_manager, noted), properties)
    result = convert_predicted_logits_to_segmentation_with_correct_shape(*given, as_probabilities, *threads)
    segmentation: NDArray[Any] = result[0] if as_probabilities else result
    calibrated = None
    if fitted is not None:
        calibrated = _calibrated(fitted, noted[0], segmentation, plans_manager, label_manager, properties)
    return segmentation, calibrated, crop_box(plans_manager, properties)


def check_pooling(fitted: FittedCalibrator, name: str) -> None:
    """Refuse a calibrator for pooled probabilities: nnU-Net pools logits."""
    if fitted.info.pooling != "logits":
        raise MismatchError(
            f"{name}: fitted on pooled {fitted.info.pooling}, but nnU-Net averages the logits of its folds before they "
            "can be calibrated. Fit with `--pooling logits`, or use `segcal nnunet predict`, which pools by itself."
        )


def check_channels(
    fitted: FittedCalibrator, labels: DatasetLabels, *, n_members: int = 1, prediction: Mapping[str, Any] | None = None
) -> list[str]:
    """Refuse a calibrator of other classes; return warnings about how the model predicts, as far as that is known."""
    content: dict[str, Any] = {"version": 1, "name": "nnunet", "kind": "logits", "axes": "czyx", **channels(labels)}
    content["cases"] = [{"id": "any", "members": [f"member_{k}/any.npz" for k in range(n_members)]}]
    if prediction is not None:
        content["prediction"] = dict(prediction)
    return fitted.check_compatible(Manifest.model_validate(content), "logits")


def model_labels(label_manager: Any) -> DatasetLabels:
    """The channels as nnU-Net's label manager knows them."""
    named = {
        str(name): tuple(value) if isinstance(value, list | tuple) else (int(value),)
        for name, value in label_manager.label_dict.items()
        if name != "ignore"
    }
    if not label_manager.has_regions:
        ordered = sorted(named, key=lambda name: named[name])
        return DatasetLabels(classes=tuple(ordered), ignore_label=label_manager.ignore_label)
    return DatasetLabels(
        regions=tuple((name, values) for name, values in named.items() if set(values) != {0}),
        regions_class_order=tuple(label_manager.regions_class_order),
        ignore_label=label_manager.ignore_label,
    )


def crop_box(plans_manager: Any, properties: Mapping[str, Any]) -> Box:
    """Where the network predicted, in image order (z, y, x)."""
    box = properties["bbox_used_for_cropping"]
    z, y, x = ((int(box[axis][0]), int(box[axis][1])) for axis in plans_manager.transpose_backward)
    return z, y, x


def _calibrated(
    fitted: FittedCalibrator,
    logits: Any,
    segmentation: NDArray[Any],
    plans_manager: Any,
    label_manager: Any,
    properties: Mapping[str, Any],
) -> NDArray[np.float32]:
    """Calibrated (class, z, y, x) from logits on the voxels of the crop and nnU-Net's decision in the image."""
    labels, backward = model_labels(label_manager), tuple(plans_manager.transpose_backward)
    check_channels(fitted, labels)
    resampled = torch.as_tensor(logits).cpu().float()
    if not bool(torch.isfinite(resampled).all()):
        raise DataError("nnU-Net predicts NaN or beyond half precision: a fold diverged in training; leave it out.")
    decision = torch.from_numpy(np.ascontiguousarray(segmentation).astype(np.int64))
    if labels.regions is not None:
        decision = torch.from_numpy(
            _placed(label_manager.apply_inference_nonlin(resampled) > 0.5, backward, properties)
        )
    case = CaseData(
        case_id="nnU-Net",
        logits=torch.from_numpy(_placed(resampled, backward, properties)),
        labels=None,
        region_labels=None,
        valid=None,
        decision=decision,
        inside=None,
        crop=crop_box(plans_manager, properties),
        grid=None,
        n_floored=0,
        kind="logits",
    )
    maps = calibrated_maps(fitted, case, _settings(labels), regions=labels.regions is not None)
    return maps.probabilities.astype(np.float32, copy=False)


def _noting(label_manager: Any, noted: list[Any]) -> Any:
    """A label manager that does the same and keeps the resampled logits it is given."""
    double = copy.copy(label_manager)

    def apply_inference_nonlin(logits: Any) -> Any:
        noted.append(logits)
        return label_manager.apply_inference_nonlin(logits)

    def convert_logits_to_segmentation(logits: Any) -> Any:
        noted.append(logits)
        return label_manager.convert_logits_to_segmentation(logits)

    double.apply_inference_nonlin = apply_inference_nonlin
    double.convert_logits_to_segmentation = convert_logits_to_segmentation
    return double


def _placed(values: torch.Tensor, backward: tuple[int, ...], properties: Mapping[str, Any]) -> NDArray[Any]:
    """(channel, *crop) values in the whole image, (channel, z, y, x), 0 outside the crop."""
    array = values.numpy()
    whole = np.zeros((len(array), *properties["shape_before_cropping"]), dtype=array.dtype)
    box = tuple(slice(int(low), int(high)) for low, high in properties["bbox_used_for_cropping"])
    whole[:, *box] = array
    return np.ascontiguousarray(whole.transpose(0, *(axis + 1 for axis in backward)))


def _settings(labels: DatasetLabels) -> ApplySettings:
    values = labels.regions_class_order or tuple(range(labels.n_channels))
    return ApplySettings(
        format="nnunet",
        dtype="float32",
        confidence=False,
        entropy=False,
        kind="logits",
        pooling="logits",
        axes="czyx",
        label_values=values,
    )
