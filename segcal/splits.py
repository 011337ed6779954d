"""Dividing labelled cases into calibration, validation and test, by subject and reproducibly from a seed.

The order of subjects is the order of sha256(seed, purpose, subject): it depends neither on the order of cases in the
manifest nor on a random number generator's version, and a case added later leaves the order of the others alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from segcal.counted import count
from segcal.errors import ManifestError, UsageError
from segcal.manifest_models import SUBSETS, Split

if TYPE_CHECKING:
    from segcal.manifest import Manifest

_Subject: TypeAlias = tuple[str, ...]  # ids of the cases of one subject

# With several cases a subject an unlucky order can leave no exact fit although one exists; another order may find it.
_MAX_ORDERS = 200


def draw_split(manifest: Manifest, *, seed: int, validation_share: float = 0.25) -> Split:
    """Divide all labelled cases into calibration and validation.

    Args:
        manifest: Cases without a label are left out; cases of one subject stay together.
        seed: The same seed gives the same split, whatever the order of the cases.
        validation_share: Share of the subjects that go to validation; at least one subject on each side.

    Raises:
        ManifestError: Fewer than two labelled subjects.
    """
    if not 0 < validation_share < 1:
        raise UsageError(f"validation_share must lie between 0 and 1, got {validation_share}")
    subjects = _ordered_subjects(manifest, f"{seed}/validation")
    if not subjects:
        raise ManifestError(f"manifest {manifest.name!r} has no labelled case; add `label: <file>` to its cases")
    if len(subjects) < 2:
        raise ManifestError(
            f"manifest {manifest.name!r} has one labelled subject; a split needs at least one for calibration and one "
            "for validation. Add labelled cases, or fix the regulariser (--lambda and --mu) so that nothing is tuned"
        )
    n_validation = min(max(round(validation_share * len(subjects)), 1), len(subjects) - 1)
    return Split(calibration=_ids(subjects[n_validation:]), validation=_ids(subjects[:n_validation]))


def draw_partitions(
    manifest: Manifest, *, seed: int, n_repeats: int, n_calibration: int, n_validation: int, n_test: int | None = None
) -> tuple[Split, ...]:
    """Random partitions of the labelled cases with fixed sizes, as the study protocol asks (METHODS 5).

    Sizes count cases and are met exactly; whole subjects are taken. The test cases are drawn first, so with the same
    seed and `n_test` they stay the same whatever the calibration size.

    Args:
        n_test: None takes all cases that calibration and validation leave.

    Raises:
        ManifestError: Too few labelled cases, or no set of whole subjects has exactly the wanted sizes.
    """
    n_labelled = len(manifest.labelled_cases)
    rest = n_labelled - n_calibration - n_validation
    sizes = {"test": rest if n_test is None else n_test, "validation": n_validation, "calibration": n_calibration}
    asked = ", ".join(f"{name} {sizes[name]}" for name in SUBSETS)
    if n_repeats < 1 or min(n_calibration, n_validation) < 1 or (n_test is not None and n_test < 1):
        raise UsageError(f"a study needs at least one repeat and one case in every subset, got {n_repeats} x ({asked})")
    if rest < 1 or sum(sizes.values()) > n_labelled:
        need = n_calibration + n_validation + (n_test or 1)
        raise ManifestError(
            f"manifest {manifest.name!r} has {count(n_labelled, 'labelled case')}, but {need} are needed "
            f"(calibration {n_calibration}, validation {n_validation}, test {n_test or 'at least 1'}); "
            "ask for smaller subsets or add labelled cases"
        )
    partitions = []
    for repeat in range(n_repeats):
        split = _draw_partition(manifest, f"{seed}/partition/{repeat}", sizes)
        if split is None:
            raise ManifestError(
                f"manifest {manifest.name!r}: no partition into whole subjects has exactly {asked} cases; "
                "change the sizes so that they can be put together from whole subjects"
            )
        partitions.append(split)
    return tuple(partitions)


def _draw_partition(manifest: Manifest, purpose: str, sizes: dict[str, int]) -> Split | None:
    for order in range(_MAX_ORDERS):
        left = _ordered_subjects(manifest, f"{purpose}/{order}")
        drawn: dict[str, tuple[str, ...]] = {}
        for subset, size in sizes.items():
            chosen = _exact_choice(left, size)
            if chosen is None:
                break
            drawn[subset] = _ids([left[i] for i in chosen])
            left = [subject for i, subject in enumerate(left) if i not in chosen]
        else:
            return Split(**drawn)
    return None


def _exact_choice(subjects: Sequence[_Subject], size: int) -> set[int] | None:
    """Indices of the first subjects, in their order, that together have exactly `size` cases; None if none do.

    reachable[i, s] says whether subjects i, i+1, ... can make up s cases; a subject is taken whenever the rest can
    still be met after it.
    """
    n = len(subjects)
    reachable = np.zeros((n + 1, size + 1), dtype=np.bool_)
    reachable[n, 0] = True
    for i in range(n - 1, -1, -1):
        step = len(subjects[i])
        reachable[i] = reachable[i + 1]
        reachable[i, step:] |= reachable[i + 1, : max(size + 1 - step, 0)]
    if not reachable[0, size]:
        return None
    chosen, missing = set(), size
    for i, subject in enumerate(subjects):
        if missing >= len(subject) and reachable[i + 1, missing - len(subject)]:
            chosen.add(i)
            missing -= len(subject)
    return chosen


def _ordered_subjects(manifest: Manifest, purpose: str) -> list[_Subject]:
    ids: dict[str, list[str]] = {}
    for case in manifest.labelled_cases:
        ids.setdefault(case.subject_key, []).append(case.id)
    keys = sorted(ids, key=lambda key: (hashlib.sha256(f"{purpose}\0{key}".encode()).digest(), key))
    return [tuple(ids[key]) for key in keys]


def _ids(subjects: Sequence[_Subject]) -> tuple[str, ...]:
    return tuple(sorted(case_id for subject in subjects for case_id in subject))
