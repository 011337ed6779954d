"""A manifest from folders: cases are found by file name, channels in nnU-Net's dataset.json or the first member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import FileFormatError, ManifestError
from segcal.io.dataset_json import DatasetLabels, read_dataset_json
from segcal.io.members import read_member_header
from segcal.io.nifti import is_nifti, read_nifti_header
from segcal.manifest import Manifest
from segcal.scan_folders import find_images, find_labels, find_members, in_words, relative_to
from segcal.types import Kind


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The manifest that was found, not yet on disk, and one sentence for everything that found no partner.

    Attributes:
        manifest: Its paths are relative to the folder of the file it is meant for.
        unmatched: What was left out, and what is missing.
        source: Where the class names come from.
    """

    manifest: Manifest
    unmatched: tuple[str, ...]
    source: str


def scan(
    members: Sequence[Path],
    *,
    kind: Kind,
    out: Path,
    labels: Path | None = None,
    images: Path | None = None,
    deployed: Path | None = None,
    dataset_json: Path | None = None,
    classes: Sequence[str] | None = None,
    name: str | None = None,
    axes: str = "czyx",
) -> ScanResult:
    """Match the files of member folders, labels, images and deployed segmentations by case id.

    A case id is the file name without its ending; image names also lose nnU-Net's channel number (`_0000`). A case
    is taken when every member folder has it.

    Args:
        members: One folder per ensemble member; the order is kept.
        kind: What the member files hold; an .npz with the other key is refused.
        out: Where the manifest will lie; its paths are relative to that folder. Nothing is written here.
        dataset_json: Says the classes; otherwise it is looked for beside members and labels.
        classes: Names of the channels, when there is no dataset.json.
        axes: Order of the axes in .npz members.

    Raises:
        ManifestError: No case is in all member folders, a folder matches nothing, channels do not fit the classes.
    """
    found = [find_members(folder) for folder in members]
    if not found:
        raise ManifestError("no member folder was given; name one --member folder per member of the ensemble")
    ids, unmatched = _common_cases(members, found)
    partners: dict[str, Mapping[str, Path]] = {}
    for key, folder, files in (
        ("label", labels, {} if labels is None else find_labels(labels)),
        ("image", images, {} if images is None else find_images(images, ids)),
        ("deployed", deployed, {} if deployed is None else find_labels(deployed)),
    ):
        if folder is not None:
            partners[key] = files
            unmatched += _unpartnered(key, folder, files, ids, {case_id for files in found for case_id in files})
    first, n_channels = _first_readable([found[0][case_id] for case_id in ids], kind, axes)
    channels, source = _channels(members, labels, dataset_json, classes, n_channels, first)
    content: dict[str, Any] = {
        "version": 1,
        "name": name or out.parent.resolve().name or "dataset",
        "kind": kind,
        "axes": axes,
        **channels,
        "cases": [_case(case_id, found, partners, out.absolute().parent) for case_id in ids],
    }
    return ScanResult(Manifest.from_content(content, out), tuple(unmatched), source)


def _common_cases(folders: Sequence[Path], found: Sequence[Mapping[str, Path]]) -> tuple[list[str], list[str]]:
    common = sorted(set.intersection(*(set(files) for files in found)))
    if not common:
        seen = "; ".join(
            f"{folder}: {in_words(sorted(files), 3)}" for folder, files in zip(folders, found, strict=True)
        )
        raise ManifestError(
            f"no case is in all {len(folders)} member folders ({seen}); "
            "files of one case must have the same name in every folder"
        )
    everything = set.union(*(set(files) for files in found))
    notes = []
    for folder, files in zip(folders, found, strict=True):
        lacking = sorted(everything - set(files))
        if lacking:
            notes.append(f"left out, no file in {folder}: {in_words(lacking)}")
    return common, notes


