"""Shifted data of a study: whether its calibrators belong to them, and which of their cases are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS
from segcal.compatibility import check_compatible
from segcal.errors import DataError, MismatchError, UsageError
from segcal.evaluation.plan import FitTask, first_members
from segcal.fitted import is_translation_invariant
from segcal.manifest import Manifest, Split
from segcal.scan_folders import in_words


@dataclass(frozen=True, slots=True)
class ShiftedData:
    """What the calibrators of a study are measured on besides its own test cases.

    Attributes:
        manifest: the data.
        ids: by repeat, the cases that are measured.
        warnings: what the numbers do not say themselves.
    """

    manifest: Manifest
    ids: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]


def shifted_data(
    shifted: Manifest, manifest: Manifest, splits: Sequence[Split], tasks: Sequence[FitTask]
) -> ShiftedData:
    """Check shifted data against the plan of a study, before anything is fitted.

    Where they share names with the study's manifest they are taken for the same cases, so that no case is measured by
    a calibrator that was fitted on it; data that share none are measured whole in every repeat.

    Args:
        shifted: other data.
        manifest: of the study.
        splits: its repeats.
        tasks: the fits of one repeat, which are alike in all of them.

    Raises:
        MismatchError: kind, classes or regions differ, as `segcal evaluate` would say.
        UsageError: fewer members than a sensitivity asks for.
        DataError: a repeat has nothing to measure.
    """
    warnings = [text for task in tasks for text in _differences(shifted, task)]
    ids = _measured_ids(shifted, manifest, splits)
    for repeat, (measured, split) in enumerate(zip(ids, splits, strict=True), start=1):
        lacking = sorted(set(split.test).difference(measured))
        if set(measured) < set(split.test):
            warnings.append(
                f"repeat {repeat}: measured on {len(measured)} of its {len(split.test)} test cases; the shifted data "
                f"{shifted.name!r} have no label of {in_words(lacking)}"
            )
    return ShiftedData(shifted, ids, tuple(dict.fromkeys(warnings)))


def _measured_ids(shifted: Manifest, manifest: Manifest, splits: Sequence[Split]) -> tuple[tuple[str, ...], ...]:
    labelled = sorted(case.id for case in shifted.labelled_cases)
    if not labelled:
        raise DataError(f"shifted data {shifted.name!r}: no case has a label; add `label: <file>` to its cases")
    if {case.id for case in shifted.cases}.isdisjoint(case.id for case in manifest.cases):
        return (tuple(labelled),) * len(splits)
    ids = tuple(tuple(sorted(set(split.test).intersection(labelled))) for split in splits)
    if () in ids:
        nothing = ids.index(())
        raise DataError(
            f"shifted data {shifted.name!r}: share names with the study's cases, but have no labelled case of the test "
            f"cases of repeat {nothing + 1} ({in_words(splits[nothing].test)}). Add one, or give the cases other names "
            "if they are others"
        )
    return ids


def _differences(shifted: Manifest, task: FitTask) -> Iterator[str]:
    """What `segcal evaluate` would say of the calibrators of a task on these data."""
    if task.n_members is not None and task.n_members > shifted.n_members:
        raise UsageError(
            f"member_counts: {task.n_members} is more than the {shifted.n_members} members of the shifted data "
            f"{shifted.name!r}"
        )
    data = shifted if task.n_members is None else first_members(shifted, task.n_members)
    for method in task.methods:
        try:
            yield from check_compatible(_expected(task, method), data, task.pooling, force=False)
        except MismatchError as error:
            raise MismatchError(f"shifted data {shifted.name!r}: {error}") from None


def _expected(task: FitTask, method: str) -> CalibratorInfo:
    """What a calibrator will say of itself, as far as it is known before the fit."""
    data, how = task.manifest, task.manifest.prediction
    return CalibratorInfo(
        method=method,
        classes=data.class_names,
        regions=data.has_regions,
        pooling=task.pooling,
        kind=data.kind,
        n_members=data.n_members,
        translation_invariant=is_translation_invariant(method, task.pooling, regions=data.has_regions),
        preserves=CALIBRATORS[method].preserves,
        prediction=None if how is None else how.model_dump(mode="json", exclude_none=True),
    )
