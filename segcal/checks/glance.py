"""A member that lies otherwise than the first one, seen from a few of its voxels: the mean of all members hides it.

`segcal manifest check` compares all voxels; this costs next to nothing and is for whoever did not run it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.checks.orientation import GOOD_DICE, best_turn
from segcal.checks.value_counts import inside
from segcal.io.members import Member

SIDE = 32
"""Voxels looked at along an axis, at most."""
_FEWEST = 50
"""Foreground voxels from which on an agreement is no chance."""


def glance(member: Member, *, regions: bool) -> Tensor:
    """What a member decides on a grid that neither a flip nor an exchange of equally long axes changes.

    Returns:
        (z, y, x) class index; region models (R, z, y, x) bool; no axis longer than SIDE.
    """
    values = inside(member)
    z, y, x = np.ix_(*map(_places, values.shape[1:]))
    seen = values[:, z, y, x]
    if regions:
        return torch.from_numpy(seen > (0.0 if member.kind == "logits" else 0.5))
    return torch.from_numpy(np.ascontiguousarray(seen)).to(torch.float32).max(dim=0).indices


def odd_member(names: Sequence[str], glances: Sequence[Tensor], *, n_classes: int) -> str:
    """In words, the first of the members that agrees with member 0 far better when it is turned; empty if none does."""
    for name, other in zip(names[1:], glances[1:], strict=True):
        if min(int((seen > 0).sum()) for seen in (glances[0], other)) < _FEWEST:
            continue
        best = best_turn(other, glances[0], None, n_classes=n_classes, enough=GOOD_DICE)
        if best is not None and best.is_certain:
            return f"{name} agrees with {names[0]} when it is turned: {best.orientation.words()}"
    return ""


def _places(length: int) -> NDArray[np.intp]:
    """At most SIDE places along an axis, the same from both ends."""
    if length <= SIDE:
        return np.arange(length)
    first = np.arange(SIDE // 2) * (length - 1) // (SIDE - 1)
    return np.concatenate([first, length - 1 - first[::-1]])
