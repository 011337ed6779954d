"""Maps that look at a voxel's neighbours in its slice, for runs of voxels: a few slices are made at a time and cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class BySlabs:
    """Values (C, n) of any run of at least one flattened voxel, from what makes those of some slices.

    Runs that follow each other, as measuring asks for them, make every slice once; a run from elsewhere begins anew.
    """

    def __init__(self, make: Callable[[slice], Tensor], slabs: Sequence[slice], slice_voxels: int) -> None:
        """Cut a volume into slabs.

        Args:
            make: from a range of slices (z) to their (C, z, y, x) values.
            slabs: ranges that follow each other and cover the volume.
            slice_voxels: voxels of one slice.
        """
        self._make = make
        self._slabs = [(slab, slab.start * slice_voxels, slab.stop * slice_voxels) for slab in slabs]
        self._following = 0
        self._begin = self._end = 0
        self._held: list[Tensor] = []

    def __call__(self, where: slice) -> Tensor:
        if not self._begin <= where.start <= self._end:
            self._start_over(where.start)
        while self._end < where.stop:
            slab, _, self._end = self._slabs[self._following]
            self._held.append(self._make(slab).flatten(1))
            self._following += 1
        held = self._held[0] if len(self._held) == 1 else torch.cat(self._held, dim=1)
        offset, self._begin = where.start - self._begin, where.start
        self._held = [held[:, offset:]]
        return held[:, offset : where.stop - where.start + offset]

    def _start_over(self, voxel: int) -> None:
        self._following, begin = next((k, begin) for k, (_, begin, end) in enumerate(self._slabs) if voxel < end)
        self._begin = self._end = begin
        self._held = []
