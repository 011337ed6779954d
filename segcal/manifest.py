"""The manifest: which files belong to which case, what they hold, and how cases are divided."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import Field, PrivateAttr, StrictInt, ValidationError, field_validator, model_validator

from segcal.errors import ManifestError, UsageError
from segcal.io.atomic import write_text_atomic
from segcal.io.members import Axes
from segcal.manifest_models import ManifestCase, ManifestPart, Name, PredictionInfo, Region, Split
from segcal.manifest_rules import check_cases, check_channels, check_member_files, check_splits, nearest
from segcal.manifest_text import validation_message
from segcal.splits import draw_partitions, draw_split
from segcal.types import Kind
from segcal.yaml_file import read_yaml

__all__ = ["Manifest", "ManifestCase", "PredictionInfo", "Region", "Split", "draw_partitions", "draw_split"]

_EXPECTED = (
    "a mapping that starts with `version: 1`; see data_manifests/ for examples, or let `segcal manifest scan` write one"
)


class Manifest(ManifestPart):
    """A validated, frozen manifest; paths in it are relative to its folder, `root`.

    Attributes:
        kind: What the member files hold, `logits` or `probabilities`.
        axes: Order of the axes in .npz members: `czyx` (nnU-Net's), `cxyz`, or `cyx` for 2-D without a z axis.
        classes: Channel names of a softmax model, background first; label value k means classes[k].
        regions: Channels of a region-based (sigmoid) model, instead of `classes`.
        regions_class_order: Label value each region paints, in painting order (nnU-Net's dataset.json).
        ignore_label: Label value of voxels that never count.
        prediction: How the members were predicted.
        splits: Given partitions of the cases.
    """

    version: Literal[1]
    name: Name
    kind: Kind
    axes: str = "czyx"
    classes: tuple[Name, ...] | None = None
    ignore_label: StrictInt | None = None
    cases: tuple[ManifestCase, ...]
    regions: tuple[Region, ...] | None = None
    regions_class_order: tuple[Annotated[StrictInt, Field(ge=0)], ...] | None = None
    prediction: PredictionInfo | None = None
    splits: tuple[Split, ...] = ()

    _path: Path | None = PrivateAttr(default=None)
    _by_id: dict[str, ManifestCase] = PrivateAttr(default_factory=dict)

    @field_validator("version", mode="before")
    @classmethod
    def _known_version(cls, value: object) -> object:
        if value != 1 or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a version this segcal can read; write `version: 1`")
        return 1

    @field_validator("axes")
    @classmethod
    def _known_axes(cls, value: str) -> str:
        if value not in get_args(Axes):
            raise ValueError(f"{value!r} is none of {', '.join(get_args(Axes))}; nnU-Net writes `czyx`, also in 2-D")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        check_channels(self.classes, self.regions, self.regions_class_order, self.ignore_label)
        check_cases(self.cases)
        check_member_files(self.cases)
        check_splits(self.splits, self.cases)
        self._by_id.update((case.id, case) for case in self.cases)
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read and validate a YAML manifest.

        Raises:
            ManifestError: The text or its content is wrong; the message names the key and a way out.
            MissingFileError: There is no such file.
        """
        path = Path(path)
        return cls.from_content(read_yaml(path, name=str(path), fault=ManifestError, expected=_EXPECTED), path)

    @classmethod
    def from_content(cls, content: Mapping[str, Any], path: str | os.PathLike[str]) -> Manifest:
        """Validate content that lies, or will lie, at `path`: relative paths start in that file's folder."""
        try:
            manifest = cls.model_validate(dict(content))
        except ValidationError as error:
            raise ManifestError(validation_message(path, error, cls)) from error
        manifest._path = Path(path).absolute()
        return manifest

    def save(self, path: str | os.PathLike[str]) -> Manifest:
        """Write the manifest as YAML, whole or not at all, and return it as it lies there.

        In another folder than the one it came from, its relative paths are rewritten to reach the same files.
        """
        target = Path(path).absolute()
        content = self.model_dump(mode="json", exclude_none=True)
        if not self.splits:
            del content["splits"]
        if self._path is not None and self._path.parent != target.parent:
            _move_paths(content["cases"], self._path.parent, target.parent)
        saved = Manifest.from_content(content, target)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        write_text_atomic(target, text)
        return saved

    @property
    def path(self) -> Path:
        """Absolute path of the manifest file."""
        if self._path is None:
            raise ManifestError(
                f"manifest {self.name!r} was made in memory and lies in no folder yet; "
                "save it, or make it with Manifest.from_content(content, path)"
            )
        return self._path

    @property
    def root(self) -> Path:
        """Folder the relative paths start from."""
        return self.path.parent

    def resolve(self, relative: str) -> Path:
        """Where a path of the manifest lies on this machine."""
        return self.root / relative

    @property
    def sha256(self) -> str:
        """Hash of the validated content; its folder, the YAML's formatting and the order of cases do not matter."""
        content = self.model_dump(mode="json", exclude_none=True)
        content["cases"].sort(key=lambda case: str(case["id"]))
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def has_regions(self) -> bool:
        """True for region-based (sigmoid) models."""
        return self.regions is not None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the channels: the classes, or the regions."""
        if self.regions is not None:
            return tuple(region.name for region in self.regions)
        return self.classes or ()

    @property
    def n_classes(self) -> int:
        """Number of channels of a member: classes, or regions."""
        return len(self.class_names)

    @property
    def n_members(self) -> int:
        """Number of ensemble members; the same for every case."""
        return len(self.cases[0].members)

    @property
    def labelled_cases(self) -> tuple[ManifestCase, ...]:
        """The cases that have a label, in the manifest's order."""
        return tuple(case for case in self.cases if case.label is not None)

    def case(self, case_id: str) -> ManifestCase:
        """The case of that id."""
        if case_id not in self._by_id:
            raise UsageError(f"manifest {self.name!r} has no case {case_id!r}{nearest(case_id, self._by_id)}")
        return self._by_id[case_id]

    def split_ids(self, k: int) -> Split:
        """The k-th given split, counted from 0."""
        if not self.splits:
            raise UsageError(
                f"manifest {self.name!r} gives no splits, so there is no split {k}; "
                "leave --split out: `fit` then draws a split from the seed, `evaluate` measures all labelled cases"
            )
        if not 0 <= k < len(self.splits):
            raise UsageError(f"manifest {self.name!r} has the splits 0..{len(self.splits) - 1}, not {k}")
        return self.splits[k]


def _move_paths(cases: list[dict[str, Any]], old: Path, new: Path) -> None:
    # A `..` behind a linked folder leads to the parent of where the link points, so links are followed first.
    old, new = old.resolve(), new.resolve()

    def moved(relative: str) -> str:
        return Path(os.path.relpath(old / relative, new)).as_posix()

    for case in cases:
        case["members"] = [moved(member) for member in case["members"]]
        for key in ("label", "image", "deployed"):
            if key in case:
                case[key] = moved(case[key])
