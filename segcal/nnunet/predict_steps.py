"""The three steps of a prediction: preprocess, run the networks, pool and calibrate and write.

The first and the last need no weights and know nothing of other cases, so they run in this process or in a worker
with the same bytes as result; the networks run here. Pooling and calibrating happen on the CPU for the same reason.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.applying.files import write_probabilities
from segcal.applying.maps import CaseMaps, calibrated_maps, member_maps
from segcal.applying.record import ApplySettings, OutputFile
from segcal.applying.stored import StorageType
from segcal.calibrated_members import CalibratedMembers
from segcal.cases import CaseData
from segcal.errors import GeometryError
from segcal.fitted import FittedCalibrator
from segcal.io.atomic import atomic_write
from segcal.io.images import read_grid
from segcal.io.members import Member
from segcal.nnunet.export import check_finite, naming
from segcal.nnunet.geometry import ImageGeometry
from segcal.nnunet.model import ModelPlan, TrainedModel, file_sha256, silenced
from segcal.nnunet.orientation import in_file_order
from segcal.pooling import Pool, pooled_decision
from segcal.types import AppliedPooling

PredictFormat: TypeAlias = Literal["nnunet", "nifti", "both"]

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class PredictJob:
    """What is the same for all cases of a run; travels to worker processes.

    Attributes:
        plans: of the models, whose folds are the members.
        fitted: the calibrator.
        pooling: how it is applied.
        format: of the probabilities.
        dtype: of the probabilities.
        out: folder for the files.
    """

    plans: tuple[ModelPlan, ...]
    fitted: FittedCalibrator
    pooling: AppliedPooling
    format: PredictFormat
    dtype: StorageType
    out: Path


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """One case, preprocessed.

    Attributes:
        case_id: as the files are named.
        files: one per channel.
        images_sha256: of the files.
        data: (channel, *preprocessed shape) for every model.
        properties: nnU-Net's record of the preprocessing, for every model.
    """

    case_id: str
    files: tuple[Path, ...]
    images_sha256: tuple[str, ...]
    data: tuple[NDArray[Any], ...] = field(repr=False)
    properties: tuple[dict[str, Any], ...] = field(repr=False)

    def without_data(self) -> PreparedCase:
        """What the last step needs: the images themselves have done their service."""
        return replace(self, data=())


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
class WrittenCase:
    """What is left of a case that was written."""

    images_sha256: tuple[str, ...]
    outputs: tuple[OutputFile, ...]
    n_differing: int


def prepare_case(job: PredictJob, case_id: str, files: tuple[Path, ...]) -> PreparedCase:
    """Step 1: read the image and preprocess it, once for every model."""
    with naming(case_id, "preprocessing by nnU-Net"):
        if job.format != "nnunet":
            _affine(case_id, files)  # said before the networks run
        prepared = [plan.preprocess(files) for plan in job.plans]
        return PreparedCase(
            case_id,
            files,
            tuple(file_sha256(path) for path in files),
            tuple(data.numpy() for data, _ in prepared),
            tuple(properties for _, properties in prepared),
        )


def member_logits(models: Sequence[TrainedModel], case: PreparedCase) -> Iterator[NDArray[np.float16]]:
    """Step 2: what every fold of every model predicts, (class, *preprocessed shape), one at a time."""
    for model, data in zip(models, case.data, strict=True):
        for index in range(len(model.folds)):
            with naming(case.case_id, "the network of nnU-Net"):
                logits = model.member_logits(index, torch.as_tensor(data, device=CPU))
            check_finite(logits, case.case_id, model.plan, index)
            yield logits.numpy()


def finish_case(job: PredictJob, case: PreparedCase, logits: Iterable[NDArray[np.float16]]) -> PredictedCase:
    """Step 3: bring every member into image geometry, pool them and calibrate."""
    info, regions = job.fitted.info, job.fitted.info.regions
    each = job.pooling == "members-probabilities"
    averaged = CalibratedMembers(job.fitted, device=CPU)
    pool = Pool("logits" if each else info.pooling, regions=regions, device=CPU)
    total: Tensor | None = None
    geometries = [ImageGeometry(plan, own) for plan, own in zip(job.plans, case.properties, strict=True)]
    positions = [(geometry, fold) for geometry in geometries for fold in geometry.plan.folds]
    for (geometry, fold), values in zip(positions, logits, strict=True):
        alone = torch.from_numpy(values).to(CPU)
        path = geometry.plan.folder / f"fold_{fold}"
        member = Member(geometry.member(alone), "logits", geometry.crop, path=path)
        pool.add(member)
        if each:
            averaged.add(member)
        # The same operations in the same order and precision as nnU-Net's, so that its decision comes out to the bit.
        total = alone if total is None else total + alone
    pooled = pool.result()
    decision = pooled_decision(pooled.logits, regions=regions)
    if total is not None and _is_nnunets_decision(job):
        decision = geometries[0].decision(total / len(positions) if len(positions) > 1 else total)
    settings = _settings(job)
    if each:
        maps = member_maps(averaged.mean(), decision, pooled.crop, settings, regions=regions)
        return PredictedCase(maps, case.properties[0])
    data = CaseData(
        case_id=case.case_id,
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
    )
    return PredictedCase(calibrated_maps(job.fitted, data, settings, regions=regions), case.properties[0])


def finish_and_write(job: PredictJob, case: PreparedCase, logits: Iterable[NDArray[np.float16]]) -> WrittenCase:
    """Step 3 and the files: each appears whole or not at all, the segmentation by nnU-Net's own writer last."""
    with naming(case.case_id, "calibrating and writing"):
        predicted = finish_case(job, case, logits)
        names = _write_maps(job, case, predicted) + _write_segmentation(job, case.case_id, predicted)
        outputs = tuple(OutputFile(file=name, bytes=(job.out / name).stat().st_size) for name in names)
        return WrittenCase(case.images_sha256, outputs, predicted.maps.n_differing)


