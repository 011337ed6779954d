"""Distance bands and BA-ECE."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.ndimage import distance_transform_edt

from segcal.metrics.distance import boundary_voxels, distance_bands
from tests.metrics import reference
from tests.metrics.cases import CASES, Case, draw_case, measure, small_cases

EDGES = (0.0, 3.0, 7.0, 15.0)


@pytest.mark.parametrize("name", sorted(CASES))
def test_ba_ece_agrees_with_the_explicit_loop(name: str) -> None:
    probs, labels = CASES[name]()
    assert measure(probs, labels).values["ba_ece"] == pytest.approx(reference.ba_ece(probs, labels), abs=1e-9)


@given(small_cases())
def test_ba_ece_agrees_on_cases_full_of_coincidences(case: Case) -> None:
    assert measure(*case).values["ba_ece"] == pytest.approx(reference.ba_ece(*case), abs=1e-9)


@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=3, max_side=7), elements=st.integers(-1, 2)))
def test_boundary_voxels_agree_with_the_explicit_loop(labels: np.ndarray) -> None:
    expected = np.zeros(labels.shape, dtype=bool)
    for position in reference.boundary(labels):
        expected[position] = True
    np.testing.assert_array_equal(boundary_voxels(labels, ignored=-1), expected)


@pytest.mark.parametrize("shape", [(40, 50), (1, 60, 45), (20, 30, 40)])
def test_bands_agree_with_scipy_s_distance_transform(shape: tuple[int, ...]) -> None:
    labels = (np.random.default_rng(0).random(shape) < 0.0015).astype(np.int64)
    distance = distance_transform_edt(~boundary_voxels(labels, ignored=-1))
    bands = distance_bands(labels, EDGES, ignored=-1)
    np.testing.assert_array_equal(bands.band, np.digitize(distance, EDGES) - 1)
    sums = [distance[bands.band == k].sum() for k in range(4)]
    found = bands.distance_sums(slice(None), None)
    assert [total / 2**34 for total in found] == pytest.approx(sums, abs=1e-6)


def test_distances_of_exactly_3_7_and_15_open_the_next_band() -> None:
    labels = np.zeros((1, 1, 20), dtype=np.int64)
    labels[..., 0] = 1  # voxels 0 and 1 are on the boundary, voxel k is k - 1 away
    band = distance_bands(labels, EDGES, ignored=-1).band[0, 0]
    assert band.tolist() == [0] * 4 + [1] * 4 + [2] * 8 + [3] * 4


def test_a_single_label_has_no_boundary_and_all_its_voxels_are_in_the_last_band() -> None:
    probs, labels = CASES["one label"]()
    result = measure(probs, labels)
    assert result.tables["top_label_bands_15"][0][:3].sum() == 0
    gap = abs(probs.max(axis=0).astype(np.float64).mean() - (probs.argmax(axis=0) == 0).mean())
    assert result.values["ba_ece"] == pytest.approx(gap, abs=1e-9)


def test_ignored_voxels_make_no_boundary_but_do_not_hide_one() -> None:
    labels = np.array([[0, 0, -1, 1, 1, 2]])
    assert boundary_voxels(labels, ignored=-1).tolist() == [[False, False, False, False, True, True]]


def test_uniform_weights_average_the_bands() -> None:
    probs, labels = CASES["four bands"]()
    result = measure(probs, labels, band_weights="uniform")
    counts, confidence, hits = np.moveaxis(result.tables["top_label_bands_15"][0].sum(axis=-1), -1, 0)
    assert result.values["ba_ece"] == pytest.approx(np.mean(np.abs(confidence - hits) / counts), abs=1e-12)
    assert result.values["ba_ece"] != measure(probs, labels).values["ba_ece"]


def test_other_band_edges_are_followed() -> None:
    probs, labels = CASES["four bands"]()
    result = measure(probs, labels, band_edges=(0.0, 2.5))
    assert result.tables["top_label_bands_15"][0].shape[0] == 2
    distance = distance_transform_edt(~boundary_voxels(labels, ignored=-1))
    expected = [distance[distance < 2.5].mean(), distance[distance >= 2.5].mean()]
    assert result.tables["band_distance"][0] == pytest.approx(expected, abs=1e-9)


def test_rows_of_a_classifier_have_no_boundary_and_ba_ece_says_so() -> None:
    probs, labels = draw_case(0, (5, 6), 3)
    result = measure(probs.reshape(3, -1), labels.reshape(-1), spatial=False)
    assert math.isnan(result.values["ba_ece"])
    assert "not an image" in result.undefined["ba_ece"]
    assert result.values["ece"] == pytest.approx(reference.ece(probs, labels, 50), abs=1e-9)


def test_a_band_may_begin_between_two_distances() -> None:
    labels = np.zeros((1, 8, 8), dtype=np.uint8)
    labels[0, 0, 0] = 1  # the corner and its neighbours are boundary
    bands = distance_bands(labels, (0.0, 1.5), ignored=255)
    assert bands.squared is not None
    np.testing.assert_array_equal(bands.band, bands.squared >= 1.5**2)
    assert 2 in bands.squared
