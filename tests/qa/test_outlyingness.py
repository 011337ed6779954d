"""How unusual a case is: the same statistics as at fitting, a robust scale, and silence where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from segcal.cases import load_case
from segcal.fitting.gather import SampleSizes, gather
from segcal.manifest import Manifest
from segcal.metrics.base import Undefined
from segcal.qa.outlyingness import NO_LOGITS, NO_REFERENCE, NO_VARIATION, case_statistics, outlyingness, robust_z
from tests.apply_data import CPU, random_logits, write_manifest
from tests.qa.batches import labelled, labelled_regions


def test_z_is_the_distance_from_the_median_in_scaled_median_deviations() -> None:
    reference = [1.0, 2.0, 3.0, 4.0, 100.0]
    assert robust_z(5.0, reference, min_cases=5) == pytest.approx((5 - 3) / (1.4826 * 1.0))
    assert robust_z(3.0, reference, min_cases=5) == 0.0


def test_on_normal_data_it_is_the_ordinary_z_score() -> None:
    reference = np.random.default_rng(0).normal(10, 2, 20_000)
    assert robust_z(16.0, reference.tolist(), min_cases=5) == pytest.approx(3.0, abs=0.08)


def test_there_is_no_score_without_enough_reference_or_any_spread() -> None:
    assert robust_z(1.0, [], min_cases=3) is NO_REFERENCE
    assert isinstance(robust_z(1.0, [1.0, 2.0], min_cases=3), Undefined)
    assert robust_z(1.0, [2.0] * 9, min_cases=3) is NO_VARIATION
    assert robust_z(1.0, [k * 1e-8 for k in range(9)], min_cases=3) is NO_VARIATION, "rounding is no scale"
    assert isinstance(robust_z(float("nan"), [1.0, 2.0, 3.0], min_cases=3), Undefined)


def test_without_logits_every_score_says_so() -> None:
    assert set(outlyingness(None, {}, min_cases=3).values()) == {NO_LOGITS}


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("crop", [None, ((1, 4), (0, 3), (2, 6))])
def test_statistics_are_computed_as_they_were_for_the_calibration_cases(
    tmp_path: Path, regions: bool, crop: tuple[tuple[int, int], ...] | None
) -> None:
    cases = {name: [random_logits(k), random_logits(k + 10)] for k, name in enumerate("abc")}
    manifest = labelled_regions(tmp_path, cases, crop) if regions else labelled(tmp_path, cases, crop=crop)
    kept = gather(manifest, list(cases), pooling="logits", sizes=SampleSizes(100, 0, 0), device=CPU).statistics
    for position, case_id in enumerate(cases):
        data = load_case(manifest, manifest.case(case_id), pooling="logits", device=CPU, with_labels=False)
        found = case_statistics(data, regions=regions, fitted_on=data.kind)
        assert found == {name: pytest.approx(kept[name][position], rel=1e-12) for name in kept}


def test_shifted_logits_stand_out_in_the_mean_free_energy_and_in_nothing_else(tmp_path: Path) -> None:
    def scores(manifest: Manifest) -> dict[str, float]:
        data = load_case(manifest, manifest.case("new"), pooling="logits", device=CPU, with_labels=False)
        found = outlyingness(case_statistics(data, regions=False, fitted_on=data.kind), reference, min_cases=5)
        return {name: float(score) for name, score in found.items() if not isinstance(score, Undefined)}

    cases = {f"c{k}": [random_logits(k)] for k in range(12)}
    fitted_on = labelled(tmp_path / "fit", cases)
    reference = gather(fitted_on, list(cases), pooling="logits", sizes=SampleSizes(100, 0, 0), device=CPU).statistics
    usual = scores(write_manifest(_made(tmp_path / "usual"), {"new": [random_logits(99)]}))
    shifted = scores(write_manifest(_made(tmp_path / "shifted"), {"new": [random_logits(99) + np.float32(5)]}))
    assert max(abs(value) for value in usual.values()) < 3.5
    assert shifted["free_energy_mean"] > 3.5
    assert shifted["free_energy_std"] == pytest.approx(usual["free_energy_std"], abs=1e-3)
    assert shifted["confidence_mean"] == pytest.approx(usual["confidence_mean"], abs=1e-3)


def test_pooled_probabilities_have_no_free_energy_to_compare(tmp_path: Path) -> None:
    cases = {f"c{k}": [random_logits(k), random_logits(k + 50)] for k in range(8)}
    manifest = labelled(tmp_path, cases)
    sizes = SampleSizes(100, 0, 0)
    reference = gather(manifest, list(cases), pooling="probabilities", sizes=sizes, device=CPU).statistics
    data = load_case(manifest, manifest.case("c0"), pooling="probabilities", device=CPU, with_labels=False)
    assert torch.logsumexp(data.logits, 0).abs().max() < 1e-5
    found = outlyingness(case_statistics(data, regions=False, fitted_on=data.kind), reference, min_cases=5)
    assert found["free_energy_mean"] is NO_VARIATION
    assert not isinstance(found["confidence_mean"], Undefined)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
