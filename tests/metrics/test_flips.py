"""Flip rate and its audit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.metrics import reference
from tests.metrics.cases import CASES, Case, draw_case, measure, small_cases

COLUMNS = ("", "_harmful", "_beneficial", "_neutral")


def check(probs: np.ndarray, labels: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    decision, deployed = rng.integers(0, len(probs), (2, *labels.shape))
    values = measure(probs, labels, decision=decision, deployed=deployed).values
    for name, before in (("flip", decision), ("flip_deployed", deployed)):
        expected = reference.flips(probs, labels, before)
        assert [values[name + column] for column in COLUMNS] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", sorted(CASES))
def test_flips_agree_with_the_explicit_loop(name: str) -> None:
    check(*CASES[name](), seed=1)


@given(small_cases(), st.integers(0, 99))
def test_flips_agree_on_cases_full_of_coincidences(case: Case, seed: int) -> None:
    check(*case, seed=seed)


def test_an_unchanged_decision_has_no_flips_even_on_ties() -> None:
    probs, labels = CASES["ties"]()
    values = measure(probs, labels, decision=probs.argmax(axis=0)).values
    assert [values["flip" + column] for column in COLUMNS] == [0, 0, 0, 0]


def test_flips_of_ignored_voxels_do_not_count() -> None:
    probs, labels = draw_case(3, (4, 5, 6), 3)
    decision = probs.argmax(axis=0)
    changed = np.zeros(labels.shape, dtype=bool)
    changed[0, :2] = True
    decision[changed] = (decision[changed] + 1) % 3
    labels[changed] = -1
    assert measure(probs, labels, decision=decision).values["flip"] == 0


def test_without_a_reference_flips_are_undefined_and_say_why() -> None:
    result = measure(*draw_case(3, (4, 5, 6), 3))
    assert math.isnan(result.values["flip"])
    assert "pooled" in result.undefined["flip"]
    assert "deployed" in result.undefined["flip_deployed"]


@pytest.mark.parametrize("ignored", [-256, -1, 3, 255, 256, 1000])
def test_a_deployed_value_that_is_no_class_is_a_flip_whatever_it_becomes_in_a_byte(ignored: int) -> None:
    probs, labels = draw_case(3, (4, 5, 6), 3)
    deployed = probs.argmax(axis=0)
    deployed[deployed == 0] = ignored
    expected = reference.flips(probs, labels, deployed)
    values = measure(probs, labels, deployed=deployed).values
    assert expected[0] > 0
    assert [values["flip_deployed" + column] for column in COLUMNS] == pytest.approx(expected, abs=1e-9)
