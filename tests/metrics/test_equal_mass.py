"""Equal-mass ECE from the fine histogram."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segcal.metrics.equal_mass import N_CELLS
from tests.metrics import reference
from tests.metrics.cases import CASES, Case, draw_case, measure, small_cases


def check(probs: np.ndarray, labels: np.ndarray, n_groups: int) -> None:
    values = measure(probs, labels, ece_bins=n_groups).values
    exact = reference.equal_mass_ece(probs, labels, n_groups)
    assert abs(values["equal_mass_ece"] - exact) <= values["equal_mass_ece_bound"] + 1e-9


@pytest.mark.parametrize("n_groups", [1, 2, 15, 50])
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_histogram_is_within_its_stated_bound_of_sorting(name: str, n_groups: int) -> None:
    check(*CASES[name](), n_groups)


@given(small_cases(), st.integers(1, 12))
def test_the_bound_holds_on_cases_full_of_coincidences(case: Case, n_groups: int) -> None:
    check(*case, n_groups)


@given(st.integers(0, 10_000), st.integers(2, 20))
def test_the_bound_holds_when_all_confidences_share_a_few_cells(seed: int, n_groups: int) -> None:
    """The worst the histogram can meet: many different confidences, hits sorted against them, in one or two cells."""
    rng = np.random.default_rng(seed)
    confidence = (0.7 + 0.002 * rng.random((1, 40))).astype(np.float32)
    probs = np.stack([confidence, 1 - confidence])
    labels = np.where(confidence < np.median(confidence), 0, 1) if seed % 2 else rng.integers(0, 2, confidence.shape)
    check(probs, labels.astype(np.int64), n_groups)


def test_saturated_confidences_are_shared_out_exactly() -> None:
    """Most voxels of a segmentation have confidence exactly 1; their groups must not depend on voxel order."""
    rng = np.random.default_rng(0)
    probs = np.stack([np.ones((1, 300)), np.zeros((1, 300))]).astype(np.float32)
    labels = (rng.random((1, 300)) < 0.1).astype(np.int64)
    values = measure(probs, labels, ece_bins=15).values
    assert values["equal_mass_ece_bound"] == 0
    assert values["equal_mass_ece"] == pytest.approx(labels.mean(), abs=1e-12)


def test_one_group_is_the_plain_gap() -> None:
    probs, labels = draw_case(5, (5, 6, 7), 3)
    values = measure(probs, labels, ece_bins=1).values
    assert values["equal_mass_ece"] == pytest.approx(reference.ece(probs, labels, 1), abs=1e-9)
    assert values["equal_mass_ece_bound"] == 0


def test_on_a_realistic_case_the_bound_is_small_against_the_error() -> None:
    probs, labels = draw_case(6, (20, 40, 40), 4, sharpness=2.5)
    values = measure(probs, labels, ece_bins=15).values
    assert values["equal_mass_ece_bound"] < 0.1 * values["equal_mass_ece"]


def test_the_state_does_not_grow_with_the_number_of_voxels() -> None:
    assert N_CELLS < 10_000
