"""A small weighted set of in-plane patches that stands for all voxels: what local temperature scaling is fitted on.

Slices are cut into tiles of a few pixels a side. Each tile has a score, the size of the gradient its voxels can
give; priority sampling (Duffield, Lund & Thorup 2007) keeps the tiles with the largest score / u and weights them
so that the sum over the kept tiles is unbiased for the sum over all. u is a pure function of (seed, case, tile):
neither the order of the cases nor the number of workers matters, and two reservoirs merge by keeping the largest.

A tile is stored with the halo its convolution looks at, cut from the slice *after* the padding that the calibrator
itself applies. The temperature of a voxel in a patch is therefore the temperature it has in its volume, also at the
border of the image. Small tiles pay: the informative voxels lie along boundaries, and the halo costs memory only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.local_temperature import HALO, pad_in_plane
from segcal.errors import DataError, ParameterError
from segcal.fitting.hashing import voxel_uniforms
from segcal.types import IGNORED

DEFAULT_PATCHES = 8192
DEFAULT_PATCH_SIZE = 8
DEFAULT_BYTES = 256 << 20
SCORE_FLOOR = 2e-3
"""What the most certain voxel adds to its tile's score: bounds the weight of tiles nothing happens in."""
SCORE_TEMPERATURE = 2.0
"""Networks are over-confident: at T = 1 a score would miss voxels that a calibrated map still doubts."""
_FIXED_POINT = 1 << 20
"""Scores are summed as integers: the same sum in any order, on any number of threads."""
_VOXELS_PER_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PatchSample:
    """Weighted patches, on the CPU.

    Attributes:
        logits: (n, C, h + 8, w + 8) float32, pooled logits with a halo of 4 pixels on each side.
        labels: (n, h, w) int64 class index, IGNORED (-1) where a voxel does not count or the tile is smaller.
        weights: (n,) float64, how many tiles a patch stands for.
        n_voxels: labelled voxels of all cases that were offered: the mean NLL is
            sum(weights * NLL summed over each patch) / n_voxels, unbiased for the mean over those voxels.
    """

    logits: Tensor
    labels: Tensor
    weights: Tensor
    n_voxels: int

    @property
    def n_patches(self) -> int:
        return self.labels.shape[0]

    @property
    def n_classes(self) -> int:
        return self.logits.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    score: float
    logits: Tensor  # (C, h + 8, w + 8) float32
    labels: Tensor  # (h, w) int64

    def __reduce__(self) -> tuple[object, ...]:
        # Thousands of small tensors travel between workers, and numpy pickles one fifty times faster than torch.
        return _tile_of_arrays, (self.score, self.logits.numpy(), self.labels.numpy())


