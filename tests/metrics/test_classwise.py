"""Class-wise calibration error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.metrics import reference
from tests.metrics.cases import CASES, Case, draw_case, measure, small_cases


def check(probs: np.ndarray, labels: np.ndarray, n_bins: int = 50) -> None:
    values = measure(probs, labels, ece_bins=n_bins).values
    each = reference.classwise_ece(probs, labels, n_bins)
    assert [values[f"classwise_ece:c{c}"] for c in range(len(probs))] == pytest.approx(each, abs=1e-9)
    assert values["classwise_ece"] == pytest.approx(sum(each) / len(each), abs=1e-9)


@pytest.mark.parametrize("name", sorted(CASES))
def test_classwise_error_agrees_with_the_explicit_loop(name: str) -> None:
    check(*CASES[name]())


@pytest.mark.parametrize("n_bins", [1, 2, 15, 300])
def test_certain_voxels_are_counted_right_for_every_number_of_bins(n_bins: int) -> None:
    """Voxels with one nearly certain class take a shortcut whose threshold depends on the bins."""
    check(*draw_case(4, (5, 6, 7), 4, sharpness=5.0), n_bins=n_bins)


@given(small_cases())
def test_classwise_error_agrees_on_cases_full_of_coincidences(case: Case) -> None:
    check(*case)


def test_probabilities_rounded_to_half_precision_keep_to_the_shortcut_s_assumption() -> None:
    """Sums that miss 1 by the rounding of float16 must not move a class out of its bin."""
    rng = np.random.default_rng(0)
    first = 0.98 + 0.01 * rng.random((1, 20, 20))
    second = (1 - first) * (0.95 + 0.1 * rng.random((1, 20, 20)))
    probs = np.concatenate([first, second]).astype(np.float16).astype(np.float32)
    check(probs, rng.integers(0, 2, (20, 20)))


def test_tables_keep_every_class() -> None:
    probs, labels = CASES["3d"]()
    table = measure(probs, labels).tables["classwise_50"][0]
    assert table.shape == (4, 3, 50)
    assert table[:, 0].sum(axis=1).tolist() == [labels.size] * 4
    assert table[:, 2].sum(axis=1).tolist() == [int((labels == c).sum()) for c in range(4)]
