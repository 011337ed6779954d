"""The files of one calibrated case: where they lie, in which format, and that each appears whole or not at all.

Layout of a run's folder, for a case `c` whose geometry is known:

    c.npz                        nnU-Net format: key `probabilities` (class, z, y, x), and `crop` where one is known
    probabilities/c.nii.gz       NIfTI format instead: x-y-z-class on disk
    c.nii.gz                     the segmentation, named as nnU-Net names it
    confidence/c.nii.gz          on request
    entropy/c.nii.gz             on request
    run.json                     record of the run

The folder itself holds one label map per case and nothing else of that ending, so nnU-Net's own tools can read it.
Without a voxel-to-world matrix no NIfTI is written, because any matrix would be invented: the segmentation of a 2-D
case is then `c.png`, of any other `segmentation/c.npz` with key `segmentation` (z, y, x); confidence and entropy become
`.npz` likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segcal.applying.maps import CaseMaps
from segcal.applying.record import ApplySettings, OutputFile
from segcal.applying.stored import UINT16_STEPS
from segcal.errors import GeometryError
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write
from segcal.io.nifti import write_nifti
from segcal.types import Grid


@dataclass(frozen=True, slots=True)
class CaseFiles:
    """Where a case's files lie, relative to the run's folder."""

    probabilities: str
    segmentation: str
    extras: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order in which they are written."""
        return (self.probabilities, *self.extras.values(), self.segmentation)


def plan_files(case_id: str, grid: Grid, settings: ApplySettings) -> CaseFiles:
    """Name a case's files.

    Raises:
        GeometryError: NIfTI was asked for and nothing says where the voxels lie.
    """
    if settings.format == "nifti" and grid.affine is None:
        raise GeometryError(
            f"{case_id}: cannot be written as NIfTI, its voxel-to-world geometry is not known: .npz members carry "
            "none, and the case has no label or image that does. Add `image:` (the NIfTI the prediction was made "
            "from) to the case in the manifest, or use --format nnunet."
        )
    ending = ".npz" if grid.affine is None else ".nii.gz"
    wanted = [name for name in ("confidence", "entropy") if getattr(settings, name)]
    return CaseFiles(
        probabilities=f"{case_id}.npz" if settings.format == "nnunet" else f"probabilities/{case_id}.nii.gz",
        segmentation=_segmentation_name(case_id, grid),
        extras={name: f"{name}/{case_id}{ending}" for name in wanted},
    )


def write_case(
    out: Path, files: CaseFiles, maps: CaseMaps, affine: NDArray[np.float64] | None
) -> tuple[OutputFile, ...]:
    """Write all files of a case and say how large they are; an interruption leaves only whole files behind."""
    with atomic_write(out / files.probabilities) as path:
        write_probabilities(path, maps, affine)
    for name, relative in files.extras.items():
        _write_volume(out / relative, name, maps.extras[name], affine)
    _write_volume(out / files.segmentation, "segmentation", maps.segmentation, affine)
    return tuple(OutputFile(file=name, bytes=(out / name).stat().st_size) for name in files.names)


def _segmentation_name(case_id: str, grid: Grid) -> str:
    if grid.affine is not None:
        return f"{case_id}.nii.gz"
    return f"{case_id}.png" if grid.shape[0] == 1 else f"segmentation/{case_id}.npz"


def write_probabilities(path: Path, maps: CaseMaps, affine: NDArray[np.float64] | None) -> None:
    """Write the map in the format the ending of `path` says; hand in the temporary path of `atomic_write`."""
    if path.name.endswith(".npz"):
        arrays: dict[str, NDArray[np.generic]] = {"probabilities": maps.probabilities}
        if maps.crop is not None:
            # Whoever pools these maps again must not take the certain background outside for a prediction.
            arrays["crop"] = np.asarray(maps.crop, dtype=np.int64)
        write_npz(path, arrays)
        return
    scale = 1 / UINT16_STEPS if maps.probabilities.dtype == np.uint16 else None
    write_nifti(path, maps.probabilities, affine=affine, scale=scale)


def _write_volume(path: Path, key: str, values: NDArray[np.generic], affine: NDArray[np.float64] | None) -> None:
    with atomic_write(path) as temporary:
        if path.suffix == ".npz":
            write_npz(temporary, {key: values})
        elif path.suffix == ".png":
            Image.fromarray(values[0]).save(temporary)
        else:
            write_nifti(temporary, values, affine=affine)