def _unpartnered(
    key: str, folder: Path, files: Mapping[str, Path], ids: Sequence[str], predicted: set[str]
) -> list[str]:
    without = [case_id for case_id in ids if case_id not in files]
    if len(without) == len(ids):
        raise ManifestError(
            f"{folder}: no {key} file belongs to a case (it has {in_words(sorted(files), 3)}; the cases are "
            f"{in_words(ids, 3)}); file names must be the case id plus an ending such as .nii.gz"
        )
    notes = [f"no {key} in {folder}: {in_words(without)}"] if without else []
    # What an image folder holds beyond the cases is of no interest: images are only for pictures.
    alone = [] if key == "image" else sorted(set(files) - predicted)
    return notes + ([f"{key} without members in {folder}: {in_words(alone)}"] if alone else [])


def _first_readable(files: Sequence[Path], kind: Kind, axes: str) -> tuple[Path, int]:
    """A file and its number of channels; a damaged one is the business of whoever reads that case."""
    failed: FileFormatError | None = None
    for path in files:
        try:
            return path, _n_channels(path, kind, axes)
        except FileFormatError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _n_channels(first: Path, kind: Kind, axes: str) -> int:
    if is_nifti(first) and len(read_nifti_header(first).shape) == 3:
        raise ManifestError(
            f"{first}: a 3-D NIfTI is a segmentation, not a member's {kind}. Let nnU-Net save probabilities "
            "(`nnUNetv2_predict --save_probabilities`), or export logits with `segcal nnunet export`"
        )
    return read_member_header(first, kind=kind, axes=axes).shape[0]


def _channels(
    members: Sequence[Path],
    labels: Path | None,
    dataset_json: Path | None,
    classes: Sequence[str] | None,
    n_channels: int,
    first: Path,
) -> tuple[dict[str, Any], str]:
    """Manifest fields that name the channels, and where they come from."""
    if classes is not None and dataset_json is not None:
        raise ManifestError("class names were given and a dataset.json too; give one of them")
    path = None if classes is not None else dataset_json or _find_dataset_json(members, labels)
    if path is not None:
        described, source = read_dataset_json(path), f"from {path}"
    elif classes is not None:
        described, source = DatasetLabels(classes=tuple(classes)), "as given"
    else:
        described = DatasetLabels(classes=tuple(f"class_{k}" for k in range(n_channels)))
        source = "numbered, because no dataset.json was found"
    if described.n_channels != n_channels:
        raise ManifestError(
            f"{first}: has {n_channels} channels, but there are {described.n_channels} names "
            f"({in_words(described.classes or [name for name, _ in described.regions or ()])}; {source}). "
            "Give the dataset.json of the model that made these predictions"
        )
    return _channel_fields(described), source


def _channel_fields(described: DatasetLabels) -> dict[str, Any]:
    fields: dict[str, Any] = {"ignore_label": described.ignore_label}
    if described.regions is None:
        return fields | {"classes": described.classes}
    regions = [{"name": name, "labels": values} for name, values in described.regions]
    return fields | {"regions": regions, "regions_class_order": described.regions_class_order}


def _find_dataset_json(members: Sequence[Path], labels: Path | None) -> Path | None:
    """In a member's folder, its parent or the labels' parent; members of different models are refused."""
    own = [path for folder in members if (path := folder / "dataset.json").is_file()]
    described = [read_dataset_json(path) for path in own]
    for path, other in zip(own, described, strict=True):
        if other != described[0]:
            raise ManifestError(
                f"{own[0]} and {path} describe different labels; members of one ensemble share their classes. "
                "Check the folders, or say which one is right with --dataset-json"
            )
    around = [folder.absolute().parent for folder in members] + ([labels.absolute().parent] if labels else [])
    return next(iter([*own, *(path for folder in around if (path := folder / "dataset.json").is_file())]), None)


def _case(
    case_id: str, found: Sequence[Mapping[str, Path]], partners: Mapping[str, Mapping[str, Path]], root: Path
) -> dict[str, Any]:
    case: dict[str, Any] = {"id": case_id, "members": [relative_to(root, files[case_id]) for files in found]}
    for key, files in partners.items():
        if case_id in files:
            case[key] = relative_to(root, files[case_id])
    return case
