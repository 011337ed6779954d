"""BraTS-shaped cases with a known truth: 155x240x240 voxels, 5 classes, 5 members, as networks give them.

Skull-stripped: about a sixth of the volume is brain, a per cent or two is lesion, the rest is certain background on
which members agree closely but not exactly. A lesion is oedema around a core with an enhancing rim and sometimes a
cavity. The true class scores u decide the labels (drawn with noise that is smooth in space, so every voxel has exactly
the probabilities softmax(u) and labels still look like drawn by hand). A member's logits are u with an error all
members share, one of its own, too much sharpness, another one for every class, and an offset common to the classes.

    python benchmarks/_brats.py FOLDER [--cases 20] [--kind logits] [--shape 155 240 240]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from scipy.special import ndtr
from torch import Tensor
from torch.nn.functional import interpolate

from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write
from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from segcal.types import Kind

Shape = tuple[int, int, int]
BRATS_SHAPE: Shape = (155, 240, 240)
CLASSES = ("background", "necrosis", "oedema", "enhancing", "cavity")
FOLDER_VARIABLE = "SEGCAL_BENCH_DATA"

_EXTENT_MM = 155.0  # the first axis; the voxels of smaller shapes are larger, the anatomy stays
_COARSE = 8  # smooth fields are drawn on a grid this many times coarser
_SHARPNESS = (1.9, 2.6, 2.2, 2.9, 1.7)
_BIAS = (0.3, -0.6, 0.2, 0.5, -0.8)
_LABEL_NOISE_VOXELS = 1.5
_FAR = 12.0  # scores beyond which a truth is certain


def data_folder(given: Path | None = None) -> Path:
    """Where cases are kept between runs: as given, $SEGCAL_BENCH_DATA, or a folder for temporary files."""
    return given or Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / "segcal-bench")


def brats_manifest(
    n_cases: int,
    *,
    kind: Kind = "logits",
    shape: Shape = BRATS_SHAPE,
    n_members: int = 5,
    seed: int = 0,
    folder: Path | None = None,
) -> Path:
    """The manifest of the first `n_cases` cases; what is missing on disk is made, what is there stays.

    Its one split gives two thirds to calibration and the rest to validation; without --split, evaluate takes all.

    Args:
        kind: `logits`: float16 as `segcal export` writes them; `probabilities`: float32 as nnU-Net does.
    """
    home = data_folder(folder) / f"{'x'.join(map(str, shape))}_members_{n_members}_seed_{seed}"
    names = [f"brats_{index:03d}" for index in range(n_cases)]
    for index, name in enumerate(names):
        files = [home / _member_file(kind, member, name) for member in range(n_members)]
        if not all(path.is_file() for path in [*files, home / _label_file(name)]):
            _write_case(home, files, name, kind, shape, np.random.SeedSequence([seed, index]))
    path = home / f"{kind}_{n_cases}.yaml"
    return _save_manifest(path, names, kind, n_members)


def _member_file(kind: Kind, member: int, name: str) -> str:
    return f"{kind}/fold_{member}/{name}.npz"


def _label_file(name: str) -> str:
    return f"labels/{name}.nii.gz"


def _save_manifest(path: Path, names: Sequence[str], kind: Kind, n_members: int) -> Path:
    n_validation = max(1, len(names) // 3) if len(names) > 1 else 0
    content = {
        "version": 1,
        "name": path.stem,
        "kind": kind,
        "axes": "czyx",
        "classes": list(CLASSES),
        "cases": [
            {
                "id": name,
                "members": [_member_file(kind, member, name) for member in range(n_members)],
                "label": _label_file(name),
            }
            for name in names
        ],
        "splits": [
            {"calibration": names[: len(names) - n_validation], "validation": names[len(names) - n_validation :]}
        ],
    }
    Manifest.from_content(content, path).save(path)
    return path


def _write_case(
    home: Path, files: Sequence[Path], name: str, kind: Kind, shape: Shape, seeds: np.random.SeedSequence
) -> None:
    truth_seed, label_seed, *member_seeds = seeds.spawn(2 + len(files))
    rng = np.random.default_rng(truth_seed)
    brain, lesion, truth = _anatomy(rng, shape)
    label_path = home / _label_file(name)
    if not label_path.is_file():
        with atomic_write(label_path) as temporary:
            write_nifti(temporary, _draw_labels(label_seed, truth, lesion), affine=_affine(shape))
    # What the network takes for the truth: an error of all members, then each its own.
    seen = truth.add_(_smooth(rng, len(CLASSES), shape, 1.1).mul_(lesion))
    for path, member_seed in zip(files, member_seeds, strict=True):
        logits = _member_logits(np.random.default_rng(member_seed), seen, brain, lesion)
        with atomic_write(path) as temporary:
            if kind == "logits":
                full = [[0, n] for n in shape]
                write_npz(temporary, {"logits": logits.half().numpy(), "crop": np.asarray(full, dtype=np.int64)})
            else:
                with temporary.open("wb") as file:
                    np.savez_compressed(file, probabilities=torch.softmax(logits, 0).numpy())


def _affine(shape: Shape) -> np.ndarray[Any, np.dtype[np.float64]]:
    voxel_mm = _EXTENT_MM / shape[0]
    return np.diag([-voxel_mm, -voxel_mm, voxel_mm, 1.0])


def _anatomy(rng: np.random.Generator, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """How much brain and how much doubt there is, (z, y, x) in 0 to 1 each, and the true scores (C, z, y, x)."""
    axes = [(torch.arange(n, dtype=torch.float32, device="cpu") - (n - 1) / 2) * (_EXTENT_MM / shape[0]) for n in shape]
    z, y, x = torch.meshgrid(*axes, indexing="ij")
    brain_depth = 65.0 * (1 - ((z / 62) ** 2 + (y / 82) ** 2 + (x / 66) ** 2).sqrt_())
    brain = torch.sigmoid(brain_depth / 1.5)
    centre = rng.uniform(-22, 22, 3)
    radius = rng.uniform(22, 36)
    wobble = _smooth(rng, 3, shape, 3.5)
    from_centre = ((z - centre[0]) ** 2 + (y - centre[1]) ** 2 + (x - centre[2]) ** 2).sqrt_()
    depth = torch.minimum(radius + wobble[0] - from_centre, brain_depth - 3)  # mm inside the lesion, negative outside
    core = 0.6 * radius + 1.5 * wobble[1] - from_centre
    cavity = rng.uniform(0, 7) + 1.5 * wobble[2] - (from_centre - 0.2 * radius).abs_()
    truth = torch.empty((len(CLASSES), *shape), dtype=torch.float32, device="cpu")
    truth[0] = -0.8 * depth
    truth[1] = torch.minimum(0.7 * depth, 0.8 * (core - 4.5))
    truth[2] = torch.minimum(0.7 * depth, -0.8 * core)
    truth[3] = torch.minimum(0.7 * depth, 2.0 - 0.7 * (core - 2).abs_())
    truth[4] = torch.minimum(0.7 * depth, cavity - 3)
    truth.clamp_(-_FAR, _FAR)
    return brain, torch.sigmoid((depth + 8) / 2), truth


def _draw_labels(seed: np.random.SeedSequence, truth: Tensor, lesion: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A draw from softmax(truth) at every voxel, neighbours drawn alike; certain background far from the lesion."""
    rng = np.random.default_rng(seed)
    best = np.full(truth.shape[1:], -np.inf, dtype=np.float32)
    labels = np.zeros(truth.shape[1:], dtype=np.uint8)
    for index, score in enumerate(truth):
        noise = gaussian_filter(rng.standard_normal(labels.shape, dtype=np.float32), _LABEL_NOISE_VOXELS, truncate=3)
        uniform = ndtr(noise / noise.std()).clip(1e-7, 1 - 1e-7)
        drawn = score.numpy() - np.log(-np.log(uniform))  # the largest of these is a draw from the softmax (Gumbel)
        labels[drawn > best] = index
        np.maximum(best, drawn, out=best)
    labels[lesion.numpy() < 0.02] = 0
    return labels


