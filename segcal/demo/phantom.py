"""Writing the phantom: five members' logits, labels, images and the manifest that ties them together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from segcal.demo.anatomy import CLASSES, draw_anatomy
from segcal.demo.ensemble import SITES, Habits, draw_member_logits
from segcal.demo.fields import Shape, Spacing
from segcal.errors import UsageError
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write
from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from segcal.types import Progress

MANIFEST_NAME = "manifest.yaml"
FIELD_OF_VIEW_MM = (100.0, 96.0, 96.0)
"""Extent of every case along z, y, x; the default shape gives voxels of 2.5 x 1.5 x 1.5 mm."""


def make_phantom(
    folder: Path,
    *,
    seed: int = 0,
    n_cases: int = 24,
    n_other_site: int = 6,
    shape: Shape = (40, 64, 64),
    n_members: int = 5,
    habits: Habits | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a small synthetic ensemble whose truth is known and returns the path of its manifest.

    The same seed gives the same bytes. Cases of `site_b` are only ever tested; those of `site_a` are divided into
    calibration, validation and test in the manifest's one split.

    Args:
        folder: Gets `member_0/ … labels/ images/ manifest.yaml`.
        n_cases: All cases of both sites.
        n_other_site: How many of them come from `site_b`.
        shape: Voxels (z, y, x) of a case; the field of view stays the same.
        habits: How the networks go wrong; None takes the defaults.
    """
    n_home = n_cases - n_other_site
    if n_home < 3 or n_other_site < 0 or n_members < 1 or min(shape) < 8:
        raise UsageError(
            f"a phantom needs 3 cases of {SITES[0]}, one member and 8 voxels along each axis; got "
            f"{n_home} such cases, {n_members} members, shape {shape}"
        )
    sites = [SITES[0]] * n_home + [SITES[1]] * n_other_site
    for index, site in enumerate(sites):
        _write_case(folder, index, site, np.random.SeedSequence([seed, index]), shape, n_members, habits or Habits())
        if progress is not None:
            progress("phantom cases", index + 1, n_cases)
    path = folder / MANIFEST_NAME
    Manifest.from_content(_manifest(sites, n_members), path).save(path)
    return path


def _case_id(index: int) -> str:
    return f"phantom_{index + 1:03d}"


def _write_case(
    folder: Path, index: int, site: str, seeds: np.random.SeedSequence, shape: Shape, n_members: int, habits: Habits
) -> None:
    anatomy_seed, geometry_seed, network_seed = seeds.spawn(3)
    name, spacing_mm = _case_id(index), _spacing_mm(shape)
    anatomy = draw_anatomy(np.random.default_rng(anatomy_seed), shape, spacing_mm)
    affine = _affine(np.random.default_rng(geometry_seed), shape, spacing_mm)
    with atomic_write(folder / "labels" / f"{name}.nii.gz") as temporary:
        write_nifti(temporary, anatomy.labels.astype(np.uint8), affine=affine)
    with atomic_write(folder / "images" / f"{name}_0000.nii.gz") as temporary:
        write_nifti(temporary, np.rint(anatomy.image).astype(np.int16), affine=affine)
    members = draw_member_logits(network_seed, anatomy, spacing_mm, site=site, n_members=n_members, habits=habits)
    for member, logits in enumerate(members):
        with atomic_write(folder / f"member_{member}" / f"{name}.npz") as temporary:
            write_npz(temporary, {"logits": logits.astype(np.float16)})


def _spacing_mm(shape: Shape) -> Spacing:
    z, y, x = (extent / n for extent, n in zip(FIELD_OF_VIEW_MM, shape, strict=True))
    return z, y, x


def _affine(rng: np.random.Generator, shape: Shape, spacing_mm: Spacing) -> NDArray[np.float64]:
    """Voxel (x, y, z) to RAS+ world: x runs to the left and y to the back, as scanners store them, slightly tilted."""
    tilt = Rotation.from_euler("xyz", [*rng.uniform(-12, 12, 2), 0.0], degrees=True).as_matrix()
    affine = np.eye(4)
    affine[:3, :3] = tilt @ np.diag([-1.0, -1.0, 1.0]) @ np.diag(spacing_mm[::-1])
    middle = (np.array(shape[::-1]) - 1) / 2
    affine[:3, 3] = rng.uniform(-30, 30, 3) - affine[:3, :3] @ middle
    return affine


def _manifest(sites: list[str], n_members: int) -> dict[str, object]:
    ids = [_case_id(index) for index in range(len(sites))]
    n_home = sites.count(SITES[0])
    n_test, n_validation = n_home // 3, max(1, 2 * n_home // 9)
    n_calibration = n_home - n_test - n_validation
    return {
        "version": 1,
        "name": "phantom",
        "kind": "logits",
        "axes": "czyx",
        "classes": list(CLASSES),
        "cases": [
            {
                "id": name,
                "members": [f"member_{member}/{name}.npz" for member in range(n_members)],
                "label": f"labels/{name}.nii.gz",
                "image": f"images/{name}_0000.nii.gz",
                "group": site,
            }
            for name, site in zip(ids, sites, strict=True)
        ],
        "splits": [
            {
                "calibration": ids[:n_calibration],
                "validation": ids[n_calibration : n_calibration + n_validation],
                "test": ids[n_calibration + n_validation :],
            }
        ],
    }
