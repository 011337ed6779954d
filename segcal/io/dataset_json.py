"""What nnU-Net's dataset.json says about the channels of a model: classes, or regions with their painting order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import FileFormatError, MissingFileError

_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DatasetLabels:
    """Channels of a model: `classes` for softmax models, `regions` with `regions_class_order` for sigmoid ones.

    Attributes:
        classes: Class names; the position is the label value and the channel.
        regions: (name, label values) of each channel.
        regions_class_order: Label value each region paints, later ones over earlier ones.
        ignore_label: Label value of voxels that never count.
    """

    classes: tuple[str, ...] | None = None
    regions: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    regions_class_order: tuple[int, ...] | None = None
    ignore_label: int | None = None

    @property
    def n_channels(self) -> int:
        """Number of channels the network puts out."""
        return len(self.classes or self.regions or ())


def read_dataset_json(path: Path) -> DatasetLabels:
    """Read the channels from an nnU-Net v2 dataset.json (or the older form that maps numbers to names).

    A model has regions when any label is a list of several values; then every entry but background and `ignore`
    is a channel, in the order of the file. Otherwise channel i is label value i.
    """
    content = _read_json(path)
    labels = content.get("labels")
    if not isinstance(labels, dict) or not labels:
        raise FileFormatError(f"{path}: has no `labels`; expected nnU-Net's dataset.json with name: value pairs.")
    named = {name: _values(path, name, value) for name, value in _name_first(labels).items()}
    ignore = named.pop("ignore", None)
    if ignore is not None and len(ignore) != 1:
        raise FileFormatError(f"{path}: the label `ignore` is {list(ignore)}; expected a single value.")
    ignore_label = None if ignore is None else ignore[0]
    if any(len(values) > 1 for values in named.values()):
        regions = tuple((name, values) for name, values in named.items() if set(values) != {0})
        order = _class_order(path, content.get("regions_class_order"), len(regions))
        return DatasetLabels(regions=regions, regions_class_order=order, ignore_label=ignore_label)
    by_value = {values[0]: name for name, values in named.items()}
    if sorted(by_value) != list(range(len(named))):
        raise FileFormatError(
            f"{path}: the label values are {sorted(v[0] for v in named.values())}; "
            f"expected 0..{len(named) - 1}, each once, because a channel is found by its label value."
        )
    return DatasetLabels(classes=tuple(by_value[k] for k in range(len(named))), ignore_label=ignore_label)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            content = json.loads(stream.read(_LIMIT_BYTES))
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no such file; check the path of dataset.json.") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not valid JSON ({error}); expected nnU-Net's dataset.json.") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path}: holds no JSON object; expected nnU-Net's dataset.json.")
    return content


def _name_first(labels: dict[str, Any]) -> dict[str, Any]:
    """`{"0": "background"}`, the form of nnU-Net v1 and the Decathlon, turned round."""
    if all(isinstance(value, str) and key.isdigit() for key, value in labels.items()):
        return {value: int(key) for key, value in labels.items()}
    return labels


def _values(path: Path, name: str, value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise FileFormatError(f"{path}: the label {name!r} is {value!r}; expected a whole number or a list of them.")
    return tuple(values)


def _class_order(path: Path, order: object, n_regions: int) -> tuple[int, ...]:
    if (
        not isinstance(order, list)
        or len(order) != n_regions
        or not all(isinstance(value, int) and not isinstance(value, bool) for value in order)
    ):
        raise FileFormatError(
            f"{path}: regions_class_order is {order!r}; expected a list of {n_regions} label values, one per region."
        )
    return tuple(order)
