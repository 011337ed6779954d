"""What a study has to fit: the repeats, and in each the pipelines with their sensitivities."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from segcal.errors import UsageError
from segcal.evaluation.pipelines import pipeline_name
from segcal.evaluation.study_settings import StudySettings
from segcal.fitting.described import FitContext, FitOptions
from segcal.manifest import Manifest, Split, draw_partitions
from segcal.types import Pooling

CALIBRATION_SHARE, VALIDATION_SHARE = 0.5, 0.2
"""Sizes of drawn partitions when the settings name none."""


@dataclass(frozen=True, slots=True)
class FitTask:
    """Methods that share one read: same data, same pooling.

    Attributes:
        manifest: the data, with fewer members for the sensitivity to M.
        split: calibration and validation cases.
        pooling: of all its methods.
        methods: to fit.
        n_members: members pooled, None for all.
        n_calibration: calibration cases for the sensitivity to n, None for the study's own.
    """

    manifest: Manifest
    split: Split
    pooling: Pooling
    methods: tuple[str, ...]
    n_members: int | None = None
    n_calibration: int | None = None

    def pipeline_name(self, method: str) -> str:
        """As tables name it: `ts(z)`, `ts(z) M=3`, `ts(z) n=10`."""
        name = pipeline_name(method, self.pooling, self.n_members)
        return name if self.n_calibration is None else f"{name} n={self.n_calibration}"

    @property
    def label(self) -> str:
        """For progress."""
        extra = "" if self.n_members is None else f" M={self.n_members}"
        return f"({self.pooling}{extra}{'' if self.n_calibration is None else f' n={self.n_calibration}'})"


def study_splits(manifest: Manifest, settings: StudySettings) -> tuple[Split, ...]:
    """The repeats: the manifest's splits, or partitions drawn from the seed."""
    if manifest.splits:
        without = [k for k, split in enumerate(manifest.splits) if not (split.calibration and split.test)]
        if without:
            raise UsageError(f"manifest {manifest.name!r}: split {without[0]} lacks calibration or test cases")
        return manifest.splits
    n_cases = len(manifest.labelled_cases)
    return draw_partitions(
        manifest,
        seed=settings.seed,
        n_repeats=settings.repeats,
        n_calibration=settings.calibration or max(int(CALIBRATION_SHARE * n_cases), 1),
        n_validation=settings.validation or max(int(VALIDATION_SHARE * n_cases), 1),
        n_test=settings.test,
    )


def plan_fits(manifest: Manifest, settings: StudySettings, split: Split) -> tuple[FitTask, ...]:
    """The fits of one repeat, reads shared where they can be.

    Raises:
        UsageError, MismatchError: one of them is impossible on these data; nothing has been read yet.
    """
    tasks = tuple(_tasks(manifest, settings, split))
    for task in tasks:
        context = FitContext(task.manifest, task.pooling, FitOptions())
        for method in task.methods:
            context.check_kind(method)
    return tasks


def _tasks(manifest: Manifest, settings: StudySettings, split: Split) -> Iterator[FitTask]:
    for pooling in dict.fromkeys(p.pooling for p in settings.pipelines):
        methods = tuple(p.method for p in settings.pipelines if p.pooling == pooling)
        yield FitTask(manifest, split, pooling, methods)
    for count in settings.member_counts:
        if count >= manifest.n_members:
            raise UsageError(f"member_counts: {count} is not fewer than the {manifest.n_members} members there are")
        yield FitTask(first_members(manifest, count), split, "logits", settings.sensitivity_methods, n_members=count)
    for size in settings.calibration_sizes:
        yield FitTask(
            manifest, resized(split, size, settings.seed), "logits", settings.sensitivity_methods, n_calibration=size
        )


def first_members(manifest: Manifest, count: int) -> Manifest:
    """The same data with the first so many members of every case."""
    content = manifest.model_dump(mode="json", exclude_none=True)
    for case in content["cases"]:
        case["members"] = case["members"][:count]
    return Manifest.from_content(content, manifest.path)


def resized(split: Split, n_calibration: int, seed: int) -> Split:
    """The same test cases with another number of calibration cases; the rest of the pool validates (SEG App. F)."""
    pool = sorted([*split.calibration, *split.validation])
    if not 0 < n_calibration < len(pool):
        raise UsageError(
            f"calibration_sizes: {n_calibration} of {len(pool)} cases outside the test set leaves none for validation"
        )
    ordered = sorted(pool, key=lambda case: hashlib.sha256(f"{seed}/size/{case}".encode()).digest())
    return Split(
        calibration=tuple(sorted(ordered[:n_calibration])),
        validation=tuple(sorted(ordered[n_calibration:])),
        test=split.test,
    )
