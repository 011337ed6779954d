"""Small ensembles on disk and calibrators with chosen parameters, for the tests of apply and audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.cases import CaseData
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.regions import RegionCalibrator
from segcal.types import Box, Kind, Pooling

CPU = torch.device("cpu")
CLASSES = ("background", "liver", "tumour")
STORAGE = [("nnunet", "float32"), ("nnunet", "float16"), ("nifti", "float32"), ("nifti", "uint16")]
RESOLUTION = {"float32": 2.0**-23, "float16": 2.0**-10, "uint16": 1 / 65535}

OBLIQUE = np.array(
    [[1.2, 0.3, -0.1, -40.0], [-0.25, 0.9, 0.2, 12.5], [0.05, -0.15, 3.0, 7.0], [0.0, 0.0, 0.0, 1.0]], dtype=np.float64
)


def rotated(spacing: Sequence[float] = (0.8, 1.1, 2.5)) -> NDArray[np.float64]:
    """An affine with a real rotation (no shear, which ITK refuses) and unequal spacing."""
    rotation, _ = np.linalg.qr(OBLIQUE[:3, :3])
    rotation[:, 0] *= np.sign(np.linalg.det(rotation))
    affine = np.eye(4)
    affine[:3, :3] = rotation @ np.diag(spacing)
    affine[:3, 3] = (-31.5, 14.25, 60.0)
    return affine


def random_logits(seed: int, shape: tuple[int, ...] = (3, 4, 5, 6), scale: float = 4.0) -> NDArray[np.float32]:
    """(C, z, y, x) logits, confident as a network is."""
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def near_ties(n_classes: int) -> NDArray[np.float32]:
    """(C, 1, n, n_classes) logits in which every decision hangs by a thread.

    Exact ties of two and of all classes, gaps of one unit in the last place at several magnitudes, gaps that vanish in
    float16 or 1/65535 steps, and saturated rows. Every class is the winner in each of them once.
    """
    rows = []
    for winner in range(n_classes):
        rival = (winner + 1) % n_classes
        for base in (0.0, 1.0, -3.0, 11.0, 30.0, 88.0, 1e4):
            row = np.full(n_classes, base - 20, dtype=np.float32)
            row[[winner, rival]] = base
            rows.append(row.copy())
            row[winner] = np.nextafter(np.float32(base), np.float32(np.inf))
            rows.append(row.copy())
            rows.append(np.full(n_classes, base, dtype=np.float32))
            for gap in (1e-6, 1e-5, 1e-4, 1e-3):
                close = np.full(n_classes, base, dtype=np.float32)
                close[winner] = np.float32(base) + np.float32(gap)
                rows.append(close)
        certain = np.full(n_classes, -1e4, dtype=np.float32)
        certain[winner] = 1e4
        rows.append(certain)
    stacked = np.stack(rows).T  # (C, n)
    return np.ascontiguousarray(stacked.reshape(n_classes, 1, -1, n_classes))


def make_fitted(
    method: str,
    tensors: Mapping[str, NDArray[np.float64]] | None = None,
    *,
    classes: Sequence[str] = CLASSES,
    regions: bool = False,
    pooling: Pooling = "logits",
    kind: Kind = "logits",
) -> FittedCalibrator:
    """A calibrator with the given parameters (for regions: the same in every channel), identity without."""
    cls = CALIBRATORS[method]

    def make() -> Calibrator:
        if tensors is None:
            return cls.identity(2 if regions else len(classes))
        return cls.from_tensors({name: torch.tensor(value) for name, value in tensors.items()})

    info = CalibratorInfo(
        method=method,
        classes=tuple(classes),
        regions=regions,
        pooling=pooling,
        kind=kind,
        translation_invariant=cls.translation_invariant or pooling == "probabilities",
        preserves=cls.preserves,
    )
    return FittedCalibrator(RegionCalibrator(tuple(make() for _ in classes)) if regions else make(), info)


def temperature(value: float, **how: Any) -> FittedCalibrator:
    """Temperature scaling with a known temperature."""
    return make_fitted("ts", {"temperature": np.array([value])}, **how)


def preserving(method: str, n_classes: int, *, regions: bool = False) -> FittedCalibrator:
    """A preserving calibrator whose parameters bring classes as close together as its method can."""
    names = tuple(f"class_{k}" for k in range(n_classes))
    c = 2 if regions else n_classes
    rng = np.random.default_rng(3)
    parameters: dict[str, dict[str, NDArray[np.float64]] | None] = {
        "identity": None,
        "ts": {"temperature": np.array([50.0])},
        "ets": {"temperature": np.array([5.0]), "mixture": np.array([0.1, 0.1, 0.8])},
        # Experts that collapse all margins to beta, and experts that mix them.
        "cms_ap": {
            "A": np.where(np.arange(c)[:, None, None] == 0, 0.0, rng.uniform(0, 1, (c, c - 1, c - 1))),
            "beta": np.full((c, c - 1), 1e-6),
        },
        "cms_op": {
            "A": np.where(np.arange(c)[:, None, None] == 0, 0.0, rng.uniform(0, 1, (c, c - 1, c - 1))),
            "beta": np.full((c, c - 1), 1e-6),
        },
        "lts": {"weight": rng.normal(0, 0.02, (7, c, 5, 5)), "bias": rng.normal(3, 0.5, 7)},
        "lts_ti": {"weight": rng.normal(0, 0.02, (7, c, 5, 5)), "bias": rng.normal(3, 0.5, 7)},
    }
    return make_fitted(method, parameters[method], classes=names, regions=regions)


def write_manifest(
    root: Path,
    cases: Mapping[str, Sequence[NDArray[Any]]],
    *,
    classes: Sequence[str] | None = CLASSES,
    kind: Kind = "logits",
    affine: NDArray[np.float64] | None = None,
    crop: Sequence[Sequence[int]] | None = None,
    extra: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Manifest:
    """Write the members of every case as .npz, an image if an affine is given, and the manifest beside them."""
    entries = []
    for case_id, members in cases.items():
        entry: dict[str, Any] = {"id": case_id, "members": []}
        for index, values in enumerate(members):
            relative = f"member_{index}/{case_id}.npz"
            write_member(root / relative, values, kind=kind, crop=crop)
            entry["members"].append(relative)
        if affine is not None:
            entry["image"] = f"images/{case_id}_0000.nii.gz"
            write_image(root / entry["image"], members[0].shape[1:], affine)
        entry.update(extra or {})
        entries.append(entry)
    content: dict[str, Any] = {"version": 1, "name": "test", "kind": kind, "cases": entries, **keys}
    if classes is not None:
        content["classes"] = list(classes)
    path = root / "manifest.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Manifest.load(path)


def write_member(path: Path, values: NDArray[Any], *, kind: Kind = "logits", crop: Any = None) -> None:
    """One .npz member as nnU-Net would write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {kind: values} if crop is None else {kind: values, "crop": np.asarray(crop)}
    np.savez_compressed(path, **arrays)


def write_image(path: Path, shape: Sequence[int], affine: NDArray[np.float64]) -> None:
    """An image of zeros on the given (z, y, x) grid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.zeros(tuple(shape)[::-1], dtype=np.uint8), affine), path)


def drawn_case(crop: Box | None) -> CaseData:
    """A case of 7 x 9 x 11 voxels and three classes in memory."""
    logits = torch.from_numpy(random_logits(5, (3, 7, 9, 11)))
    inside = None
    if crop is not None:
        inside = torch.zeros(7, 9, 11, dtype=torch.bool)
        inside[*(slice(low, high) for low, high in crop)] = True
        logits[:, ~inside] = 0.0
    return CaseData(
        case_id="drawn",
        logits=logits,
        labels=None,
        region_labels=None,
        valid=None,
        decision=logits.argmax(0),
        inside=inside,
        crop=crop,
        grid=None,
        n_floored=0,
        kind="logits",
    )
