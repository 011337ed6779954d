"""Inside nnU-Net's own run: its predict path writes calibrated probabilities beside its own segmentation.

    with calibrated_export("cms_ap.safetensors"):
        predictor.predict_from_files(images, out)

nnU-Net hands the mean of its folds to a function that resamples, decides and writes, in its own process or in spawned
ones. Within the block that function is one of this module. A spawned process finds a function by its import path and
knows nothing of the parent's variables, so the calibrator travels as a path in the environment, which children inherit.

nnU-Net averages the logits of its folds (in half precision) before anybody else sees them. Only a calibrator that was
fitted on pooled logits belongs there; one for pooled probabilities is refused.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from segcal.errors import FileFormatError, UsageError
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write
from segcal.nnunet.model import require_nnunet, weights_only
from segcal.nnunet.pooled_logits import calibrated_case, check_pooling

CALIBRATOR_VARIABLE = "SEGCAL_NNUNET_CALIBRATOR"
ENTRY_POINTS = {
    "nnUNetv2_predict": "predict_entry_point",
    "nnUNetv2_predict_from_modelfolder": "predict_entry_point_modelfolder",
}


@contextmanager
def calibrated_export(calibrator_path: str | os.PathLike[str], *, always: bool = True) -> Iterator[FittedCalibrator]:
    """Within this block nnU-Net's predictors write, and return, calibrated probabilities.

    Functions and environment are those of before when the block ends. They belong to the whole process: two
    threads cannot use two calibrators at the same time.

    Args:
        calibrator_path: file written by `segcal fit`, fitted on pooled logits.
        always: write `<case>.npz` also in runs that do not ask for probabilities.

    Raises:
        MismatchError: the calibrator was fitted on pooled probabilities.
        UsageError: nnunetv2 is not installed.
    """
    require_nnunet()
    path = Path(calibrator_path).resolve()
    fitted = load_calibrator(path)
    check_pooling(fitted, str(path))
    from nnunetv2.inference import predict_from_raw_data as nnunet

    names = ("export_prediction_from_logits", "convert_predicted_logits_to_segmentation_with_correct_shape")
    functions = [getattr(nnunet, name) for name in names]
    variable = os.environ.get(CALIBRATOR_VARIABLE)
    os.environ[CALIBRATOR_VARIABLE] = str(path)
    setattr(nnunet, names[0], partial(export_calibrated, always=always))  # goes to spawned processes as it is
    setattr(nnunet, names[1], convert_calibrated)
    try:
        yield fitted
    finally:
        for name, function in zip(names, functions, strict=True):
            setattr(nnunet, name, function)
        os.environ.pop(CALIBRATOR_VARIABLE, None)
        if variable is not None:
            os.environ[CALIBRATOR_VARIABLE] = variable


def run_entry_point(calibrator_path: Path, command: Sequence[str]) -> None:
    """Run nnU-Net's predict command in this process inside `calibrated_export`.

    Args:
        calibrator_path: file written by `segcal fit`.
        command: `nnUNetv2_predict` or `nnUNetv2_predict_from_modelfolder` and its arguments.

    Raises:
        FileFormatError: a checkpoint holds something else than weights.
    """
    name = Path(command[0]).name if command else ""
    if name not in ENTRY_POINTS:
        raise UsageError(f"command {name!r}: expected one of {', '.join(ENTRY_POINTS)} with its arguments, behind `--`")
    with calibrated_export(calibrator_path):
        from nnunetv2.inference import predict_from_raw_data as nnunet

        arguments = sys.argv
        sys.argv = list(command)
        try:
            # nnU-Net itself would open checkpoints as any pickle.
            with weights_only():
                getattr(nnunet, ENTRY_POINTS[name])()
        except pickle.UnpicklingError as error:
            raise FileFormatError(
                f"a checkpoint cannot be loaded as plain weights ({error}). One that needs other Python objects is not "
                "opened, because that would run code from the file."
            ) from error
        finally:
            sys.argv = arguments


def export_calibrated(
    predicted_array_or_file: Any,
    properties_dict: dict[str, Any],
    configuration_manager: Any,
    plans_manager: Any,
    dataset_json_dict_or_file: Any,
    output_file_truncated: str,
    save_probabilities: bool = False,
    num_threads_torch: int | None = None,
    *,
    always: bool = False,
) -> None:
    """In the place of nnU-Net's `export_prediction_from_logits`: the same files, the probabilities calibrated.

    With `always` they are written although nobody asked nnU-Net for them.
    """
    from nnunetv2.inference.export_prediction import export_prediction_from_logits

    given = (predicted_array_or_file, properties_dict, configuration_manager, plans_manager, dataset_json_dict_or_file)
    if save_probabilities or always:
        _export(*given, output_file_truncated, save_probabilities, num_threads_torch)
        return
    threads = () if num_threads_torch is None else (num_threads_torch,)
    export_prediction_from_logits(*given, output_file_truncated, False, *threads)


def convert_calibrated(
    predicted_logits: Any,
    plans_manager: Any,
    configuration_manager: Any,
    label_manager: Any,
    properties_dict: dict[str, Any],
    return_probabilities: bool = False,
    num_threads_torch: int | None = None,
) -> Any:
    """In the place of nnU-Net's function that returns a segmentation, or that and (now calibrated) probabilities."""
    segmentation, probabilities, _ = calibrated_case(
        environment_calibrator() if return_probabilities else None,
        predicted_logits,
        plans_manager,
        configuration_manager,
        label_manager,
        properties_dict,
        as_probabilities=return_probabilities,
        num_threads_torch=num_threads_torch,
    )
    return segmentation if probabilities is None else (segmentation, probabilities)


def environment_calibrator() -> FittedCalibrator:
    """The calibrator that `calibrated_export` named to this process or to its parent."""
    path = os.environ.get(CALIBRATOR_VARIABLE)
    if path is None:
        raise UsageError(f"{CALIBRATOR_VARIABLE} is not set; predict inside `calibrated_export(FILE)`.")
    return _load(path, Path(path).stat().st_mtime_ns)


def _export(
    logits: Any,
    properties: dict[str, Any],
    configuration_manager: Any,
    plans_manager: Any,
    dataset_json: Any,
    output: str,
    as_probabilities: bool,
    num_threads_torch: int | None,
) -> None:
    dataset = json.loads(Path(dataset_json).read_bytes()) if isinstance(dataset_json, str) else dataset_json
    labels = plans_manager.get_label_manager(dataset)
    managers = (plans_manager, configuration_manager, labels)
    segmentation, probabilities, crop = calibrated_case(
        environment_calibrator(),
        logits,
        *managers,
        properties,
        as_probabilities=as_probabilities,
        num_threads_torch=num_threads_torch,
    )
    assert probabilities is not None  # a calibrator was given
    with atomic_write(Path(f"{output}.npz")) as temporary:
        write_npz(temporary, {"probabilities": probabilities, "crop": np.asarray(crop, dtype=np.int64)})
    with atomic_write(Path(f"{output}.pkl")) as temporary:
        temporary.write_bytes(pickle.dumps(properties))
    writer = plans_manager.image_reader_writer_class()
    writer.write_seg(segmentation, output + dataset["file_ending"], properties)


@lru_cache(maxsize=1)
def _load(path: str, mtime_ns: int) -> FittedCalibrator:
    return load_calibrator(path)
