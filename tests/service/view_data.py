"""View folders made by hand: small volumes whose every voxel is known."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

SHAPE = (4, 5, 6)
LAYERS = (
    ("image", "image", "image", 0.0, 119.0),
    ("segmentation", "segmentation", "labels", 0, 2),
    ("p0", "probability of background", "share", 0, 1),
    ("p1", "probability of anterior", "share", 0, 1),
    ("p2", "probability of posterior", "share", 0, 1),
    ("entropy", "uncertainty", "share", 0, 1),
    ("disagreement", "member disagreement", "share", 0, 1),
)


def affine_of(codes: str, spacing_mm: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> NDArray[np.float64]:
    """An affine whose voxel axes x, y, z run towards the named sides (`RAS`, `LPS`, `PIR` ...)."""
    affine = np.eye(4)
    affine[:3, :3] = 0
    for column, (letter, size) in enumerate(zip(codes, spacing_mm, strict=True)):
        row, sign = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}[letter]
        affine[row, column] = sign * size
    return affine


def volumes(shape: tuple[int, int, int] = SHAPE) -> dict[str, NDArray[np.generic]]:
    """Every grey value once; two classes; probabilities that add up to 255."""
    n = int(np.prod(shape))
    counting = np.arange(n).reshape(shape)
    segmentation = np.zeros(shape, dtype=np.uint8)
    z, y, x = (size // 2 for size in shape)
    segmentation[:z, :y, 1:x] = 1
    segmentation[z:, y:, x:] = 2
    first = (counting * 7 % 200).astype(np.uint8)
    second = ((255 - first) // 2).astype(np.uint8)
    return {
        "image": counting.astype(np.int16),
        "segmentation": segmentation,
        "p0": (255 - first.astype(np.int64) - second).astype(np.uint8),
        "p1": first,
        "p2": second,
        "entropy": (counting * 255 // max(n - 1, 1)).astype(np.uint8),
        "disagreement": (counting * 3 % 120).astype(np.uint8),
    }


def write_view(
    folder: Path,
    affine: NDArray[np.float64],
    *,
    shape: tuple[int, int, int] = SHAPE,
    without: tuple[str, ...] = (),
    geometry: bool = True,
    layers: dict[str, NDArray[np.generic]] | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Layers and their description as a job writes them; gives back the volumes (z, y, x)."""
    made = {name: volume for name, volume in (layers or volumes(shape)).items() if name not in without}
    folder.mkdir(parents=True, exist_ok=True)
    for name, volume in made.items():
        image = nib.Nifti1Image(volume.T, affine)
        image.header.set_slope_inter(1 / 255 if name[0] in "ped" else 1.0, 0.0)
        nib.save(image, folder / f"{name}.nii.gz")
    described = [
        {"name": name, "title": title, "file": f"{name}.nii.gz", "kind": kind, "low": low, "high": high}
        for name, title, kind, low, high in LAYERS
        if name in made
    ]
    first = next(iter(made.values()))
    view = {
        "shape": list(first.shape),
        "spacing": [1.0, 1.0, 1.0],
        "classes": ["background", "anterior", "posterior"],
        "labels": ["background", "anterior", "posterior"],
        "ignored": 3,
        "geometry": geometry,
        "layers": described,
        "middle": [size // 2 for size in first.shape],
    }
    (folder / "view.json").write_text(json.dumps(view))
    return made
