"""The maps of one case: calibrated probabilities as stored, the label map they say, how sure they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.applying.record import ApplySettings
from segcal.applying.stored import store_classes, store_regions
from segcal.cases import CaseData
from segcal.chunks import chunk_slices, chunk_voxels
from segcal.fitted import FittedCalibrator
from segcal.preserve import keep_near_ties
from segcal.threads import one_thread
from segcal.types import Box, box_slices


@dataclass(frozen=True, slots=True)
class CaseMaps:
    """What is written for one case.

    Attributes:
        probabilities: (class or region, z, y, x) in the storage type.
        segmentation: (z, y, x) label values.
        extras: `confidence` and `entropy`, (z, y, x) float32, as far as they were asked for.
        crop: where the network predicted, None for everywhere.
        n_differing: voxels where the largest probability is not that of the segmentation's class (regions: where a
            region's p > 0.5 is not what was decided); 0 unless members were calibrated one by one.
    """

    probabilities: NDArray[np.generic]
    segmentation: NDArray[np.generic]
    extras: Mapping[str, NDArray[np.float32]]
    crop: Box | None
    n_differing: int = 0


@one_thread()
def calibrated_maps(fitted: FittedCalibrator, case: CaseData, settings: ApplySettings, *, regions: bool) -> CaseMaps:
    """Calibrate one case and bring it into the form in which it is stored.

    The decision is the pooled one for preserving methods and that of the calibrated probabilities for the others.
    The stored map and the segmentation both say it, so they agree at every dtype. Only outside a crop, where the map of
    classes is certain background, the segmentation keeps a decision that was handed in and is another there.
    """
    preserving = fitted.info.preserves is not None
    if not regions:
        maps = _class_maps(fitted, case.within_crop(), settings, preserving=preserving)
        if case.crop is None:
            return maps
        outside = case.decision if preserving else torch.zeros_like(case.decision)
        return _in_background(maps, case.crop, outside, settings)
    probs = fitted.volume_probs(case)
    decision = case.decision if preserving else probs > 0.5
    stored = store_regions(probs, decision, settings.dtype)
    labels = label_array(paint_regions(decision, settings.label_values), settings.label_values)
    return CaseMaps(stored, labels, _extras(probs, settings, regions=True), case.crop)


def _class_maps(fitted: FittedCalibrator, case: CaseData, settings: ApplySettings, *, preserving: bool) -> CaseMaps:
    """One run of voxels after the other, so that no volume stands beside the one that is stored; without a crop."""
    n_classes, *space = case.logits.shape
    probs_of, pooled = fitted.probs_by_voxels(case), case.decision.reshape(-1)
    decision = pooled if preserving else torch.empty_like(pooled)
    stored = np.empty((n_classes, pooled.numel()), dtype=settings.dtype)
    extras = []
    for where in chunk_slices(pooled.numel(), chunk_voxels(n_classes)):
        probs = probs_of(where)
        if not preserving:
            decision[where] = probs.max(0).indices
        stored[:, where] = store_classes(probs, decision[where], settings.dtype)
        extras.append(_extras(probs, settings, regions=False))
    return CaseMaps(
        stored.reshape(n_classes, *space),
        label_array(decision.reshape(space), settings.label_values),
        {name: np.concatenate([part[name] for part in extras]).reshape(space) for name in extras[0]},
        crop=None,
    )


def _in_background(maps: CaseMaps, crop: Box, outside: Tensor, settings: ApplySettings) -> CaseMaps:
    """The maps of a crop, put into a volume of certain background whose decision is `outside` (z, y, x)."""
    box, space = box_slices(crop), tuple(outside.shape)
    certain = torch.zeros((len(maps.probabilities), 1, 1, 1), device="cpu")
    certain[0] = 1.0
    stored = np.empty((len(certain), *space), dtype=settings.dtype)
    stored[:] = store_classes(certain, torch.zeros((1, 1, 1), dtype=torch.int64, device="cpu"), settings.dtype)
    stored[:, *box] = maps.probabilities
    segmentation = label_array(outside, settings.label_values)
    segmentation[box] = maps.segmentation
    extras = {name: np.full(space, value) for name, value in _extras(certain, settings, regions=False).items()}
    for name, values in maps.extras.items():
        extras[name][box] = values
    return CaseMaps(stored, segmentation, extras, crop)


def member_maps(
    mean: Tensor, decision: Tensor, crop: Box | None, settings: ApplySettings, *, regions: bool
) -> CaseMaps:
    """The maps of members that were calibrated one by one and averaged.

    The segmentation is the given decision. The probabilities stay the mean: only where the decided class is tied with
    the largest, but for rounding, does the decision break the tie. Elsewhere the two may differ, which is counted.

    Args:
        mean: (class or region, z, y, x) float32, from `CalibratedMembers`; changed at near-ties.
        decision: of the deployed ensemble, (z, y, x) class index or (region, z, y, x) bool.
    """
    said = keep_near_ties(mean, decision, regions=regions)
    if regions:
        stored = store_regions(mean, said, settings.dtype)
        differs, labels = (said != decision).any(0), paint_regions(decision, settings.label_values)
    else:
        stored = store_classes(mean, said, settings.dtype)
        differs, labels = said != decision, decision
    return CaseMaps(
        stored,
        label_array(labels, settings.label_values),
        _extras(mean, settings, regions=regions),
        crop,
        int(differs.sum()),
    )


def _extras(probs: Tensor, settings: ApplySettings, *, regions: bool) -> dict[str, NDArray[np.float32]]:
    extras: dict[str, NDArray[np.float32]] = {}
    if settings.confidence:
        extras["confidence"] = confidence_map(probs, regions=regions)
    if settings.entropy:
        extras["entropy"] = entropy_map(probs, regions=regions)
    return extras


def paint_regions(decision: Tensor, class_order: tuple[int, ...]) -> Tensor:
    """Turn region decisions into one label map as nnU-Net does: later regions overwrite earlier ones.

    Args:
        decision: (R, z, y, x) bool.
        class_order: the label value each region is painted with, `regions_class_order` of dataset.json.

    Returns:
        (z, y, x) int64 label values, 0 where no region was decided.
    """
    labels = torch.zeros(decision.shape[1:], dtype=torch.int64, device=decision.device)
    for region, value in zip(decision, class_order, strict=True):
        labels[region] = value
    return labels


def label_array(labels: Tensor, label_values: tuple[int, ...]) -> NDArray[np.generic]:
    """A label map in the narrowest unsigned type that holds every label the model knows, as nnU-Net writes them."""
    array: NDArray[np.generic] = labels.cpu().numpy()
    return array.astype(np.uint8 if max(label_values) < 256 else np.uint16)


def confidence_map(probs: Tensor, *, regions: bool) -> NDArray[np.float32]:
    """How sure the map is of its decision, (z, y, x): the largest class probability.

    Region models decide every region on its own; theirs is the confidence of the least sure region,
    min over regions of max(p, 1 - p).
    """
    values = torch.maximum(probs, 1 - probs).amin(0) if regions else probs.amax(0)
    return values.cpu().numpy().astype(np.float32)


def entropy_map(probs: Tensor, *, regions: bool) -> NDArray[np.float32]:
    """Shannon entropy in nats, (z, y, x); for regions the sum over their independent binary decisions."""
    total = torch.zeros(probs.shape[1:], dtype=torch.float32, device=probs.device)
    for channel in probs:
        total -= torch.xlogy(channel, channel)
        if regions:
            total -= torch.xlogy(1 - channel, 1 - channel)
    # Rounding can leave a certain voxel at -1e-7.
    return total.clamp_(min=0).cpu().numpy().astype(np.float32)