def _member_logits(rng: np.random.Generator, seen: Tensor, brain: Tensor, lesion: Tensor) -> Tensor:
    """(C, z, y, x) float32: the scores this member gives; steady outside the brain, textured inside."""
    n_classes, *space = seen.shape
    shape: Shape = (space[0], space[1], space[2])
    logits = _smooth(rng, n_classes, shape, 0.9).mul_(lesion).add_(seen)
    offset = rng.normal(0, 1) + _smooth(rng, 1, shape, 0.5)[0]
    drift = _smooth(rng, n_classes, shape, 0.12)
    texture = 0.015 + 0.2 * brain
    for index, channel in enumerate(logits):
        # A network saturates softly: far background ends near 10 for class 0 and between -3 and -6 for the others.
        limit = 10.0 if index == 0 else 3.5 + 0.6 * index
        channel.mul_(_SHARPNESS[index] / limit).tanh_().mul_(limit).add_(_BIAS[index])
        noise = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        channel.add_(noise.mul_(texture)).add_(drift[index]).add_(offset)
    return logits


def _smooth(rng: np.random.Generator, n_fields: int, shape: Shape, scale: float) -> Tensor:
    """(n, z, y, x) random fields of about this standard deviation that change over about twenty voxels."""
    coarse = [max(2, -(-n // _COARSE)) for n in shape]
    drawn = rng.standard_normal((n_fields, *coarse), dtype=np.float32)
    blurred = np.stack([gaussian_filter(field, 1.0) for field in drawn])
    blurred *= scale / max(float(blurred.std()), 1e-6)
    return interpolate(torch.from_numpy(blurred)[None], size=shape, mode="trilinear", align_corners=True)[0]


def main() -> None:
    """Make cases and say what they weigh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--kind", choices=("logits", "probabilities"), default="logits")
    parser.add_argument("--shape", type=int, nargs=3, default=BRATS_SHAPE)
    options = parser.parse_args()
    kind: Literal["logits", "probabilities"] = options.kind
    start = time.perf_counter()
    path = brats_manifest(options.cases, kind=kind, shape=tuple(options.shape), folder=options.folder)
    manifest = Manifest.load(path)
    files = [manifest.resolve(member) for case in manifest.cases for member in case.members]
    size_mb = sum(file.stat().st_size for file in files) / len(files) / 1e6
    print(f"{path}: {options.cases} cases, {size_mb:.1f} MB a member, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
