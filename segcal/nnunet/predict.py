"""Images to calibrated predictions in one process: nnU-Net predicts, segcal pools and calibrates, nnU-Net writes.

For calibrators that preserve the decision and pool logits the segmentation is nnU-Net's own. nnU-Net sums its folds
and resamples in half precision, so a pool in single precision decides otherwise at near-ties; its decision is
therefore taken from its own numbers and handed to the calibrator as the reference.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from segcal.applying.maps import CaseMaps, calibrated_maps
from segcal.applying.record import ApplySettings
from segcal.cases import CaseData
from segcal.errors import UsageError
from segcal.fitted import FittedCalibrator
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write, write_text_atomic
from segcal.io.members import Member
from segcal.manifest import Manifest
from segcal.nnunet.export import check_finite, manifest_content
from segcal.nnunet.geometry import ImageGeometry
from segcal.nnunet.image_files import find_cases
from segcal.nnunet.model import TrainedModel, require_nnunet, silenced
from segcal.pooling import Pool
from segcal.types import Progress

RECORD_NAME = "segcal_predict.json"


@dataclass(frozen=True, slots=True)
class PredictedCase:
    """One case, calibrated.

    Attributes:
        maps: probabilities and segmentation in the axis order of nnU-Net's reader.
        properties: nnU-Net's record of the preprocessing, which its writer and its tools need.
    """

    maps: CaseMaps = field(repr=False)
    properties: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PredictRun:
    """What was written: the cases in order, and what the user has to know."""

    out: Path
    cases: tuple[str, ...]
    warnings: tuple[str, ...]


def predict_folder(
    model: TrainedModel,
    fitted: FittedCalibrator,
    images: Path,
    out: Path,
    *,
    dtype: Literal["float32", "float16"] = "float32",
    force: bool = False,
    progress: Progress | None = None,
) -> PredictRun:
    """Predict and calibrate every image of a folder, as `nnUNetv2_predict --save_probabilities` would lay it out.

    Written per case: the segmentation by nnU-Net's own writer, `<case>.npz` with the calibrated `probabilities`
    (and `crop`), `<case>.pkl` with nnU-Net's properties; once: dataset.json, plans.json and a record of the run.

    Args:
        model: its folds are the members.
        fitted: decides how the members are pooled.
        images: folder of `<case>_0000<ending>` files.
        out: folder for the results; made when it is not there.
        dtype: of the stored probabilities.
        force: apply although something differs that `check_compatible` lets be forced.
        progress: called after every case.
    """
    cases = find_cases(images, model.predictor.dataset_json)
    if out.resolve() == images.resolve():
        raise UsageError(f"{out}: is the folder of the images; choose another folder with -o.")
    warnings = check_applicable(model, fitted, force=force)
    _write_json(out / "dataset.json", model.predictor.dataset_json)
    _write_json(out / "plans.json", model.predictor.plans_manager.plans)
    _write_json(out / RECORD_NAME, _record(model, fitted, dtype))
    for done, (case_id, files) in enumerate(cases.items(), start=1):
        _write_case(out, case_id, model, predict_case(model, fitted, case_id, files, dtype=dtype))
        if progress is not None:
            progress("predict", done, len(cases))
    return PredictRun(out, tuple(cases), tuple(warnings))


def check_applicable(model: TrainedModel, fitted: FittedCalibrator, *, force: bool = False) -> list[str]:
    """Compare calibrator and model: errors for other classes, warnings for other folds, mirroring or step size."""
    case = {"id": "any", "members": [f"member_{k}/any.npz" for k in range(len(model.folds))]}
    manifest = Manifest.model_validate(manifest_content([model], [case], name="predict"))
    return fitted.check_compatible(manifest, fitted.info.pooling, force=force)


def predict_case(
    model: TrainedModel,
    fitted: FittedCalibrator,
    case_id: str,
    image_files: Sequence[Path],
    *,
    dtype: Literal["float32", "float16"] = "float32",
) -> PredictedCase:
    """Predict and calibrate one case; every member predicts once.

    Args:
        model: its folds are the members.
        fitted: calibrator for pooled logits or pooled probabilities of such members.
        case_id: for messages.
        image_files: one file per channel, in order.
        dtype: of the probabilities.
    """
    data, properties = model.preprocess(image_files)
    geometry = ImageGeometry(model, properties)
    has_regions = model.labels.regions is not None
    pool = Pool(fitted.info.pooling, regions=has_regions, device=model.device)
    total: Tensor | None = None
    for index in range(len(model.folds)):
        logits = model.member_logits(index, data)
        check_finite(logits, case_id, model, index)
        pool.add(Member(geometry.member(logits), "logits", geometry.crop))
        # The same operations in the same order and precision as nnU-Net's, so that its decision comes out to the bit.
        total = logits if total is None else total + logits
    pooled = pool.result()
    decision = pooled.logits > 0 if has_regions else pooled.logits.max(dim=0).indices
    if fitted.info.pooling == "logits" and fitted.info.preserves is not None and total is not None:
        decision = geometry.decision(total / len(model.folds) if len(model.folds) > 1 else total)
    case = CaseData(
        case_id=case_id,
        logits=pooled.logits,
        labels=None,
        region_labels=None,
        valid=None,
        decision=decision,
        inside=None,
        crop=pooled.crop,
        grid=None,
        n_floored=pooled.n_floored,
        kind="logits",
        fingerprints=(),
    )
    maps = calibrated_maps(fitted, case, _settings(model, fitted, dtype), regions=has_regions)
    return PredictedCase(maps, properties)


def _settings(model: TrainedModel, fitted: FittedCalibrator, dtype: Literal["float32", "float16"]) -> ApplySettings:
    labels = model.labels
    values = labels.regions_class_order if labels.regions is not None else tuple(range(labels.n_channels))
    return ApplySettings(
        format="nnunet",
        dtype=dtype,
        confidence=False,
        entropy=False,
        kind="logits",
        pooling=fitted.info.pooling,
        axes="czyx",
        label_values=values or (),
    )


def _write_case(out: Path, case_id: str, model: TrainedModel, case: PredictedCase) -> None:
    arrays: dict[str, Any] = {"probabilities": case.maps.probabilities}
    if case.maps.crop is not None:
        arrays["crop"] = np.asarray(case.maps.crop, dtype=np.int64)
    with atomic_write(out / f"{case_id}.npz") as temporary:
        write_npz(temporary, arrays)
    # nnU-Net's own tools (nnUNetv2_ensemble) expect this file beside the npz; segcal never reads it as a plain pickle.
    with atomic_write(out / f"{case_id}.pkl") as temporary:
        temporary.write_bytes(pickle.dumps(case.properties))
    ending = str(model.predictor.dataset_json["file_ending"])
    writer = model.predictor.plans_manager.image_reader_writer_class()
    with atomic_write(out / f"{case_id}{ending}") as temporary, silenced():
        writer.write_seg(case.maps.segmentation, str(temporary), case.properties)
        # The TIFF writer leaves the spacing in a second file named after the first.
        beside = temporary.with_suffix(".json")
        if beside.exists():
            beside.replace(out / f"{case_id}.json")


def _record(model: TrainedModel, fitted: FittedCalibrator, dtype: str) -> dict[str, Any]:
    return {
        "format": 1,
        "command": "nnunet predict",
        "calibrator_sha256": fitted.sha256,
        "method": fitted.info.method,
        "pooling": fitted.info.pooling,
        "preserves": fitted.info.preserves,
        "dtype": dtype,
        "model": model.folder.resolve().name,
        "configuration": model.configuration,
        "checkpoint": model.checkpoint,
        "checkpoint_sha256": dict(zip(map(str, model.folds), model.checkpoint_sha256, strict=True)),
        "prediction": model.prediction.model_dump(mode="json"),
        "nnunetv2": require_nnunet(),
    }


def _write_json(path: Path, content: Any) -> None:
    write_text_atomic(path, json.dumps(content, indent=4) + "\n")
