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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.checks.calibrated_before import CALIBRATOR_KEY, calibrator_of
from segcal.errors import CaseError, FileFormatError, SegcalError, UsageError
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

    Where nnU-Net is asked to go on with an earlier run (`overwrite=False`), a case is finished when its probabilities
    are those of this calibrator.

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
    lists = nnunet.nnUNetPredictor._manage_input_and_output_lists
    nnunet.nnUNetPredictor._manage_input_and_output_lists = _without_finished(lists, fitted.sha256, always=always)
    try:
        yield fitted
    finally:
        nnunet.nnUNetPredictor._manage_input_and_output_lists = lists
        for name, function in zip(names, functions, strict=True):
            setattr(nnunet, name, function)
        os.environ.pop(CALIBRATOR_VARIABLE, None)
        if variable is not None:
            os.environ[CALIBRATOR_VARIABLE] = variable


def run_entry_point(
    calibrator_path: Path, command: Sequence[str], *, warn: Callable[[str], None] = lambda sentence: None
) -> None:
    """Run nnU-Net's predict command in this process inside `calibrated_export`.

    Args:
        calibrator_path: file written by `segcal fit`.
        command: `nnUNetv2_predict` or `nnUNetv2_predict_from_modelfolder` and its arguments.
        warn: told, before the prediction, what differs from the data the calibrator was fitted on.

    Raises:
        MismatchError: the calibrator was fitted on pooled probabilities, or for other classes than the model's.
        UsageError: another command, or a device that is not there.
        MissingFileError: no image of this model is in the folder.
        FileFormatError: a checkpoint holds something else than weights, or a case lacks a channel.
        CaseError: nnU-Net failed.
    """
    name = Path(command[0]).name if command else ""
    if name not in ENTRY_POINTS:
        raise UsageError(f"command {name!r}: expected one of {', '.join(ENTRY_POINTS)} with its arguments, behind `--`")
    with calibrated_export(calibrator_path) as fitted:
        from nnunetv2.inference import predict_from_raw_data as nnunet

        from segcal.nnunet.predictor import checking_predictor

        arguments, predictor = sys.argv, nnunet.nnUNetPredictor
        sys.argv = list(command)
        nnunet.nnUNetPredictor = checking_predictor(fitted, warn)
        try:
            # nnU-Net itself would open checkpoints as any pickle.
            with weights_only():
                getattr(nnunet, ENTRY_POINTS[name])()
        except pickle.UnpicklingError as error:
            raise FileFormatError(
                f"a checkpoint cannot be loaded as plain weights ({error}). One that needs other Python objects is not "
                "opened, because that would run code from the file."
            ) from error
        except (SegcalError, OSError):
            raise
        except Exception as error:  # of nnU-Net's, which has no class of its own for them
            raise CaseError(f"{name} failed ({type(error).__name__}: {error})") from error
        finally:
            sys.argv, nnunet.nnUNetPredictor = arguments, predictor


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
    fitted = environment_calibrator()
    segmentation, probabilities, crop = calibrated_case(
        fitted,
        logits,
        *managers,
        properties,
        as_probabilities=as_probabilities,
        num_threads_torch=num_threads_torch,
    )
    assert probabilities is not None  # a calibrator was given
    arrays: dict[str, NDArray[Any]] = {
        "probabilities": probabilities,
        "crop": np.asarray(crop, dtype=np.int64),
        CALIBRATOR_KEY: np.frombuffer(bytes.fromhex(fitted.sha256), dtype=np.uint8),
    }
    with atomic_write(Path(f"{output}.npz")) as temporary:
        write_npz(temporary, arrays)
    with atomic_write(Path(f"{output}.pkl")) as temporary:
        temporary.write_bytes(pickle.dumps(properties))
    writer = plans_manager.image_reader_writer_class()
    writer.write_seg(segmentation, output + dataset["file_ending"], properties)


def _without_finished(lists: Callable[..., Any], sha256: str, *, always: bool) -> Callable[..., Any]:
    """nnU-Net's list of what is to be done; it takes any file of the right name for finished."""

    @wraps(lists)
    def unfinished(
        predictor: Any,
        images: Any,
        outputs: Any,
        previous_stage: Any = None,
        overwrite: bool = True,
        part_id: int = 0,
        num_parts: int = 1,
        save_probabilities: bool = False,
    ) -> Any:
        ours = not overwrite and outputs is not None and (always or save_probabilities)
        found = lists(
            predictor, images, outputs, previous_stage, overwrite or ours, part_id, num_parts, save_probabilities
        )
        if not ours:
            return found
        ending = predictor.dataset_json["file_ending"]
        left = [
            k
            for k, name in enumerate(found[1])
            if calibrator_of(Path(f"{name}.npz")) != sha256 or not Path(name + ending).is_file()
        ]
        print(f"{len(left)} of {len(found[1])} cases have no map of this calibrator yet.")
        return tuple([part[k] for k in left] for part in found)

    return unfinished


@lru_cache(maxsize=1)
def _load(path: str, mtime_ns: int) -> FittedCalibrator:
    return load_calibrator(path)
