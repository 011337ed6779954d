"""One case from disk, ready to compute with: pooled logits, labels and the decision, on one grid."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.case_labels import check_grid, load_deployed, read_case_labels, rows, targets
from segcal.checks.glance import glance, odd_member
from segcal.errors import DataError, GeometryError, UsageError
from segcal.io.images import read_grid
from segcal.io.members import Member, read_member
from segcal.manifest import Manifest, ManifestCase
from segcal.pooling import Pool, Pooled, pooled_decision
from segcal.threads import allowed_threads, one_thread
from segcal.types import Box, Grid, Kind, Pooling, box_slices
from segcal.volumes import inside_mask, space_of

__all__ = ["MEMBERS_IN_MEMORY", "CaseData", "Want", "load_case", "load_deployed", "load_poolings"]

MEMBERS_IN_MEMORY = 2
"""Members decoded at the same time: one is added while the next is unpacked."""


@dataclass(frozen=True, slots=True, eq=False)
class CaseData:
    """Everything the library computes with for one case.

    Attributes:
        case_id: as in the manifest.
        logits: (C, z, y, x) float32, pooled; log-odds per region for region models; 0 outside the crop.
        labels: (z, y, x) int64 class index, IGNORED where the label says so; None without labels and for region
            models.
        region_labels: (R, z, y, x) bool, whether the voxel belongs to each region; only for region models.
        valid: (z, y, x) bool, False at ignored voxels; None when no voxel is ignored.
        decision: (z, y, x) int64 (uint8 if asked for) argmax of the logits, first index on ties; region models:
            (R, z, y, x) bool, log-odds > 0.
        inside: (z, y, x) bool, where the network predicted; None for everywhere.
        crop: the same as a box.
        grid: where the case lies; from the members (NIfTI), else the label, the deployed file or the image.
        n_floored: values raised to keep their logarithm finite, see `Pooled`.
        kind: what the member files hold.
        n_fill: voxels that look like padding, see `Pooled`.
        odd_member: in words, a member that lies otherwise than the others; empty if there is none.
    """

    case_id: str
    logits: Tensor = field(repr=False)
    labels: Tensor | None = field(repr=False)
    region_labels: Tensor | None = field(repr=False)
    valid: Tensor | None = field(repr=False)
    decision: Tensor = field(repr=False)
    inside: Tensor | None = field(repr=False)
    crop: Box | None
    grid: Grid | None
    n_floored: int
    kind: Kind
    n_fill: int = 0
    odd_member: str = ""

    def within_crop(self) -> CaseData:
        """The crop as a case of its own, without labels; the case itself where there is no crop."""
        if self.crop is None:
            return self
        z, y, x = box_slices(self.crop)
        return replace(
            self,
            logits=self.logits[:, z, y, x].contiguous(),
            decision=self.decision[..., z, y, x].contiguous(),
            labels=None,
            region_labels=None,
            valid=None,
            inside=None,
            crop=None,
        )


class Want(NamedTuple):
    """One way to pool a case: how, and how many of its first members (None for all)."""

    pooling: Pooling
    n_members: int | None = None


def load_case(
    manifest: Manifest,
    case: ManifestCase,
    *,
    pooling: Pooling,
    device: torch.device,
    with_labels: bool,
    n_members: int | None = None,
    narrow: bool = False,
) -> CaseData:
    """Read the members and the label of a case and pool the members.

    Args:
        manifest: says what the files hold.
        case: one of its cases.
        pooling: mean of logits or of probabilities.
        device: where the tensors of the result live.
        with_labels: also read the label; a case without one is then an error.
        n_members: only the first so many members; None takes all.
        narrow: keep the decision in bytes where the classes allow it.
    """
    want = Want(pooling, n_members)
    return load_poolings(manifest, case, [want], device=device, with_labels=with_labels, narrow=narrow)[0]


@one_thread()
def load_poolings(
    manifest: Manifest,
    case: ManifestCase,
    wanted: Sequence[Want],
    *,
    device: torch.device,
    with_labels: bool,
    on_member: Callable[[int, Member], None] | None = None,
    narrow: bool = False,
) -> list[CaseData]:
    """Read a case once and pool it in several ways; see `load_case`.

    Members are read in parallel and added in the manifest's order, so the result does not depend on timing.
    `on_member` is called with the position of every member and the member itself, after it was checked and pooled;
    it must not keep the member. With `narrow` decisions are kept in bytes where the classes allow it.
    """
    counts = [len(_chosen(case, want.n_members)) for want in wanted]
    paths = [manifest.resolve(member) for member in case.members[: max(counts)]]
    pools = [Pool(want.pooling, regions=manifest.has_regions, device=device) for want in wanted]
    grid: Grid | None = None
    glances: list[Tensor] = []
    with closing(_read_members(manifest, case, paths)) as members:
        for member in members:  # not enumerated: that keeps its last tuple, and the member in it, alive
            position = len(glances)
            _check_member(manifest, case, member, grid)
            grid = grid or member.grid
            glances.append(glance(member, regions=manifest.has_regions))
            for pool, count in zip(pools, counts, strict=True):
                if position < count:
                    pool.add(member)
            if on_member is not None:
                on_member(position, member)
            del member  # before the next one is asked for: at most MEMBERS_IN_MEMORY are alive
    odd = odd_member(case.members[: len(glances)], glances, n_classes=manifest.n_classes)
    results = [pool.result() for pool in pools]
    shape = space_of(results[0].logits)
    label_map = read_case_labels(manifest, case, shape, grid) if with_labels else None
    grid = grid or (label_map.grid if label_map is not None and label_map.grid.affine is not None else None)
    grid = grid or _grid_beside(manifest, case, shape)
    labels, region_labels, valid = targets(manifest, case, label_map, device)
    return [
        CaseData(
            case_id=case.id,
            logits=pooled.logits,
            labels=labels,
            region_labels=region_labels,
            valid=valid,
            decision=_decision(manifest, pooled, narrow=narrow),
            inside=inside_mask(pooled.crop, shape, pooled.logits.device),
            crop=pooled.crop,
            grid=grid,
            n_floored=pooled.n_floored,
            kind=manifest.kind,
            n_fill=pooled.n_fill,
            odd_member=odd,
        )
        for pooled in results
    ]


def _chosen(case: ManifestCase, n_members: int | None) -> Sequence[str]:
    if n_members is None:
        return case.members
    if not 1 <= n_members <= len(case.members):
        raise UsageError(f"{case.id}: {n_members} members were asked for, the manifest lists {len(case.members)}.")
    return case.members[:n_members]


def _read_members(manifest: Manifest, case: ManifestCase, paths: Sequence[Path]) -> Generator[Member]:
    """Members in order, read ahead; a new one is started only after the consumer let go of the one before."""

    def read(path: Path) -> Member:
        return read_member(path, kind=manifest.kind, axes=manifest.axes, crop=case.crop)

    if allowed_threads() == 1:
        yield from map(read, paths)
        return
    waiting = deque(paths)
    running: deque[Future[Member]] = deque()
    with ThreadPoolExecutor(MEMBERS_IN_MEMORY, thread_name_prefix="segcal-read") as executor:
        try:
            while waiting or running:
                while waiting and len(running) < MEMBERS_IN_MEMORY:
                    running.append(executor.submit(read, waiting.popleft()))
                # Popped inside the expression: a name would keep the member alive while the next one is decoded.
                yield running.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _check_member(manifest: Manifest, case: ManifestCase, member: Member, grid: Grid | None) -> None:
    if member.values.shape[0] != manifest.n_classes:
        what = "regions" if manifest.has_regions else "classes"
        raise DataError(
            f"{case.id}: {member.path} has {member.values.shape[0]} channels but the manifest names "
            f"{manifest.n_classes} {what} ({', '.join(manifest.class_names)}). Correct `{what}` in the manifest; "
            "an ignore label has no channel."
        )
    if grid is not None and member.grid is not None and not grid.agrees_with(member.grid):
        raise GeometryError(
            f"{case.id}: {member.path} lies elsewhere in space than the members before it: shape {member.grid.shape}, "
            f"affine {rows(member.grid)} against {grid.shape}, {rows(grid)}. Predict all members from one image."
        )


def _decision(manifest: Manifest, pooled: Pooled, *, narrow: bool) -> Tensor:
    dtype = torch.uint8 if narrow and manifest.n_classes <= 255 else torch.int64
    return pooled_decision(pooled.logits, regions=manifest.has_regions, dtype=dtype)


def _grid_beside(manifest: Manifest, case: ManifestCase, shape: tuple[int, int, int]) -> Grid | None:
    """Geometry from the label, the deployed file or the image when the members carry none."""
    without_affine: Grid | None = None
    for what, relative in (("label", case.label), ("deployed segmentation", case.deployed), ("image", case.image)):
        path = None if relative is None else manifest.resolve(relative)
        if path is None or not path.exists():
            continue  # whoever needs the content of that file says that it is missing
        found = read_grid(path)
        check_grid(manifest, case, what, path, found, shape, None)
        if found.affine is not None:
            return found
        without_affine = without_affine or found
    return without_affine
