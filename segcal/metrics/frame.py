"""One labelled case as all pipelines see it: labels, decisions and distances prepared once and cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from segcal.chunks import MOST_VOXELS, chunk_slices, chunk_voxels
from segcal.errors import DataError, GeometryError
from segcal.metrics.base import MetricSettings
from segcal.metrics.distance import BandMap, distance_bands
from segcal.metrics.voxels import FramePart, VoxelBatch
from segcal.types import IGNORED

ByVoxels: TypeAlias = Callable[[slice], Tensor]
"""Makes the values (C, n) of a run of flattened voxels when they are asked for, so that no volume of them exists."""


@dataclass(frozen=True, slots=True, eq=False)
class CaseFrame:
    """One case as all pipelines see it: build it once, then hand it every pipeline's probabilities."""

    case_id: str
    shape: tuple[int, ...]
    settings: MetricSettings
    parts: tuple[FramePart, ...]

    @classmethod
    def build(
        cls,
        case_id: str,
        labels: Tensor,
        settings: MetricSettings,
        *,
        decision: Tensor | None = None,
        deployed: Tensor | None = None,
        inside: Tensor | None = None,
        spatial: bool = True,
        chunk: int | None = None,
    ) -> CaseFrame:
        """Prepare a labelled case.

        Args:
            case_id: name of the case, for errors and results.
            labels: class index of each voxel, IGNORED where it does not count; (z, y, x), (y, x), or any shape when
                `spatial` is off.
            settings: bins, bands and class names.
            decision: the pooled uncalibrated decision, for flips.
            deployed: the segmentation in use, for flips against it; a value that is no class differs from all of them.
            inside: bool, where the network predicted; None = everywhere. Outside it the caller's probabilities have
                to say background with certainty.
            spatial: whether neighbouring array elements are neighbours in space; off for rows of a classifier.
            chunk: voxels worked on at once, if not those that `segcal.chunks` allows; no result depends on it.
        """
        maps = {"decision": decision, "deployed segmentation": deployed, "crop mask": inside}
        for name, given in maps.items():
            if given is not None and given.shape != labels.shape:
                raise GeometryError(
                    f"{case_id}: {name} has shape {tuple(given.shape)}, the label {tuple(labels.shape)}; "
                    "both have to lie on one grid, (z, y, x)"
                )
        _check_labels(case_id, labels, settings.n_classes)
        bands = None
        if spatial:
            bands = distance_bands(labels.cpu().numpy(), settings.band_edges, ignored=IGNORED)
        flat = [None if given is None else given.reshape(-1) for given in (labels, decision, deployed, inside)]
        step = min(chunk or chunk_voxels(settings.n_classes), MOST_VOXELS)
        slices = list(chunk_slices(labels.numel(), step)) or [slice(0, 0)]
        parts = tuple(_part(where, flat, bands, settings.n_classes) for where in slices)
        return cls(case_id, tuple(labels.shape), settings, parts)

    def with_decision(self, decision: Tensor) -> CaseFrame:
        """The same case against another reference decision; labels and distances are shared, not computed again."""
        if decision.shape != self.shape:
            raise GeometryError(f"{self.case_id}: decision has shape {tuple(decision.shape)}, the label {self.shape}")
        flat = decision.reshape(-1)
        return replace(self, parts=tuple(_with_reference(part, flat) for part in self.parts))

    def batches(self, values: Tensor | ByVoxels, *, as_decided: bool = False) -> Iterator[VoxelBatch]:
        """The counted voxels of one pipeline, a bounded number at a time.

        Args:
            values: (C, *shape of the case) probabilities, float32 as pipelines make them (float16 is widened, float64
                is taken as it is); or what makes them, part by part.
            as_decided: the caller has compared the largest class of every voxel with the reference decision and found
                them equal, so that this need not be done again.
        """
        by_voxels = self._cut(values) if isinstance(values, Tensor) else values
        for part in self.parts:
            chunk = by_voxels(part.where)
            if part.keep is not None:
                chunk = chunk.index_select(1, part.keep)
            if chunk.dtype not in (torch.float32, torch.float64):
                chunk = chunk.float()
            yield VoxelBatch(self.case_id, self.settings, part, chunk, as_decided=as_decided)

    def _cut(self, values: Tensor) -> ByVoxels:
        expected = (self.settings.n_classes, *self.shape)
        if tuple(values.shape) != expected:
            raise GeometryError(
                f"{self.case_id}: probabilities have shape {tuple(values.shape)}, expected (class, *grid) = {expected}"
            )
        flat = values.reshape(values.shape[0], -1)
        return lambda where: flat[:, where]


def _part(where: slice, flat: list[Tensor | None], bands: BandMap | None, n_classes: int) -> FramePart:
    """Cut one part out of the flattened maps and leave ignored voxels out."""
    labels, reference, deployed, inside = (None if one is None else one[where] for one in flat)
    assert labels is not None
    counted = labels != IGNORED
    keep = None if bool(counted.all()) else counted.nonzero()[:, 0]
    narrow = torch.uint8 if n_classes <= 255 else torch.int32

    def kept(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if values is None else _kept(values, keep).to(dtype)

    band = distance = None
    if bands is not None:
        band = kept(torch.from_numpy(bands.band.reshape(-1)[where]).to(labels.device), torch.uint8)
        distance = bands.distance_sums(where, None if keep is None else counted.cpu().numpy())
    outside = None if inside is None or bool(inside.all()) else kept(~inside, torch.bool)
    own_labels, own_reference = kept(labels, narrow), kept(reference, narrow)
    assert own_labels is not None
    return FramePart(
        where=where,
        keep=keep,
        labels=own_labels,
        label_counts=torch.bincount(own_labels, minlength=n_classes).cpu().numpy(),
        reference=own_reference,
        reference_hit=None if own_reference is None else own_reference == own_labels,
        deployed=None if deployed is None else kept(_only_classes(deployed, n_classes), narrow),
        outside=outside,
        band=band,
        band_distance=distance,
    )


def _only_classes(values: Tensor, n_classes: int) -> Tensor:
    """A file in use may hold an ignore label, of which a narrow type could make a class (256 in a byte is 0)."""
    wide = values.long()
    return wide.where((wide >= 0) & (wide < n_classes), IGNORED)


def _with_reference(part: FramePart, flat: Tensor) -> FramePart:
    reference = _kept(flat[part.where], part.keep).to(part.labels.dtype)
    return replace(part, reference=reference, reference_hit=reference == part.labels)


def _kept(values: Tensor, keep: Tensor | None) -> Tensor:
    return values if keep is None else values.index_select(0, keep)


def _check_labels(case_id: str, labels: Tensor, n_classes: int) -> None:
    if labels.is_floating_point():
        raise DataError(f"{case_id}: labels are {labels.dtype}, expected whole class indices")
    if labels.numel() and not (int(labels.min()) >= IGNORED and int(labels.max()) < n_classes):
        raise DataError(
            f"{case_id}: labels reach from {int(labels.min())} to {int(labels.max())}, expected 0 to {n_classes - 1} "
            f"or {IGNORED} for ignored voxels"
        )