@dataclass
class PatchReservoir:
    """Collects a `PatchSample` case by case, in one pass and bounded memory.

    Attributes:
        seed: of the sample.
        max_patches: patches kept at most.
        patch_size: longest side of a tile in pixels; slices are cut into nearly equal tiles no longer than this.
        max_bytes: of the kept logits; with many classes fewer than `max_patches` are kept.
        floor: `threshold` of the reservoir this one will be merged into; patches it would drop are not collected.
    """

    seed: int
    max_patches: int = DEFAULT_PATCHES
    patch_size: int = DEFAULT_PATCH_SIZE
    max_bytes: int = DEFAULT_BYTES
    floor: float = 0.0
    _n_voxels: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _heap: list[tuple[float, str, int, _Tile]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.max_patches, self.patch_size, self.max_bytes) < 1:
            raise ParameterError(
                f"patches: max_patches, patch_size and max_bytes must be at least 1, "
                f"got {self.max_patches}, {self.patch_size} and {self.max_bytes}"
            )

    def capacity(self, n_classes: int) -> int:
        """Patches the sample holds at most."""
        one_patch = 4 * n_classes * (self.patch_size + 2 * HALO) ** 2
        return min(self.max_patches, max(1, self.max_bytes // one_patch))

    @property
    def threshold(self) -> float:
        """The priority below which a further patch is dropped; it never falls, and is 0 while there is room."""
        full = self._heap and len(self._heap) > self.capacity(self._heap[0][3].logits.shape[0])
        return max(self.floor, self._heap[0][0]) if full else self.floor

    def add(self, case_id: str, logits: Tensor, labels: Tensor) -> None:
        """Offer one case.

        Args:
            case_id: must not have been added before.
            logits: (C, z, y, x), pooled, finite.
            labels: (z, y, x) integer class index; IGNORED (-1) for voxels that do not count.
        """
        if case_id in self._n_voxels:
            raise DataError(f"{case_id}: added twice to the sample of patches; a case may count only once")
        _check(case_id, logits, labels)
        if self._heap and self._heap[0][3].logits.shape[0] != logits.shape[0]:
            expected = self._heap[0][3].logits.shape[0]
            raise DataError(f"{case_id}: {logits.shape[0]} classes, the cases before it have {expected}")
        self._n_voxels[case_id] = int((labels != IGNORED).sum())
        rows, columns = (_bounds(length, self.patch_size) for length in labels.shape[1:])
        scores = _tile_scores(logits, labels, rows, columns)
        indices = torch.arange(len(scores), dtype=torch.int64, device="cpu")
        priorities = scores / voxel_uniforms(self.seed, case_id, indices)
        padded_z, padded = -1, logits
        for index in self._promising(priorities, self.capacity(logits.shape[0])):
            z, in_slice = divmod(index, len(rows) * len(columns))
            row, column = divmod(in_slice, len(columns))
            if z != padded_z:
                padded_z, padded = z, pad_in_plane(logits[:, z].unsqueeze(0).to(torch.float32))[0]
            tile = _cut(padded, labels[z], rows[row], columns[column], float(scores[index]))
            self._push(float(priorities[index]), case_id, index, tile)

    def merge(self, other: PatchReservoir) -> None:
        """Take in what another worker collected from other cases with the same settings."""
        mine, theirs = self._settings(), other._settings()
        if mine != theirs:
            raise ParameterError(f"patches: reservoirs with different settings cannot be merged: {mine} and {theirs}")
        twice = sorted(self._n_voxels.keys() & other._n_voxels.keys())
        if twice:
            raise DataError(f"{twice[0]}: added to both samples of patches; a case may count only once")
        self._n_voxels |= other._n_voxels
        for entry in other._heap:
            self._push(*entry)

    def sample(self) -> PatchSample:
        """The weighted patches, ordered by case name and position."""
        entries = sorted(self._heap, key=lambda entry: entry[:3], reverse=True)
        if not entries:
            raise DataError("no labelled voxel in any of the cases: there is nothing to fit a local temperature on")
        capacity = self.capacity(entries[0][3].logits.shape[0])
        threshold = entries[capacity][0] if len(entries) > capacity else 0.0
        tiles = [tile for _, _, _, tile in sorted(entries[:capacity], key=lambda entry: entry[1:3])]
        height, width = (max(tile.labels.shape[axis] for tile in tiles) for axis in (0, 1))
        weights = [max(1.0, threshold / tile.score) for tile in tiles]
        return PatchSample(
            torch.stack([_fill(tile.logits, height + 2 * HALO, width + 2 * HALO, 0.0) for tile in tiles]),
            torch.stack([_fill(tile.labels, height, width, IGNORED) for tile in tiles]),
            torch.tensor(weights, dtype=torch.float64, device="cpu"),
            sum(self._n_voxels.values()),
        )

    def _settings(self) -> tuple[int, int, int, int]:
        return self.seed, self.max_patches, self.patch_size, self.max_bytes

    def _promising(self, priorities: Tensor, capacity: int) -> list[int]:
        """Tiles of a case that are among its own largest and not below all that is kept already."""
        floor = self.threshold
        largest = torch.topk(priorities, min(capacity + 1, len(priorities))).values[-1]
        chosen = (priorities > 0) & (priorities >= floor) & (priorities >= largest)
        return [int(index) for index in chosen.nonzero().squeeze(1).tolist()]

    def _push(self, priority: float, case_id: str, index: int, tile: _Tile) -> None:
        # One tile more than the sample holds: the smallest priority kept is the threshold of the weights.
        entry = (priority, case_id, index, tile)
        if len(self._heap) <= self.capacity(tile.logits.shape[0]):
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)


def _tile_of_arrays(score: float, logits: NDArray[np.float32], labels: NDArray[np.int64]) -> _Tile:
    return _Tile(score, torch.from_numpy(logits), torch.from_numpy(labels))


def _check(case_id: str, logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 4 or logits.shape[1:] != labels.shape or labels.numel() == 0:
        raise DataError(
            f"{case_id}: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not belong together; "
            "expected (C, z, y, x) and (z, y, x) with at least one voxel"
        )
    if not bool(torch.isfinite(logits).all()):
        raise DataError(
            f"{case_id}: the pooled logits hold NaN or infinite values; a local temperature needs finite ones"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < IGNORED or high >= logits.shape[0]:
        raise DataError(
            f"{case_id}: labels run from {low} to {high}, expected class indices 0 to {logits.shape[0] - 1} "
            f"or {IGNORED} for voxels that do not count"
        )


def _bounds(length: int, patch_size: int) -> list[tuple[int, int]]:
    """Cut `length` pixels into the fewest nearly equal pieces of at most `patch_size`."""
    n_pieces = -(-length // patch_size)
    return list(pairwise(piece * length // n_pieces for piece in range(n_pieces + 1)))


def _tile_scores(logits: Tensor, labels: Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> Tensor:
    """(z * rows * columns,) float64 on the CPU: for each tile the sum of 1 - p_y + floor over its labelled voxels.

    1 - p_y at T = 2 is half the length (1-norm) of the gradient of a voxel's NLL. The label is part of it: a
    confidently wrong voxel matters most, and the confidence alone would thin it out with its certain neighbours.
    """
    per_chunk = max(1, _VOXELS_PER_CHUNK // labels[0].numel())
    parts = []
    for begin in range(0, labels.shape[0], per_chunk):
        slices = logits[:, begin : begin + per_chunk].to(torch.float32) / SCORE_TEMPERATURE
        truth = labels[begin : begin + per_chunk].to(torch.int64)
        log_p = slices.gather(0, truth.clamp(min=0).unsqueeze(0))[0] - torch.logsumexp(slices, 0)
        voxels = ((SCORE_FLOOR - torch.expm1(log_p).clamp(max=0.0)) * _FIXED_POINT).round().to(torch.int64)
        voxels = voxels.masked_fill(truth == IGNORED, 0)
        bands = torch.stack([voxels[:, y0:y1].sum(1) for y0, y1 in rows], 1)
        parts.append(torch.stack([bands[:, :, x0:x1].sum(2) for x0, x1 in columns], 2).reshape(-1).cpu())
    return torch.cat(parts).to(torch.float64) / _FIXED_POINT


def _cut(padded: Tensor, labels: Tensor, row: tuple[int, int], column: tuple[int, int], score: float) -> _Tile:
    """One tile with its halo, copied: a view would keep the whole volume in memory."""
    (y0, y1), (x0, x1) = row, column
    return _Tile(
        score,
        padded[:, y0 : y1 + 2 * HALO, x0 : x1 + 2 * HALO].clone().cpu(),
        labels[y0:y1, x0:x1].to(torch.int64, copy=True).cpu(),
    )


def _fill(values: Tensor, height: int, width: int, value: float) -> Tensor:
    """Enlarge a tile to the common size at its lower right; nothing there counts."""
    return F.pad(values, (0, width - values.shape[-1], 0, height - values.shape[-2]), value=value)
