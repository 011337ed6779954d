"""Splits are reproducible, independent of the order of cases, exact in size, and never tear a subject apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segcal.errors import ManifestError, UsageError
from segcal.manifest import Manifest, Split
from segcal.splits import draw_partitions, draw_split


def manifest_of(subject_sizes: list[int], *, unlabelled: int = 0, reverse: bool = False) -> Manifest:
    """Subject i has subject_sizes[i] cases; a size of 1 leaves the subject unnamed."""
    cases: list[dict[str, Any]] = []
    for s, size in enumerate(subject_sizes):
        for k in range(size):
            case = {"id": f"s{s}_{k}", "members": [f"s{s}_{k}.npz"], "label": f"s{s}_{k}.nii"}
            cases.append(case | ({"subject": f"p{s}"} if size > 1 else {}))
    cases += [{"id": f"u{k}", "members": [f"u{k}.npz"]} for k in range(unlabelled)]
    whole = {"version": 1, "name": "drawn", "kind": "logits", "classes": ["a", "b"]}
    return Manifest.from_content(whole | {"cases": cases[::-1] if reverse else cases}, "m.yaml")


def subjects(manifest: Manifest, ids: tuple[str, ...]) -> set[str]:
    return {manifest.case(case_id).subject_key for case_id in ids}


def assert_sound(manifest: Manifest, split: Split) -> None:
    subsets = [split.calibration, split.validation, split.test]
    ids = [case_id for subset in subsets for case_id in subset]
    assert len(ids) == len(set(ids))
    assert set(ids) <= {case.id for case in manifest.labelled_cases}
    seen = [subject for subset in subsets for subject in subjects(manifest, subset)]
    assert max(Counter(seen).values()) == 1


sizes = st.lists(st.integers(1, 4), min_size=2, max_size=12)


@given(sizes=sizes, seed=st.integers(0, 2**40), share=st.floats(0.01, 0.99))
def test_a_drawn_split_covers_all_labelled_cases_by_subject(sizes: list[int], seed: int, share: float) -> None:
    manifest = manifest_of(sizes, unlabelled=2)

    split = draw_split(manifest, seed=seed, validation_share=share)

    assert_sound(manifest, split)
    assert len(split.calibration) + len(split.validation) == sum(sizes)
    n_validation = len(subjects(manifest, split.validation))
    assert 1 <= n_validation <= len(sizes) - 1
    assert abs(n_validation - share * len(sizes)) <= 1


@given(sizes=sizes, seed=st.integers(0, 2**40))
def test_the_order_of_cases_does_not_matter(sizes: list[int], seed: int) -> None:
    forward, backward = manifest_of(sizes), manifest_of(sizes, reverse=True)

    assert draw_split(forward, seed=seed) == draw_split(backward, seed=seed)


def test_seeds_give_different_splits_and_the_same_seed_the_same() -> None:
    manifest = manifest_of([1] * 30)

    drawn = {draw_split(manifest, seed=seed).validation for seed in range(20)}

    assert len(drawn) == 20
    assert draw_split(manifest, seed=3) == draw_split(manifest, seed=3)


def test_a_known_split_never_changes() -> None:
    """Results are reproduced from the seed, on every machine and with every later segcal."""
    assert draw_split(manifest_of([1] * 6), seed=0, validation_share=0.34).validation == ("s0_0", "s2_0")


def test_every_subject_is_drawn_about_equally_often() -> None:
    manifest = manifest_of([1] * 8)
    n_draws = 2000

    counts = Counter(case_id for seed in range(n_draws) for case_id in draw_split(manifest, seed=seed).validation)

    expected, deviation = n_draws / 4, (n_draws * 0.25 * 0.75) ** 0.5
    assert all(abs(counts[case.id] - expected) < 4.5 * deviation for case in manifest.cases)


@pytest.mark.parametrize(("sizes", "unlabelled"), [([1], 0), ([4], 0), ([1], 5)])
def test_one_labelled_subject_is_too_few(sizes: list[int], unlabelled: int) -> None:
    with pytest.raises(ManifestError, match="has one labelled subject"):
        draw_split(manifest_of(sizes, unlabelled=unlabelled), seed=0)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="validation_share"):
        draw_split(manifest_of([1, 1]), seed=0, validation_share=share)


def test_a_subject_named_like_a_case_is_not_that_case() -> None:
    """Case `a` has no subject; case `b` belongs to a subject called `a`: two subjects, so they can be split."""
    cases = [
        {"id": "a", "members": ["a.npz"], "label": "a.nii"},
        {"id": "b", "members": ["b.npz"], "label": "b.nii", "subject": "a"},
    ]
    whole = {"version": 1, "name": "x", "kind": "logits", "classes": ["a", "b"], "cases": cases}

    split = draw_split(Manifest.from_content(whole, "m.yaml"), seed=0)

    assert {*split.calibration, *split.validation} == {"a", "b"}


@given(sizes=st.lists(st.integers(1, 3), min_size=10, max_size=20), seed=st.integers(0, 2**40))
def test_partitions_have_exactly_the_wanted_sizes(sizes: list[int], seed: int) -> None:
    manifest = manifest_of([*sizes, 1, 1, 1], unlabelled=1)

    partitions = draw_partitions(manifest, seed=seed, n_repeats=3, n_calibration=4, n_validation=3)

    assert len(partitions) == 3
    for split in partitions:
        assert_sound(manifest, split)
        assert (len(split.calibration), len(split.validation)) == (4, 3)
        assert len(split.test) == sum(sizes) + 3 - 7


def test_the_papers_sizes_are_drawn_for_the_real_number_of_cases() -> None:
    manifest = manifest_of([1] * 271)

    partitions = draw_partitions(manifest, seed=0, n_repeats=3, n_calibration=50, n_validation=27, n_test=194)

    assert [(len(p.calibration), len(p.validation), len(p.test)) for p in partitions] == [(50, 27, 194)] * 3
    assert len({p.test for p in partitions}) == 3


def test_the_test_cases_do_not_depend_on_the_calibration_size() -> None:
    manifest = manifest_of([1] * 40)

    drawn = [
        draw_partitions(manifest, seed=1, n_repeats=2, n_calibration=n, n_validation=5, n_test=15) for n in (5, 10, 20)
    ]

    for repeat in range(2):
        assert len({partitions[repeat].test for partitions in drawn}) == 1
        assert set(drawn[0][repeat].calibration) < set(drawn[1][repeat].calibration) < set(drawn[2][repeat].calibration)


def test_exact_sizes_are_found_when_the_first_order_has_none() -> None:
    """Test cases made up from the two subjects of 3 would leave none for the others, so most orders lead nowhere."""
    manifest = manifest_of([3, 3, 2, 2, 2])
    for seed in range(20):
        for split in draw_partitions(manifest, seed=seed, n_repeats=2, n_calibration=3, n_validation=3, n_test=6):
            assert_sound(manifest, split)
            assert (len(split.calibration), len(split.validation), len(split.test)) == (3, 3, 6)


def test_sizes_that_whole_subjects_cannot_make_are_refused() -> None:
    with pytest.raises(ManifestError, match="no partition into whole subjects"):
        draw_partitions(manifest_of([2] * 6), seed=0, n_repeats=1, n_calibration=3, n_validation=2)


def test_too_few_labelled_cases_are_refused_with_the_numbers() -> None:
    manifest = manifest_of([1] * 10, unlabelled=90)
    with pytest.raises(ManifestError, match=r"has 10 labelled cases, but 11 are needed"):
        draw_partitions(manifest, seed=0, n_repeats=1, n_calibration=5, n_validation=5)
    with pytest.raises(ManifestError, match=r"but 12 are needed"):
        draw_partitions(manifest, seed=0, n_repeats=1, n_calibration=5, n_validation=3, n_test=4)


@pytest.mark.parametrize(("repeats", "calibration", "validation", "test"), [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1, 0)])
def test_empty_subsets_are_refused(repeats: int, calibration: int, validation: int, test: int) -> None:
    with pytest.raises(UsageError, match="at least one"):
        draw_partitions(
            manifest_of([1] * 10),
            seed=0,
            n_repeats=repeats,
            n_calibration=calibration,
            n_validation=validation,
            n_test=test,
        )


def test_no_labelled_case_at_all_is_said_plainly() -> None:
    with pytest.raises(ManifestError, match="has no labelled case; add `label: <file>`"):
        draw_split(manifest_of([], unlabelled=3), seed=0)
