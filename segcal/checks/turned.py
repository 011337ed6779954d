"""The tell-tale of a wrong orientation: a turned prediction that fits the label clearly better than the one on file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.checks.findings import Finding, Severity
from segcal.checks.orientation import BestTurn, Orientation, best_turn
from segcal.label_values import region_masks
from segcal.manifest import Manifest
from segcal.pooling import Pooled, pooled_decision


@dataclass(frozen=True, slots=True)
class Turned:
    """How a prediction would fit best, and the finding when that is not how it lies."""

    best: Orientation
    finding: Finding | None = None


def compare_orientations(
    manifest: Manifest, pooled: Pooled, labels: NDArray[Any], *, case: str, file: str
) -> Turned | None:
    """Report when another order of axes or a flip raises the mean foreground Dice of the pooled decision.

    Args:
        pooled: The ensemble's logits, (class, z, y, x).
        labels: (z, y, x) label values, of the label or of the deployed segmentation.

    Returns:
        None when no order of axes gives the prediction the shape of the labels.
    """
    values = torch.from_numpy(labels.astype(np.int64)).to(pooled.logits.device)
    valid = None if manifest.ignore_label is None else values != manifest.ignore_label
    # Values no class has, which only a check meets, must not become one when they are narrowed.
    truth = region_masks(manifest, values) if manifest.has_regions else values.clamp(-1, manifest.n_classes)
    decision = pooled_decision(pooled.logits, regions=manifest.has_regions)
    best = best_turn(decision, truth, valid, n_classes=manifest.n_classes)
    if best is None or not best.is_clear:
        return None if best is None else Turned(Orientation())
    before = "no fit" if best.as_stored is None else f"{best.as_stored:.3f}"
    text = (
        f"with {best.orientation.words()} the prediction would reach a mean foreground Dice of {best.dice:.3f} "
        f"(as stored: {before}). {_way_out(manifest, best.orientation)}"
    )
    return Turned(best.orientation, Finding("orientation", _severity(best), case, file, text))


def compare_members(
    manifest: Manifest, decision: Tensor, first: Tensor, *, case: str, file: str, first_file: str
) -> list[Finding]:
    """Report a member that agrees with the first one clearly better when it is turned: their mean would hide it.

    Args:
        decision: (z, y, x) class index of the member, region models (R, z, y, x) bool.
        first: The same of the first member.
    """
    best = best_turn(decision, first, None, n_classes=manifest.n_classes)
    if best is None or not best.is_clear:
        return []
    text = (
        f"lies otherwise than {first_file}: with {best.orientation.words()} the two would agree with a mean foreground "
        f"Dice of {best.dice:.3f} instead of {best.as_stored or 0:.3f}. Write all members in one orientation."
    )
    return [Finding("member_orientation", _severity(best), case, file, text)]


def _severity(best: BestTurn) -> Severity:
    return "fatal" if best.is_certain else "warning"


def shared_orientation(manifest: Manifest, compared: Sequence[Orientation]) -> list[Finding]:
    """One case may fit better by chance; most cases that want the same turn are stored in that orientation."""
    if not compared:
        return []
    orientation, n_cases = Counter(compared).most_common(1)[0]
    if orientation.is_identity or n_cases < 2 or 2 * n_cases <= len(compared):
        return []
    text = (
        f"{n_cases} of {len(compared)} cases fit their label clearly better with {orientation.words()}. "
        f"{_way_out(manifest, orientation)}"
    )
    return [Finding("orientation", "fatal", None, None, text)]


def _way_out(manifest: Manifest, orientation: Orientation) -> str:
    if orientation == Orientation((2, 1, 0)) and manifest.axes in ("czyx", "cxyz"):
        other = "cxyz" if manifest.axes == "czyx" else "czyx"
        return f"Set `axes: {other}` in the manifest."
    return (
        "Turn the member arrays to the order of the label file; nnU-Net's readers that end in WithReorient save arrays "
        "in RAS order, not in the file's."
    )
