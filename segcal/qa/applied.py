"""QA of a folder written by `segcal apply`: calibrated maps and segmentations, no members, no labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.applying.possible_files import possible_files
from segcal.applying.record import RECORD_NAME, RunRecord, load_record
from segcal.errors import DataError, FileFormatError, GeometryError, MismatchError, MissingFileError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.io.archive import DEFAULT_LIMIT_BYTES, read_npz_array
from segcal.io.images import read_labels
from segcal.io.members import Member, read_member
from segcal.pooling import RANGE_TOLERANCE, SUM_TOLERANCE
from segcal.qa.case import QaMaps
from segcal.qa.sources import Source
from segcal.scan_folders import find_images
from segcal.settings_file import nearest_of
from segcal.types import Grid
from segcal.volumes import inside_mask


class AppliedFolder(Source):
    """The cases of an applied run. Class names are those of the calibrator when it is given, else numbers."""

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        fitted: FittedCalibrator | None = None,
        images: Path | None = None,
        cases: Sequence[str] | None = None,
    ) -> None:
        self._folder = folder.absolute()  # whoever loads a case may have been started in another folder
        self._record = _record(folder)
        self._device = device
        if fitted is not None and fitted.sha256 != self._record.calibrator_sha256:
            raise MismatchError(
                f"{folder}: was written with another calibrator than the one given (method {self._record.method}, "
                f"sha256 {self._record.calibrator_sha256[:12]}… against {fitted.info.method}, {fitted.sha256[:12]}…). "
                "Give the calibrator of that run, or none."
            )
        self.ids = _chosen(folder, tuple(self._record.cases), cases)
        self.warnings = () if self._record.complete else (f"{folder}: the run of `segcal apply` did not finish",)
        self.names = _names(self._record.settings.label_values, fitted)
        self.reference: Mapping[str, tuple[float, ...]] = {}
        self._images = {} if images is None else find_images(images.absolute(), self.ids)
        self.describe = {
            "source": "applied folder",
            "name": self._record.manifest_name,
            "method": self._record.method,
            "calibrator_sha256": self._record.calibrator_sha256,
        }

    def load(self, case_id: str) -> QaMaps:
        entry = self._record.cases[case_id]
        if entry.status != "done":
            raise DataError(f"{case_id}: `segcal apply` could not do it: {entry.error or 'no reason was recorded'}")
        probabilities, segmentation = _files(self._folder, case_id, [output.file for output in entry.outputs])
        member = read_member(probabilities, kind="probabilities")
        probs = _checked(member, len(self._record.settings.label_values), regions=self.regions).to(self._device)
        labels, grid = _segmentation(segmentation)
        if labels.shape != probs.shape[1:]:
            raise GeometryError(
                f"{segmentation}: its grid {labels.shape} is not that of {probabilities.name}, "
                f"{tuple(probs.shape[1:])}; run `segcal apply` again."
            )
        rest: dict[str, Any] = {
            "inside": inside_mask(member.crop, labels.shape, self._device),
            "grid": grid or member.grid,
            "image": self._images.get(case_id),
        }
        if self.regions:
            return QaMaps.of_regions(case_id, probs, probs > 0.5, **rest)
        if int(labels.max(initial=0)) >= probs.shape[0] or int(labels.min(initial=0)) < 0:
            raise DataError(
                f"{segmentation}: holds labels {int(labels.min())} to {int(labels.max())}, the map has "
                f"{probs.shape[0]} classes."
            )
        chosen = torch.from_numpy(labels.astype(np.int64)).to(self._device)
        return QaMaps.of_classes(case_id, probs, chosen, **rest)

    @property
    def regions(self) -> bool:
        values = self._record.settings.label_values
        return values != tuple(range(len(values)))


def _record(folder: Path) -> RunRecord:
    if folder.is_file():
        raise UsageError(
            f"{folder}: is neither a manifest (.yaml, .yml) nor a folder written by `segcal apply`; a calibrator goes "
            "to --calibrator."
        )
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: there is no such folder; check the path")
    record = load_record(folder)
    if record is None:
        raise UsageError(
            f"{folder}: has no {RECORD_NAME}, so it was not written by `segcal apply`. Apply a calibrator first, or "
            "give a manifest of the members with --calibrator."
        )
    return record


def _chosen(folder: Path, known: tuple[str, ...], wanted: Sequence[str] | None) -> tuple[str, ...]:
    if wanted is None:
        return known
    for case_id in wanted:
        if case_id not in known:
            raise UsageError(f"{folder}: holds no case `{case_id}`{nearest_of(case_id, list(known))}")
    return tuple(dict.fromkeys(wanted))


def _names(label_values: tuple[int, ...], fitted: FittedCalibrator | None) -> tuple[str, ...]:
    regions = label_values != tuple(range(len(label_values)))
    if fitted is not None:
        return fitted.info.classes if regions else fitted.info.classes[1:]
    if regions:
        return tuple(f"region {value}" for value in label_values)
    return tuple(f"class {value}" for value in label_values[1:])


def _files(folder: Path, case_id: str, written: list[str]) -> tuple[Path, Path]:
    """The probabilities and the segmentation of a case, by the names `segcal apply` gives."""
    npz, nifti, *_, label_nifti, label_png, label_npz = possible_files(case_id)
    maps = [name for name in (npz, nifti) if name in written]
    labels = [name for name in (label_nifti, label_png, label_npz) if name in written]
    if len(maps) != 1 or len(labels) != 1 or Path(case_id).name != case_id:
        raise FileFormatError(
            f"{folder / RECORD_NAME}: lists {written} for {case_id}; expected one map and one segmentation."
        )
    return folder / maps[0], folder / labels[0]


def _segmentation(path: Path) -> tuple[NDArray[np.generic], Grid | None]:
    if path.suffix == ".npz":
        labels = read_npz_array(path, "segmentation", limit_bytes=DEFAULT_LIMIT_BYTES)
        if labels.dtype.kind not in "iu":
            raise FileFormatError(f"{path}: the segmentation is stored as {labels.dtype}, expected whole numbers.")
        return labels, None
    label_map = read_labels(path)
    return label_map.values, label_map.grid


def _checked(member: Member, n_channels: int, *, regions: bool) -> Tensor:
    """(C, z, y, x) float32 probabilities, or an error that names the file."""
    probs = torch.from_numpy(member.values).to(torch.float32)
    if probs.shape[0] != n_channels:
        raise DataError(f"{member.path}: has {probs.shape[0]} channels, {RECORD_NAME} says {n_channels}.")
    low, high = (float(bound) for bound in probs.aminmax())
    # Written so that NaN fails it.
    if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):
        raise DataError(f"{member.path}: holds values from {low:.4g} to {high:.4g}, expected probabilities.")
    off = 0.0 if regions else float((probs.sum(0) - 1).abs().max())
    if not off <= SUM_TOLERANCE:
        raise DataError(f"{member.path}: the probabilities of a voxel sum to 1 ± {off:.3g}, expected 1.")
    return probs