def _is_nnunets_decision(job: PredictJob) -> bool:
    """Whether nnU-Net itself takes the decision that is kept: it averages logits, within one model folder."""
    if len(job.plans) > 1:
        return False
    info = job.fitted.info
    return job.pooling == "members-probabilities" or (info.pooling == "logits" and info.preserves is not None)


def _settings(job: PredictJob) -> ApplySettings:
    labels = job.plans[0].labels
    values = labels.regions_class_order if labels.regions is not None else tuple(range(labels.n_channels))
    return ApplySettings(
        format="nifti" if job.format == "nifti" else "nnunet",
        dtype=job.dtype,
        confidence=False,
        entropy=False,
        kind="logits",
        pooling=job.pooling,
        axes="czyx",
        label_values=values or (),
    )


def _write_maps(job: PredictJob, case: PreparedCase, predicted: PredictedCase) -> list[str]:
    names = []
    if job.format != "nifti":
        names += [f"{case.case_id}.npz", f"{case.case_id}.pkl"]
        with atomic_write(job.out / names[0]) as temporary:
            write_probabilities(temporary, predicted.maps, None)
        # nnU-Net's own tools (nnUNetv2_ensemble) expect this file beside the npz; segcal reads only numbers from it.
        with atomic_write(job.out / names[1]) as temporary:
            temporary.write_bytes(pickle.dumps(predicted.properties))
    if job.format != "nnunet":
        names.append(f"probabilities/{case.case_id}.nii.gz")
        shape, affine = _affine(case.case_id, case.files)
        turned = in_file_order(predicted.maps.probabilities, predicted.properties)
        if turned.shape[1:] != shape:
            raise GeometryError(
                f"{case.case_id}: predicted on {turned.shape[1:]} voxels, while {case.files[0]} has {shape} (z, y, x); "
                "use --format nnunet."
            )
        with atomic_write(job.out / names[-1]) as temporary:
            write_probabilities(temporary, replace(predicted.maps, probabilities=turned), affine)
    return names


def _write_segmentation(job: PredictJob, case_id: str, predicted: PredictedCase) -> list[str]:
    names = [f"{case_id}{job.plans[0].dataset_json['file_ending']}"]
    writer = job.plans[0].plans_manager.image_reader_writer_class()
    with atomic_write(job.out / names[0]) as temporary, silenced():
        writer.write_seg(predicted.maps.segmentation, str(temporary), predicted.properties)
        # The TIFF writer leaves the spacing in a second file named after the first.
        beside = temporary.with_suffix(".json")
        if beside.exists():
            beside.replace(job.out / f"{case_id}.json")
            names.append(f"{case_id}.json")
    return names


def _affine(case_id: str, files: Sequence[Path]) -> tuple[tuple[int, int, int], NDArray[np.float64]]:
    """Shape (z, y, x) of an image as it lies on disk, and where it lies in the world."""
    grid = read_grid(files[0])
    if grid.affine is None:
        raise GeometryError(
            f"{case_id}: cannot be written as NIfTI, {files[0]} does not say where its voxels lie; use --format nnunet."
        )
    return grid.shape, grid.affine
