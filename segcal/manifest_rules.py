"""What the fields of a manifest must say together: each rule names the key, the fault and a way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from segcal.counted import count
from segcal.manifest_models import SUBSETS, ManifestCase, Region, Split


def check_channels(
    classes: Sequence[str] | None,
    regions: Sequence[Region] | None,
    order: Sequence[int] | None,
    ignore_label: int | None,
) -> None:
    """`classes` or `regions`, never both, with unique names and an ignore label that is none of them."""
    if (classes is None) == (regions is None):
        seen = "both `classes` and `regions`" if classes is not None else "neither `classes` nor `regions`"
        raise ValueError(
            f"{seen}; give `classes` for a softmax model, or `regions` with `regions_class_order` "
            "for a region-based (sigmoid) one"
        )
    if classes is not None:
        _check_classes(classes, order, ignore_label)
    if regions is not None:
        _check_regions(regions, order, ignore_label)


def _check_classes(classes: Sequence[str], order: Sequence[int] | None, ignore_label: int | None) -> None:
    if len(classes) < 2:
        raise ValueError(f"classes: {list(classes)} has fewer than two names; list every channel, background first")
    _refuse_repeats("classes", classes)
    if order is not None:
        raise ValueError("regions_class_order belongs to `regions`, and this manifest lists `classes`; take it out")
    if ignore_label is not None and 0 <= ignore_label < len(classes):
        raise ValueError(
            f"ignore_label: {ignore_label} is the class {classes[ignore_label]!r}; "
            f"use a value outside 0..{len(classes) - 1}, or null when no voxel is ignored"
        )


def _check_regions(regions: Sequence[Region], order: Sequence[int] | None, ignore_label: int | None) -> None:
    if not regions:
        raise ValueError("regions: the list is empty; give one entry per channel, in the order of the channels")
    _refuse_repeats("regions", [region.name for region in regions])
    if order is None or len(order) != len(regions):
        seen = "is missing" if order is None else f"has {len(order)} entries"
        raise ValueError(
            f"regions_class_order {seen} but there are {len(regions)} regions; give one label value per region, in the "
            "order in which they are painted (copy it from nnU-Net's dataset.json)"
        )
    for index, region in enumerate(regions):
        _refuse_repeats(f"regions[{index}].labels", [str(value) for value in region.labels])
        if set(region.labels) == {0}:
            raise ValueError(
                f"regions[{index}]: {region.name!r} is the background alone, which has no channel; take it out"
            )
        if ignore_label in region.labels:
            raise ValueError(
                f"ignore_label: {ignore_label} is also one of the labels of regions[{index}] ({region.name!r}); "
                "a voxel cannot be both ignored and part of a region"
            )


def check_cases(cases: Sequence[ManifestCase]) -> None:
    """At least one case, unique ids, the same number of members everywhere."""
    if not cases:
        raise ValueError("cases: the list is empty; add one entry per image (`segcal manifest scan` writes them)")
    _refuse_repeats("cases", [case.id for case in cases], "every id may occur once")
    sizes = Counter(len(case.members) for case in cases)
    if len(sizes) > 1:
        usual = max(sizes, key=lambda size: (sizes[size], size))
        index, odd = next((i, case) for i, case in enumerate(cases) if len(case.members) != usual)
        raise ValueError(
            f"cases[{index}].members: {odd.id} has {count(len(odd.members), 'member')}, {sizes[usual]} of "
            f"{len(cases)} cases have {usual}; every case needs the same members. Add the missing files, "
            "or leave the case out"
        )


def check_member_files(cases: Sequence[ManifestCase]) -> None:
    """No member file stands in two places: that is a slip of the hand which nothing later would notice."""
    first_use: dict[str, str] = {}
    for index, case in enumerate(cases):
        for file in case.members:
            if file in first_use:
                other = first_use[file]
                where = "is listed twice" if other == case.id else f"is also a member of {other}"
                raise ValueError(
                    f"cases[{index}].members: {file!r} {where}; every member of every case is a file of its own. "
                    "Correct the path"
                )
            first_use[file] = case.id


def check_splits(splits: Sequence[Split], cases: Sequence[ManifestCase]) -> None:
    """Every split names labelled cases of the manifest, each at most once, and keeps subjects together."""
    by_id = {case.id: case for case in cases}
    for index, split in enumerate(splits):
        _check_split(f"splits[{index}]", split, by_id)


def _check_split(where: str, split: Split, by_id: dict[str, ManifestCase]) -> None:
    id_place: dict[str, str] = {}
    subject_place: dict[str, tuple[str, str]] = {}
    for subset in SUBSETS:
        for case_id in split.subset(subset):
            case = by_id.get(case_id)
            if case is None:
                raise ValueError(f"{where}.{subset}: there is no case {case_id!r}{nearest(case_id, by_id)}")
            if case.label is None:
                raise ValueError(
                    f"{where}.{subset}: {case_id} has no label, so it can be neither fitted nor evaluated; "
                    "give the case a `label` or take it out of the split"
                )
            if case_id in id_place:
                raise ValueError(
                    f"{where}: {case_id} is in {id_place[case_id]} and again in {subset}; "
                    "a case may be in one subset only, once"
                )
            id_place[case_id] = subset
            other_id, other_subset = subject_place.setdefault(case.subject_key, (case_id, subset))
            if other_subset != subset:
                raise ValueError(
                    f"{where}: subject {case.subject!r} is torn apart: {other_id} is in {other_subset}, {case_id} in "
                    f"{subset}. Put all cases of a subject into one subset, otherwise the evaluation is too kind"
                )
    if not id_place:
        raise ValueError(f"{where}: no case at all; fill calibration, validation or test, or take the split out")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the known name that looks most like `word`, or nothing."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _refuse_repeats(where: str, names: Sequence[str], rule: str = "every name may occur once") -> None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        first, second = [i for i, name in enumerate(names) if name == repeated[0]][:2]
        raise ValueError(f"{where}: {repeated[0]!r} stands at [{first}] and at [{second}]; {rule}")
