"""Do the label values mean what the manifest says, and does every class occur somewhere?"""

from __future__ import annotations

from collections.abc import Collection

from segcal.checks.findings import Finding
from segcal.label_values import known_values
from segcal.manifest import Manifest

_SHOWN_VALUES = 8


def label_findings(manifest: Manifest, counts: dict[int, int], *, case: str, file: str) -> list[Finding]:
    """Values nobody knows, and labels without anything to learn from."""
    counted = {value: n for value, n in counts.items() if value != manifest.ignore_label}
    if not counted:
        text = f"every voxel has the ignore_label {manifest.ignore_label}; nothing can be fitted or evaluated here."
        return [Finding("all_ignored", "fatal", case, file, f"{text} Take the case out or correct its label.")]
    found = []
    unknown = sorted(set(counted) - known_values(manifest))
    if unknown:
        found.append(_unknown_values(manifest, unknown, counted, case, file))
    if manifest.regions is not None and not any(counted.get(v) for region in manifest.regions for v in region.labels):
        found.append(Finding("no_foreground", "note", case, file, "no voxel belongs to any region."))
    if manifest.regions is None and set(counted) == {0}:
        found.append(Finding("no_foreground", "note", case, file, f"every voxel is {manifest.class_names[0]!r}."))
    return found


def _unknown_values(manifest: Manifest, unknown: list[int], counts: dict[int, int], case: str, file: str) -> Finding:
    total = sum(counts.values())
    shown = ", ".join(f"{value} ({counts[value] / total:.2%} of the voxels)" for value in unknown[:_SHOWN_VALUES])
    more = f" and {len(unknown) - _SHOWN_VALUES} more values" if len(unknown) > _SHOWN_VALUES else ""
    if manifest.regions is not None:
        text = (
            f"the label values {shown}{more} belong to no region. Add them to the `labels` of their region, or set "
            "`ignore_label` if these voxels must not count."
        )
        return Finding("label_outside_regions", "fatal", case, file, text)
    text = (
        f"the label values {shown}{more} are outside the classes 0..{manifest.n_classes - 1}. Renumber the labels as "
        "the model was trained, or set `ignore_label` if these voxels must not count."
    )
    return Finding("label_outside_classes", "fatal", case, file, text)


def unseen_findings(manifest: Manifest, seen: Collection[int]) -> list[Finding]:
    """Classes or regions that no label of the whole manifest shows: nothing can be learned about them."""
    if manifest.regions is None:
        absent = [f"{name!r} ({k})" for k, name in enumerate(manifest.class_names) if k not in seen]
    else:
        absent = [repr(region.name) for region in manifest.regions if not set(region.labels) & set(seen)]
    if not absent:
        return []
    noun = "class" if manifest.regions is None else "region"
    text = (
        f"no label shows {', '.join(absent)}: no such {noun} can be calibrated or evaluated. "
        "Check the order of the names and the label files, or add cases that show it."
    )
    return [Finding("class_never_seen", "warning", None, None, text)]
