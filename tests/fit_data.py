"""Small labelled ensembles on disk: over-confident members that disagree; 2-D, 3-D, cropped, ignored, regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy import ndimage

from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from segcal.types import Kind

CLASSES = ("background", "liver", "tumour")
REGIONS = ({"name": "organ", "labels": [1, 2]}, {"name": "lesion", "labels": [2]})
SHAPE_3D, SHAPE_2D = (6, 16, 18), (1, 40, 44)
IGNORED_VALUE = 9


def draw_case(
    seed: int, shape: tuple[int, ...], n_classes: int = 3, n_members: int = 2
) -> tuple[NDArray[np.uint8], list[NDArray[np.float32]]]:
    """(z, y, x) labels and the members' (C, z, y, x) logits; a smooth offset of the logits varies in space."""
    rng = np.random.default_rng(seed)
    fields = np.stack([ndimage.gaussian_filter(rng.normal(size=shape), 2, mode="nearest") for _ in range(n_classes)])
    fields = 2.5 * fields / fields.std()
    fields[0] += 1.5
    # The truth is drawn from a softer distribution than the members claim: they are over-confident.
    labels = (fields + rng.gumbel(size=fields.shape)).argmax(0).astype(np.uint8)
    offset = 5 * ndimage.gaussian_filter(rng.normal(size=shape), 3, mode="nearest")
    members = [(2 * fields + rng.normal(0, 0.5, fields.shape) + offset).astype(np.float32) for _ in range(n_members)]
    return labels, members


def write_ensemble(
    root: Path,
    *,
    n_cases: int = 6,
    shape: tuple[int, ...] = SHAPE_3D,
    kind: Kind = "logits",
    regions: bool = False,
    crop: bool = False,
    ignored: bool = False,
    split: Mapping[str, Sequence[int]] | None = None,
    order: Sequence[int] | None = None,
    absent: int | None = None,
    **keys: Any,
) -> Manifest:
    """Write cases and the manifest.

    Args:
        root: an existing folder.
        n_cases, shape: of the data set.
        kind: what the member files hold.
        regions: channels are the two `REGIONS` of a sigmoid model.
        crop: members say they predicted inside a box; what they hold outside it is nonsense.
        ignored: a band of every label map carries `IGNORED_VALUE`.
        split: case numbers by subset.
        order: order of the cases in the manifest.
        absent: a label that nobody drew.
        keys: further keys of the manifest.
    """
    entries = []
    for k in order or range(n_cases):
        labels, members = draw_case(k, shape)
        if absent is not None:
            labels[labels == absent] = 0
        if ignored:
            labels[:, :3] = IGNORED_VALUE
        case_id = f"case_{k:02d}"
        relative = [f"member_{m}/{case_id}.npz" for m in range(len(members))]
        for path, values in zip(relative, members, strict=True):
            _write_member(root / path, values[1:] - values[:1] if regions else values, kind, regions, crop)
        (root / "labels").mkdir(exist_ok=True)
        write_nifti(root / f"labels/{case_id}.nii.gz", labels, affine=np.eye(4))
        entries.append({"id": case_id, "members": relative, "label": f"labels/{case_id}.nii.gz"})
    content: dict[str, Any] = {"version": 1, "name": "small", "kind": kind, "cases": entries, **keys}
    content |= {"regions": list(REGIONS), "regions_class_order": [1, 2]} if regions else {"classes": list(CLASSES)}
    if ignored:
        content["ignore_label"] = IGNORED_VALUE
    if split is not None:
        content["splits"] = [{name: [f"case_{k:02d}" for k in numbers] for name, numbers in split.items()}]
    path = root / "manifest.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Manifest.load(path)


def _write_member(path: Path, values: NDArray[np.float32], kind: Kind, regions: bool, crop: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    if kind == "probabilities":
        values = _probabilities(values, regions).astype(np.float32)
    arrays = {kind: values}
    if crop:
        values[:, :, :, :4] = 0.0  # outside the box: one identical vector
        arrays["crop"] = np.array([[0, values.shape[1]], [0, values.shape[2]], [4, values.shape[3]]])
    np.savez_compressed(path, **arrays)


def _probabilities(logits: NDArray[np.float32], regions: bool) -> NDArray[np.float64]:
    z = logits.astype(np.float64)
    if regions:
        return 1 / (1 + np.exp(-z))
    exp = np.exp(z - z.max(0))
    return exp / exp.sum(0)
