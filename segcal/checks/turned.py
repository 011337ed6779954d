"""The tell-tale of a wrong orientation: a turned prediction that fits the label clearly better than the one on file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.checks.findings import Finding, Severity
from segcal.checks.orientation import Mask, Orientation, fitting_orientations, orientation_dice
from segcal.manifest import Manifest
from segcal.pooling import Pooled

CLEAR_GAIN = 0.1
"""Gain in mean foreground Dice from which a turned prediction is reported."""
CERTAIN_GAIN, CERTAIN_DICE = 0.3, 0.5
"""A gain this large that ends in a Dice this good is no chance: the finding is fatal."""


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
    _, z, y, x = pooled.logits.shape
    orientations = fitting_orientations((z, y, x), (labels.shape[0], labels.shape[1], labels.shape[2]))
    if not orientations:
        return None
    valid = None if manifest.ignore_label is None else labels != manifest.ignore_label
    dice = orientation_dice(_foreground(manifest, pooled, labels), valid, orientations)
    best = int(dice.argmax())
    as_stored = Orientation()
    now = float(dice[orientations.index(as_stored)]) if as_stored in orientations else 0.0
    gain = float(dice[best]) - now
    if gain < CLEAR_GAIN:
        return Turned(as_stored)
    severity: Severity = "fatal" if gain >= CERTAIN_GAIN and dice[best] >= CERTAIN_DICE else "warning"
    before = f"{now:.3f}" if as_stored in orientations else "no fit"
    text = (
        f"with {orientations[best].words()} the prediction would reach a mean foreground Dice of {dice[best]:.3f} "
        f"(as stored: {before}). {_way_out(manifest, orientations[best])}"
    )
    return Turned(orientations[best], Finding("orientation", severity, case, file, text))


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


def _foreground(manifest: Manifest, pooled: Pooled, labels: NDArray[Any]) -> Iterator[tuple[Mask, Mask]]:
    """Predicted and true mask of each channel but the background, one at a time."""
    if manifest.regions is not None:
        for channel, region in enumerate(manifest.regions):
            yield (pooled.logits[channel] > 0).numpy(), np.isin(labels, region.labels)
        return
    decision = pooled.logits.argmax(dim=0).numpy()
    for k in range(1, manifest.n_classes):
        yield decision == k, labels == k
