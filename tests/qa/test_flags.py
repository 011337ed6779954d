"""Flags: a number on its threshold is fine, one just beyond it is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from segcal.qa.case import ClassQa, QaCase
from segcal.qa.expectation import ClassSums
from segcal.qa.flags import case_flags
from segcal.qa.members import VolumeSpread
from segcal.qa.settings import QaSettings

SETTINGS = QaSettings()
FINE = QaCase(
    case_id="a",
    classes=(),
    expected_dsc=1.0,
    boundary_confidence=1.0,
    member_dice=1.0,
    disagreement=0.0,
    outlyingness={},
    voxel_ml=None,
)


def codes(**changes: Any) -> list[str]:
    return [flag.code for flag in case_flags(replace(FINE, **changes), SETTINGS)]


@pytest.mark.parametrize(
    ("number", "threshold", "beyond", "code"),
    [
        ("expected_dsc", SETTINGS.min_expected_dsc, -math.inf, "low_expected_dsc"),
        ("boundary_confidence", SETTINGS.min_boundary_confidence, -math.inf, "unsure_boundary"),
        ("member_dice", SETTINGS.min_member_dice, -math.inf, "low_member_dice"),
        ("disagreement", SETTINGS.max_disagreement, math.inf, "members_disagree"),
    ],
)
def test_a_number_on_its_threshold_is_no_flag(number: str, threshold: float, beyond: float, code: str) -> None:
    assert codes(**{number: threshold}) == []
    assert codes(**{number: math.nextafter(threshold, beyond)}) == [code]


@pytest.mark.parametrize(
    ("score", "text"),
    [(0.7, "expected DSC 0.700 < 0.8"), (0.79996, "expected DSC 0.79996 < 0.8"), (0.8 - 1e-9, "0.799999999 < 0.8")],
)
def test_a_number_never_reads_like_the_threshold_it_is_beyond(score: float, text: str) -> None:
    (flag,) = case_flags(replace(FINE, expected_dsc=score), QaSettings(min_expected_dsc=0.8))
    assert text in flag.text


SHARES = st.floats(0, 1)
CLOSE = st.tuples(SHARES, st.floats(1e-17, 1e-2), st.sampled_from([-1, 1])).map(
    lambda drawn: (drawn[0], min(max(drawn[0] + drawn[2] * drawn[1], 0.0), 1.0))
)


@given(st.one_of(CLOSE, st.tuples(SHARES, SHARES)))
@example((0.7996, 0.79955))
@example((0.0904, 0.09046))
@example((0.99999999, 0.9999995))
@example((0.80000004, 0.80000003))
def test_a_flag_is_true_as_it_reads(numbers: tuple[float, float]) -> None:
    limit, score = numbers
    settings = QaSettings(min_expected_dsc=limit, max_disagreement=limit)
    for flag in case_flags(replace(FINE, expected_dsc=score, disagreement=score), settings):
        left, sign, right = flag.text.split()[-3:]
        assert float(right) == limit
        assert float(left) < limit if sign == "<" else float(left) > limit


@pytest.mark.parametrize(("limit", "text"), [(1.0, "0.700 < 1"), (0.75, "0.700 < 0.75"), (0.7996, "0.700 < 0.7996")])
def test_a_limit_reads_as_it_was_set(limit: float, text: str) -> None:
    (flag,) = case_flags(replace(FINE, expected_dsc=0.7), QaSettings(min_expected_dsc=limit))
    assert flag.text == f"expected DSC {text}"


@pytest.mark.parametrize("sign", [1, -1])
def test_outlyingness_counts_on_both_sides(sign: int) -> None:
    limit = SETTINGS.max_outlyingness
    assert limit is not None
    assert codes(outlyingness={"confidence_mean": sign * limit}) == []
    assert codes(outlyingness={"confidence_mean": sign * math.nextafter(limit, math.inf)}) == [
        "unusual_confidence_mean"
    ]


@pytest.mark.parametrize(
    ("sums", "found"),
    [
        (ClassSums(hard=0, expected=10.0, overlap=0.0), []),
        (ClassSums(hard=0, expected=10.001, overlap=0.0), ["missed_class"]),
        (ClassSums(hard=100, expected=100.0, overlap=75.0), []),
        (ClassSums(hard=100, expected=100.0, overlap=74.9), ["low_class_dsc"]),
        (ClassSums(hard=100, expected=115.0, overlap=100.0), []),
        (ClassSums(hard=100, expected=115.1, overlap=100.0), ["volume_gap"]),
        (ClassSums(hard=100, expected=84.9, overlap=84.9), ["volume_gap"]),
    ],
)
def test_volumes_and_classes_have_their_own_thresholds(sums: ClassSums, found: list[str]) -> None:
    assert codes(classes=(ClassQa("k", sums, 1.0, VolumeSpread((100.0, 100.0))),)) == found
