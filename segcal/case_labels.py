"""The labels of a case: read, checked against the prediction and the manifest, and put into the form that counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segcal.errors import DataError, GeometryError
from segcal.io.archive import AnyArray
from segcal.io.images import LabelMap, read_grid, read_labels
from segcal.label_values import known_values, label_counts, region_masks
from segcal.manifest import Manifest, ManifestCase
from segcal.types import IGNORED, Grid


def read_case_labels(
    manifest: Manifest, case: ManifestCase, shape: tuple[int, int, int], grid: Grid | None
) -> LabelMap:
    """Read the label of a case and check that it lies on the prediction's grid and holds known values only.

    Args:
        manifest: says which values may occur.
        case: one of its cases.
        shape: (z, y, x) of the prediction.
        grid: where the prediction lies, if that is known.
    """
    if case.label is None:
        raise DataError(f"{case.id}: has no label in the manifest, but labels are needed here. Add `label: <file>`.")
    path = manifest.resolve(case.label)
    # The header first: a file of another image may be many times the size of the case.
    check_grid(manifest, case, "label", path, read_grid(path), shape, grid)
    label_map = read_labels(path)
    _check_values(manifest, case, path, label_map.values)
    return label_map


def targets(
    manifest: Manifest, case: ManifestCase, label_map: LabelMap | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The fields `labels`, `region_labels` and `valid` of CaseData."""
    if label_map is None:
        return None, None, None
    values = torch.from_numpy(label_map.values.astype(np.int64)).to(device)
    valid: Tensor | None = None
    if manifest.ignore_label is not None:
        valid = values != manifest.ignore_label
        if bool(valid.all()):
            valid = None
        elif not bool(valid.any()):
            raise DataError(f"{case.id}: every voxel carries the ignore label {manifest.ignore_label}; leave it out.")
    if manifest.regions is None:
        return (values if valid is None else values.where(valid, IGNORED)), None, valid
    return None, region_masks(manifest, values), valid


def load_deployed(
    manifest: Manifest, case: ManifestCase, *, device: torch.device, shape: tuple[int, int, int] | None = None
) -> Tensor | None:
    """The segmentation in use as (z, y, x) int64 label values, which for softmax models are class indices.

    Args:
        manifest: says which values may occur.
        case: one of its cases.
        device: where the result lives.
        shape: when given, the (z, y, x) the file must have.

    Returns:
        None when the case names no deployed file.
    """
    if case.deployed is None:
        return None
    path = manifest.resolve(case.deployed)
    if shape is not None:
        check_grid(manifest, case, "deployed segmentation", path, read_grid(path), shape, None)
    deployed = read_labels(path)
    _check_values(manifest, case, path, deployed.values)
    return torch.from_numpy(deployed.values.astype(np.int64)).to(device)


def check_grid(
    manifest: Manifest,
    case: ManifestCase,
    what: str,
    path: Path,
    found: Grid,
    shape: tuple[int, int, int],
    grid: Grid | None,
) -> None:
    """Raise GeometryError unless a file shares shape and, where both are known, place with the prediction."""
    if found.shape != shape:
        hint = (
            f" Either this is the {what} of another image, or the members were not resampled back to it; "
            "`segcal manifest check` says whether another order of axes would fit."
        )
        if found.shape == shape[::-1]:
            other = "czyx" if manifest.axes == "cxyz" else "cxyz"
            hint = (
                f" The manifest says `axes: {manifest.axes}`; the reversed shape would fit: "
                f"if these files are ({', '.join(['class', *other[1:]])}), set `axes: {other}` there."
            )
        raise GeometryError(
            f"{case.id}: prediction grid {shape} does not match {what} grid {found.shape} "
            f"({manifest.resolve(case.members[0])} vs {path}). nnU-Net .npz arrays are (class, z, y, x).{hint}"
        )
    if grid is not None and not grid.agrees_with(found):
        raise GeometryError(
            f"{case.id}: {what} {path} and the members have the same shape {shape} but lie elsewhere in space: "
            f"affine {rows(found)} against {rows(grid)}. Resample one of them onto the other or repair its header."
        )


def rows(grid: Grid) -> str:
    """An affine for messages."""
    return "none" if grid.affine is None else str(np.round(grid.affine[:3], 3).tolist())


def _check_values(manifest: Manifest, case: ManifestCase, path: Path, values: AnyArray) -> None:
    known = known_values(manifest)
    if manifest.regions is not None:
        expected = f"0 or a label of a region ({', '.join(str(n) for n in sorted(known - {0}))})"
    else:
        expected = f"0 to {manifest.n_classes - 1} ({', '.join(manifest.class_names)})"
    strange = sorted(set(label_counts(values)) - known - {manifest.ignore_label})
    if strange:
        shown = ", ".join(str(n) for n in strange[:10]) + (", …" if len(strange) > 10 else "")
        raise DataError(
            f"{case.id}: {path} holds the label values {shown}, expected {expected}. Correct the file or the "
            "manifest; if a value marks voxels to leave out, set `ignore_label` to it."
        )
