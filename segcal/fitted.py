"""A fitted calibrator with everything it knows of itself: what `segcal.fit` gives and the file holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.base import Array, Preserves, SpatialCalibrator, as_tensor, check_floating
from segcal.cases import CaseData
from segcal.compatibility import check_compatible
from segcal.errors import FileFormatError, MissingFileError, ParameterError
from segcal.io.atomic import atomic_write
from segcal.manifest import Manifest
from segcal.preserve import keep_decision
from segcal.regions import RegionCalibrator
from segcal.slabs import BySlabs
from segcal.types import AppliedPooling, Box, Pooling, box_slices
from segcal.volumes import space_of

MAX_FILE_BYTES = 1 << 30
METADATA_KEY = "segcal"


@dataclass(frozen=True, eq=False)
class FittedCalibrator:
    """A calibrator and its metadata.

    Attributes:
        calibrator: voxel-wise or local map, or one per region.
        info: how it was made.
    """

    calibrator: Calibrator | RegionCalibrator
    info: CalibratorInfo

    def probabilities(self, logits: Array, *, class_axis: int, decision: Array | None = None) -> Array:
        """Calibrated probabilities of an array; see `Calibrator.probabilities`. Region models: of (R, z, y, x)."""
        if isinstance(self.calibrator, Calibrator):
            return self.calibrator.probabilities(logits, class_axis=class_axis, decision=decision)
        values = as_tensor(logits)
        check_floating(values, self.calibrator.channels[0])
        moved = torch.movedim(values, class_axis, 0)
        if moved.shape[0] != len(self.info.classes) or moved.ndim != 4:
            raise ParameterError(
                f"{self.info.method}: fitted for the regions {', '.join(self.info.classes)}; expected log-odds "
                f"(region, z, y, x), got {tuple(moved.shape)} after moving axis {class_axis} to the front"
            )
        chosen = moved > 0
        if decision is not None:
            given = as_tensor(decision)
            if given.shape != values.shape:
                raise ParameterError(
                    f"{self.info.method}: the decision needs one truth value per region and voxel, shape "
                    f"{tuple(values.shape)}; got {tuple(given.shape)}"
                )
            chosen = torch.movedim(given, class_axis, 0).bool()
        result = torch.movedim(self.calibrator.volume_probabilities(moved, chosen), 0, class_axis)
        return result if isinstance(logits, Tensor) else result.numpy()

    def volume_probs(self, case: CaseData) -> Tensor:
        """Calibrated (C, z, y, x) float32 probabilities of a case; certain background outside its crop."""
        return self.cropped_probs(case.logits, case.decision, case.crop)

    def cropped_probs(self, logits: Tensor, decision: Tensor, crop: Box | None) -> Tensor:
        """The same for (C, z, y, x) logits, their decision and the box in which they mean something."""
        if crop is None:
            return self._box_probs(logits, decision)
        # Only the box is calibrated: what lies outside is fill, and no neighbour may see it.
        z, y, x = box_slices(crop)
        probs = self._background(logits)
        probs[:, z, y, x] = self._box_probs(logits[:, z, y, x], decision[..., z, y, x])
        return probs

    def region_pairs(self, case: CaseData) -> Tensor:
        """`volume_probs` of a region model with the probability of being outside beside it, (R, 2, z, y, x)."""
        calibrator, within = self.calibrator, case.within_crop()
        assert isinstance(calibrator, RegionCalibrator)
        pairs = torch.stack(list(calibrator.pairs(within.logits, within.decision)))
        if case.crop is None:
            return pairs
        z, y, x = box_slices(case.crop)
        whole = pairs.new_zeros((len(pairs), 2, *space_of(case.logits)))
        whole[:, 0] = 1.0
        whole[..., z, y, x] = pairs
        return whole

    def probs_by_voxels(self, case: CaseData) -> Callable[[slice], Tensor]:
        """`volume_probs` of runs of flattened voxels, one after the other, without the volume; not for regions."""
        calibrator = self.calibrator
        if not isinstance(calibrator, Calibrator):
            raise ParameterError(f"{self.info.method}: regions are calibrated as volumes, not voxel by voxel")
        if isinstance(calibrator, SpatialCalibrator):
            return self._by_slabs(case, calibrator)
        logits = case.logits.reshape(case.logits.shape[0], -1)
        decision = case.decision.reshape(-1)
        inside = None if case.inside is None else case.inside.reshape(-1)

        def probs(where: slice) -> Tensor:
            part = calibrator.voxel_probs(logits[:, where], decision[where])
            if calibrator.preserves:
                keep_decision(part, decision[where])
            if inside is not None and not bool(inside[where].all()):
                part[:, ~inside[where]] = 0.0
                part[0, ~inside[where]] = 1.0
            return part

        return probs

    def _by_slabs(self, case: CaseData, calibrator: SpatialCalibrator) -> BySlabs:
        """Slices that `volume_probs` works on at once are made at once here too, so that both give the same bits."""
        n_classes, depth, height, width = case.logits.shape
        (low, high), rows, columns = case.crop or ((0, depth), (0, height), (0, width))
        within = calibrator.slices_at_once(n_classes, rows[1] - rows[0], columns[1] - columns[0])
        beside = calibrator.slices_at_once(n_classes, height, width)

        def probs(z: slice) -> Tensor:
            if not low <= z.start < high:
                return self._background(case.logits[:, z])
            box = None if case.crop is None else ((0, z.stop - z.start), rows, columns)
            return self.cropped_probs(case.logits[:, z], case.decision[z], box)

        parts = ((0, low, beside), (low, high, within), (high, depth, beside))
        slabs = [slice(z, min(z + step, end)) for begin, end, step in parts for z in range(begin, end, step)]
        return BySlabs(probs, slabs, height * width)

    def _background(self, logits: Tensor) -> Tensor:
        """Probabilities where the network did not predict: certain background; of regions, none."""
        probs = torch.zeros_like(logits)
        if isinstance(self.calibrator, Calibrator):
            probs[0] = 1.0
        return probs

    def _box_probs(self, logits: Tensor, decision: Tensor) -> Tensor:
        if isinstance(self.calibrator, RegionCalibrator):
            return self.calibrator.volume_probabilities(logits, decision)
        probs = self.calibrator.volume_probs(logits, decision)
        return keep_decision(probs, decision) if self.calibrator.preserves else probs

    def check_compatible(self, manifest: Manifest, pooling: AppliedPooling, *, force: bool = False) -> list[str]:
        """Raise MismatchError if this was not fitted for such data; return warnings about lesser differences."""
        return check_compatible(self.info, manifest, pooling, force=force)

    @cached_property
    def content(self) -> bytes:
        """The calibrator file, byte by byte."""
        return save_safetensors(self._tensors(), metadata={METADATA_KEY: self.info.to_json()})

    @cached_property
    def sha256(self) -> str:
        """Hash of the calibrator file."""
        return hashlib.sha256(self.content).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibrator file, whole or not at all."""
        with atomic_write(Path(path)) as temporary:
            temporary.write_bytes(self.content)

    def _tensors(self) -> dict[str, Tensor]:
        if isinstance(self.calibrator, Calibrator):
            return {name: value.clone().contiguous() for name, value in self.calibrator.tensors().items()}
        return {
            f"{index}.{name}": value.clone().contiguous()  # channels may share a tensor, which the file cannot
            for index, channel in enumerate(self.calibrator.channels)
            for name, value in channel.tensors().items()
        }


