"""Top-label errors: ECE, MCE, ACE tables, reliability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from segcal.metrics import CaseFrame, make_metrics
from segcal.metrics.bins import BinTable
from tests.metrics import reference
from tests.metrics.cases import CASES, Case, draw_case, measure, settings_for, small_cases


def check(probs: np.ndarray, labels: np.ndarray) -> None:
    result = measure(probs, labels, extra_bins=(20, 7))
    assert result.values["ece"] == pytest.approx(reference.ece(probs, labels, 50), abs=1e-9)
    assert result.values["mce"] == pytest.approx(reference.mce(probs, labels, 50), abs=1e-9)
    for n_bins in (50, 15, 20, 7):
        table = BinTable.from_array(result.tables[f"top_label_{n_bins}"][0])
        assert table.ece() == pytest.approx(reference.ece(probs, labels, n_bins), abs=1e-9)
        assert table.ace() == pytest.approx(reference.ace([(probs, labels)], n_bins), abs=1e-9)


@pytest.mark.parametrize("name", sorted(CASES))
def test_top_label_errors_agree_with_the_explicit_loop(name: str) -> None:
    check(*CASES[name]())


@given(small_cases())
def test_top_label_errors_agree_on_cases_full_of_coincidences(case: Case) -> None:
    check(*case)


@given(small_cases(np.float64))
def test_float64_confidences_are_binned_in_float64_for_every_number_of_bins(case: Case) -> None:
    check(*case)


def test_bin_counts_without_a_small_common_multiple_are_binned_one_by_one() -> None:
    probs, labels = CASES["bin edges"]()
    result = measure(probs, labels, extra_bins=(97, 101))
    table = BinTable.from_array(result.tables["top_label_97"][0])
    assert table.ece() == pytest.approx(reference.ece(probs, labels, 97), abs=1e-9)


def test_tables_hold_counts_sums_and_hits_of_every_bin_and_band() -> None:
    probs, labels = CASES["four bands"]()
    result = measure(probs, labels)
    bands = result.tables["top_label_bands_15"][0]  # (band, 3, B)
    assert bands.shape == (4, 3, 15)
    np.testing.assert_array_equal(bands.sum(axis=0), result.tables["top_label_15"][0])
    assert (bands[:, 0].sum(axis=1) > 0).all()
    filled = reference.bins(reference.top_scores(probs, labels), 15)
    counts, confidence, hits = result.tables["top_label_15"][0]
    assert counts.tolist() == [len(b) for b in filled]
    assert hits.tolist() == [sum(hit for _, hit in b) for b in filled]
    assert confidence == pytest.approx([sum(c for c, _ in b) for b in filled], abs=1e-9)


def test_reliability_is_empty_where_no_voxel_fell() -> None:
    table = BinTable(np.array([0, 4]), np.array([0.0, 3.0]), np.array([0, 2]))
    confidence, accuracy = table.reliability()
    assert np.isnan(confidence[0])
    assert np.isnan(accuracy[0])
    assert (confidence[1], accuracy[1]) == (0.75, 0.5)


def test_more_than_2_to_the_24_voxels_in_one_bin_stay_exact() -> None:
    """17 million voxels at p = 0.99 that are right 98 times in 100: a float32 counter stops at 16.8 million."""
    n = 17_000_000
    labels = (torch.arange(n) % 50 == 0).to(torch.int8)
    probs = torch.tensor([[0.99], [0.01]]).expand(2, n)
    settings = settings_for(2)
    metrics = make_metrics(settings)
    metrics.update(CaseFrame.build("ct", labels, settings, spatial=False), probs)
    result = metrics.take("ct")
    counts, confidence, hits = result.tables["top_label_50"][0]
    p = float(np.float32(0.99))
    assert (counts.sum(), hits.sum(), result.values["n_voxels"]) == (n, n * 49 // 50, n)
    assert confidence.sum() == n * p
    assert result.values["ece"] == pytest.approx(p - 0.98, abs=1e-12)
    assert result.values["classwise_ece"] == pytest.approx((p - 0.98 + 0.02 - float(np.float32(0.01))) / 2, abs=1e-9)
    assert result.values["nll"] == pytest.approx(-0.98 * np.log(p) - 0.02 * np.log(float(np.float32(0.01))), abs=1e-9)


def test_ece_agrees_with_netcal() -> None:
    netcal = pytest.importorskip("netcal.metrics", reason="netcal is not installed")
    probs, labels = draw_case(8, (6, 9, 8), 4, sharpness=1.0)
    theirs = netcal.ECE(50).measure(probs.reshape(4, -1).T.astype(np.float64), labels.reshape(-1))
    assert measure(probs, labels).values["ece"] == pytest.approx(theirs, abs=1e-9)
