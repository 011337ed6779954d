"""Would another order of the axes, or a flip, fit the labels better? All 48 ways to lay one volume on another.

Only voxels predicted as foreground are looked up, so a volume of any size costs about the same: at most a fixed number
of them per channel, drawn with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Mask: TypeAlias = NDArray[np.bool_]
Shape: TypeAlias = tuple[int, int, int]

ORDERS: tuple[tuple[int, int, int], ...] = tuple((a, b, c) for a, b, c in permutations(range(3)))
CLEAR_GAIN = 0.1
"""Gain in mean foreground Dice from which a turned prediction is worth a word."""
CERTAIN_GAIN, CERTAIN_DICE = 0.3, 0.5
"""A gain this large that ends in a Dice this good is no chance."""
GOOD_DICE = 0.7
"""From here on a volume is taken to lie as it should; turned the wrong way round it does not get there."""
_AXES = "zyx"
_MAX_VOXELS = 50_000


@dataclass(frozen=True, slots=True)
class Orientation:
    """One way to turn a volume: axis a of the result is axis order[a] of the input, backwards where flipped[a]."""

    order: tuple[int, int, int] = (0, 1, 2)
    flipped: tuple[bool, bool, bool] = (False, False, False)

    @property
    def is_identity(self) -> bool:
        """Whether nothing moves."""
        return self == Orientation()

    def shape(self, shape: Shape) -> Shape:
        """Shape of a turned volume."""
        a, b, c = self.order
        return shape[a], shape[b], shape[c]

    def words(self) -> str:
        """`axes z, y, x taken as x, y, z and y flipped`, for messages."""
        parts = []
        if self.order != (0, 1, 2):
            parts.append(f"axes z, y, x taken as {', '.join(_AXES[axis] for axis in self.order)}")
        if any(self.flipped):
            flipped = ", ".join(_AXES[axis] for axis in range(3) if self.flipped[axis])
            parts.append(f"{flipped} flipped")
        return " and ".join(parts) or "nothing changed"


@dataclass(frozen=True, slots=True)
class BestTurn:
    """How a prediction fits its labels best.

    Attributes:
        orientation: the best one.
        dice: mean foreground Dice of the prediction turned so.
        as_stored: the same of the prediction as it lies; None where that has not the shape of the labels.
    """

    orientation: Orientation
    dice: float
    as_stored: float | None

    @property
    def gain(self) -> float:
        """What turning adds to the Dice."""
        return self.dice - (self.as_stored or 0.0)

    @property
    def is_clear(self) -> bool:
        """Whether the prediction fits clearly better when turned."""
        return self.gain >= CLEAR_GAIN

    @property
    def is_certain(self) -> bool:
        """Whether that cannot be chance."""
        return self.gain >= CERTAIN_GAIN and self.dice >= CERTAIN_DICE


def best_turn(
    decision: Tensor, truth: Tensor, valid: Tensor | None, *, n_classes: int, enough: float = 1 - CLEAR_GAIN
) -> BestTurn | None:
    """Lay a prediction on its labels in every way that fits and take the one of the largest mean foreground Dice.

    Args:
        decision: (z, y, x) class index; region models: (R, z, y, x) bool. On any device, as the others.
        truth: The same of the label, in its own order of axes; other values than class indices count as no class.
        valid: Voxels of the label that count; None for all.
        n_classes: Background included; without meaning for regions.
        enough: Dice of the prediction as it lies above which nothing else is tried.

    Returns:
        None when no order of axes gives the prediction the shape of the labels.
    """
    orientations = fitting_orientations(_space(decision), _space(truth))
    if not orientations:
        return None
    counted = None if valid is None else valid.cpu().numpy()

    def dice_of(some: list[Orientation]) -> NDArray[np.float64]:
        return orientation_dice(_foreground(decision, truth, n_classes), counted, some)

    as_stored = Orientation()
    now = float(dice_of([as_stored])[0]) if as_stored in orientations else None
    if now is not None and now > enough:
        return BestTurn(as_stored, now, now)
    dice = dice_of(orientations)
    best = int(dice.argmax())
    return BestTurn(orientations[best], float(dice[best]), now)


def _space(values: Tensor) -> Shape:
    z, y, x = values.shape[-3:]
    return z, y, x


def _foreground(decision: Tensor, truth: Tensor, n_classes: int) -> Iterator[tuple[Mask, Mask]]:
    """Predicted and true mask of each channel but the background, one at a time, on the host."""
    if decision.ndim == 4:
        for decided, belongs in zip(decision, truth, strict=True):
            yield decided.cpu().numpy(), belongs.cpu().numpy()
        return
    # Every class is looked for in both; numpy compares short integers six times as fast as torch does.
    predicted, true = (values.to("cpu", torch.int16).numpy() for values in (decision, truth))
    for k in range(1, n_classes):
        yield predicted == k, true == k


def fitting_orientations(shape: Shape, target: Shape) -> list[Orientation]:
    """The orientations that give a volume of `shape` the shape `target`; flips of axes of length 1 are left out."""
    flips = [(False, True) if n > 1 else (False,) for n in target]
    return [
        Orientation(order, (f0, f1, f2))
        for order in ORDERS
        if Orientation(order).shape(shape) == target
        for f0, f1, f2 in product(*flips)
    ]


def orientation_dice(
    channels: Iterable[tuple[Mask, Mask]], valid: Mask | None, orientations: list[Orientation]
) -> NDArray[np.float64]:
    """Mean Dice of the turned prediction against the labels, one number per orientation.

    Args:
        channels: Predicted and true mask of each foreground channel, in the prediction's and the label's shape.
        valid: Voxels of the label that count; None for all.
        orientations: All must give the prediction the label's shape.

    Returns:
        (orientation,) mean over the channels that are predicted or labelled anywhere; 0 when there is none.
    """
    scores = [
        dice
        for predicted, true in channels
        if (dice := _channel_dice(predicted, true, valid, orientations)) is not None
    ]
    return np.mean(scores, axis=0) if scores else np.zeros(len(orientations))


def _channel_dice(
    predicted: Mask, true: Mask, valid: Mask | None, orientations: list[Orientation]
) -> NDArray[np.float64] | None:
    places = np.flatnonzero(predicted)
    n_true = int(np.count_nonzero(true))
    if places.size == 0 and n_true == 0:
        return None
    weight = 1.0
    if places.size > _MAX_VOXELS:
        weight = places.size / _MAX_VOXELS
        places = places[np.random.default_rng(0).integers(0, places.size, _MAX_VOXELS)]
    points = np.unravel_index(places, predicted.shape)
    flat_true, flat_valid = true.ravel(), None if valid is None else valid.ravel()
    dice = np.zeros(len(orientations))
    for i, orientation in enumerate(orientations):
        index = _turned_index(points, orientation, true.shape)
        hits = weight * np.count_nonzero(flat_true[index])
        n_predicted = weight * (index.size if flat_valid is None else np.count_nonzero(flat_valid[index]))
        dice[i] = 2 * hits / max(n_predicted + n_true, 1)
    return dice


def _turned_index(
    points: tuple[NDArray[np.intp], ...], orientation: Orientation, shape: tuple[int, ...]
) -> NDArray[np.intp]:
    """Flat places in the turned volume, of shape `shape`, of points of the original one."""
    index = np.zeros_like(points[0])
    for axis in range(3):
        along = points[orientation.order[axis]]
        index = index * shape[axis] + (shape[axis] - 1 - along if orientation.flipped[axis] else along)
    return index