def load_calibrator(path: str | os.PathLike[str]) -> FittedCalibrator:
    """Read a calibrator file.

    Raises:
        MissingFileError: there is no such file.
        FileFormatError: not a calibrator, truncated, or of an unknown version.
    """
    path = Path(path)
    info, tensors = read_calibrator_file(path)
    if info.method not in CALIBRATORS and info.settings is not None:
        raise FileFormatError(
            f"{path}: `{info.method}` calibrates the rows of a classifier, not volumes; apply it with `segcal classify "
            "apply`, or read it with segcal.classification.load"
        )
    if info.method not in CALIBRATORS:
        raise FileFormatError(f"{path}: method `{info.method}` is unknown here; known are {', '.join(CALIBRATORS)}")
    try:
        calibrator = _calibrator(info, tensors)
    except ParameterError as error:
        raise FileFormatError(f"{path}: {error}") from None
    _check_promises(path, info, calibrator.preserves)
    return FittedCalibrator(calibrator, info)


def is_translation_invariant(method: str, pooling: Pooling, *, regions: bool) -> bool:
    """Of the pipeline: pooled probabilities and log-odds of regions have no arbitrary offset (METHODS 1)."""
    return CALIBRATORS[method].translation_invariant or pooling == "probabilities" or regions


def read_calibrator_file(path: Path) -> tuple[CalibratorInfo, dict[str, Tensor]]:
    """Metadata and tensors of a calibrator file of any method; raises as `load_calibrator` does."""
    if not path.is_file():
        inside = sorted(file.name for file in path.glob("*.safetensors")) if path.is_dir() else []
        hint = f"; it is a folder with {', '.join(inside)}: name one of them" if inside else ""
        raise MissingFileError(f"{path}: no such calibrator file{hint}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise FileFormatError(f"{path}: {path.stat().st_size:,} bytes is far too large for a calibrator")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise FileFormatError(
            f"{path}: not a calibrator file, or truncated ({error}). Expected the .safetensors file that `segcal fit` "
            "wrote; in `apply` and `audit` it comes before the manifest."
        ) from None
    if METADATA_KEY not in metadata:
        raise FileFormatError(
            f"{path}: a safetensors file, but not a calibrator: its metadata lacks `{METADATA_KEY}`. "
            "Calibrators are written by `segcal fit`."
        )
    return CalibratorInfo.from_json(metadata[METADATA_KEY], str(path)), tensors


def _calibrator(info: CalibratorInfo, tensors: dict[str, Tensor]) -> Calibrator | RegionCalibrator:
    method = CALIBRATORS[info.method]
    if not info.regions:
        calibrator = method.from_tensors(tensors)
        _check_classes(calibrator, len(info.classes))
        return calibrator
    channels = []
    for index in range(len(info.classes)):
        prefix = f"{index}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        channels.append(method.from_tensors(own))
        _check_classes(channels[-1], 2)
    return RegionCalibrator(tuple(channels))


def _check_promises(path: Path, info: CalibratorInfo, preserves: Preserves) -> None:
    """What the metadata promise follows from the method; a file that says otherwise was altered."""
    invariant = is_translation_invariant(info.method, info.pooling, regions=info.regions)
    for field, really in (("preserves", preserves), ("translation_invariant", invariant)):
        declared = getattr(info, field)
        if declared != really:
            raise FileFormatError(
                f"{path}: metadata field `{field}` is {declared!r}, but {info.method} on pooled {info.pooling} is "
                f"{really!r}; the file was altered, fit again"
            )


def _check_classes(calibrator: Calibrator, n_classes: int) -> None:
    if calibrator.n_classes not in (None, n_classes):
        raise ParameterError(
            f"{calibrator.name}: parameters for {calibrator.n_classes} classes, but the metadata names {n_classes}"
        )
