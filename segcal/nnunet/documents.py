"""The JSON files nnU-Net leaves: what plans.json, splits_final.json and postprocessing.json say that segcal needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import FileFormatError
from segcal.io.zip_reader import opened

_LIMIT_BYTES = 256 * 2**20
_LARGEST = "remove_all_but_largest_component_from_segmentation"


@dataclass(frozen=True, slots=True)
class Plans:
    """What plans.json says about the order of axes.

    Attributes:
        transpose_backward: axis i of the image is axis transpose_backward[i] of the properties in `<case>.pkl`.
        reader: name of the class that read the images.
    """

    transpose_backward: tuple[int, int, int]
    reader: str

    @property
    def reorients(self) -> bool:
        """Whether saved probabilities lie in RAS order, and the segmentation in that of the image file."""
        return self.reader.endswith("WithReorient")


@dataclass(frozen=True, slots=True)
class FoldSplit:
    """Case ids a fold was trained on and those it was validated on."""

    train: frozenset[str]
    val: frozenset[str]


def read_plans(path: Path) -> Plans:
    """Read nnU-Net's plans.json; no class it names is imported."""
    content = _read_json(path, "plans.json")
    order = content.get("transpose_backward") if isinstance(content, dict) else None
    if not isinstance(order, list) or sorted(str(axis) for axis in order) != ["0", "1", "2"]:
        raise FileFormatError(f"{path}: transpose_backward is {order!r}; expected the axes 0, 1, 2 in some order.")
    backward = (int(order[0]), int(order[1]), int(order[2]))
    return Plans(backward, str(content.get("image_reader_writer", "")))


def read_splits(path: Path) -> list[FoldSplit]:
    """Read splits_final.json: one entry per fold."""
    content = _read_json(path, "splits_final.json")
    try:
        return [FoldSplit(_ids(fold["train"]), _ids(fold["val"])) for fold in content]
    except (KeyError, TypeError) as error:
        raise FileFormatError(
            f"{path}: expected nnU-Net's splits_final.json, a list with `train` and `val` case ids per fold "
            f"({type(error).__name__}: {error})."
        ) from error


def read_postprocessing(path: Path) -> list[frozenset[int]]:
    """Read postprocessing.json: per step the labels whose union keeps only its largest component.

    nnU-Net writes regions as lists, which JSON cannot tell from lists of labels; both mean the union of the labels.
    """
    if path.suffix == ".pkl":
        raise FileFormatError(
            f"{path}: a pickle can run any program and is not opened; give the postprocessing.json beside it."
        )
    content = _read_json(path, "postprocessing.json")
    names = content.get("postprocessing_fns") if isinstance(content, dict) else None
    options = content.get("postprocessing_kwargs") if isinstance(content, dict) else None
    if not isinstance(names, list) or not isinstance(options, list) or len(names) != len(options):
        raise FileFormatError(
            f"{path}: expected nnU-Net's postprocessing.json with postprocessing_fns and postprocessing_kwargs."
        )
    return [_step(path, name, option) for name, option in zip(names, options, strict=True)]


def _step(path: Path, name: object, options: object) -> frozenset[int]:
    if name != _LARGEST:
        raise FileFormatError(f"{path}: names the function {name!r}; known is {_LARGEST} only.")
    if not isinstance(options, dict) or set(options) - {"labels_or_regions", "background_label"}:
        raise FileFormatError(f"{path}: the options of {_LARGEST} are {options!r}; expected labels_or_regions.")
    if options.get("background_label", 0) != 0:
        raise FileFormatError(f"{path}: background_label is {options['background_label']!r}; expected 0.")
    labels = list(_flat(options.get("labels_or_regions")))
    if not labels or not all(isinstance(value, int) and not isinstance(value, bool) for value in labels):
        raise FileFormatError(f"{path}: labels_or_regions is {options.get('labels_or_regions')!r}; expected labels.")
    return frozenset(labels)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _ids(names: Any) -> frozenset[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{type(names).__name__} instead of a list of case ids")
    return frozenset(names)


def _read_json(path: Path, what: str) -> Any:
    with opened(path) as file:
        text = file.read(_LIMIT_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not valid JSON ({error}); expected nnU-Net's {what}.") from error
