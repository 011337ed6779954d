"""Where nnU-Net predicted: the box of every case, from its `.pkl` or, failing that, from the filling around it.

Outside the box nnU-Net writes a certain background (regions: zeros). That is no prediction: it must be neither
calibrated nor fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segcal.checks.value_counts import box_around_others
from segcal.errors import FileFormatError, SegcalError
from segcal.io.members import read_member, read_member_header
from segcal.nnunet.documents import Plans
from segcal.nnunet.properties import read_properties
from segcal.scan_folders import in_words
from segcal.types import Box

_NO_FILE = "there is no .pkl beside the probabilities"
_AN_ARRAY = "the .pkl holds an array (a fault of nnUNetv2_ensemble before nnU-Net 2.8)"
_NO_PLANS = "there is no plans.json to say the order of axes in the .pkl"


@dataclass
class Crops:
    """The boxes of a folder.

    Attributes:
        boxes: by case id, (z, y, x) in the order of the saved array; cases predicted as a whole are not in it.
        guessed: why the filling had to be looked at, with the cases.
        failed: cases whose properties cannot be read, with the message; only when they may be left out.
        with_properties: cases whose .pkl was read and holds properties and nothing else.
    """

    boxes: dict[str, Box] = field(default_factory=dict)
    guessed: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    with_properties: set[str] = field(default_factory=set)

    @property
    def notes(self) -> list[str]:
        """One sentence for every reason to look at the filling."""
        return [
            f"{in_words(ids)}: {reason}; the box the network predicted in was taken from the probabilities "
            "(what is exactly certain background at the border is left as it is)"
            for reason, ids in self.guessed.items()
        ]


def find_crops(files: Mapping[str, Path], plans: Plans | None, *, regions: bool, keep_going: bool = False) -> Crops:
    """Find the box of every case.

    Args:
        files: the `.npz` of every case.
        plans: of the model; without them only the filling can tell.
        regions: whether the channels are regions, which are filled with zeros.
        keep_going: note a case that cannot be read instead of stopping.
    """
    crops = Crops()
    for case_id, path in files.items():
        try:
            box, reason, has_properties = _case_crop(path, plans, regions=regions)
        except SegcalError as error:
            if not keep_going:
                raise
            crops.failed[case_id] = str(error)
            continue
        if box is not None:
            crops.boxes[case_id] = box
        if reason is not None:
            crops.guessed.setdefault(reason, []).append(case_id)
        if has_properties:
            crops.with_properties.add(case_id)
    return crops


class _Found(NamedTuple):
    """The box, None for everything; why it had to be guessed, None when it was not; whether the .pkl is sound."""

    box: Box | None
    reason: str | None
    has_properties: bool


def _case_crop(path: Path, plans: Plans | None, *, regions: bool) -> _Found:
    header = read_member_header(path, kind="probabilities")
    beside = path.with_suffix(".pkl")
    there = beside.exists()
    properties = read_properties(beside) if there else None
    if header.crop is not None:
        return _Found(header.crop, None, properties is not None)
    if properties is None:
        return _Found(_box_of_filling(path, regions=regions), _AN_ARRAY if there else _NO_FILE, False)
    shape = header.shape[1:]
    if plans is None:
        if sorted(properties.shape) != sorted(shape):
            raise _foreign(beside, properties.shape, path, shape)
        if properties.is_whole:
            return _Found(None, None, True)
        return _Found(_box_of_filling(path, regions=regions), _NO_PLANS, True)
    image = properties.in_image_order(plans.transpose_backward)
    if image.shape != shape:
        raise _foreign(beside, image.shape, path, shape)
    return _Found(None if image.is_whole else image.box, None, True)


def _box_of_filling(path: Path, *, regions: bool) -> Box | None:
    member = read_member(path, kind="probabilities")
    filling = np.zeros(member.values.shape[0])
    if not regions:
        filling[0] = 1
    box = box_around_others(member, filling)
    whole = tuple((0, n) for n in member.values.shape[1:])
    return None if box == whole else box


def _foreign(beside: Path, seen: tuple[int, ...], path: Path, expected: tuple[int, ...]) -> FileFormatError:
    return FileFormatError(
        f"{beside}: describes an image of shape {seen}, {path.name} holds {expected} (z, y, x); the two files, or the "
        "plans.json, belong to different runs. Put the right ones together, or remove the .pkl."
    )
