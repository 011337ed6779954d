"""Real data: what docs/qa.md says about the expected DSC holds on a few cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from segcal.cases import load_case
from segcal.manifest import Manifest
from segcal.metrics.base import Undefined
from segcal.qa import run_qa
from tests.apply_data import CPU, temperature


def test_uncalibrated_probabilities_expect_too_much_and_a_temperature_brings_them_down(hippocampus: Path) -> None:
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    chosen = manifest.splits[0].test[:8]
    truth = []
    for case_id in chosen:
        data = load_case(manifest, manifest.case(case_id), pooling="logits", device=CPU, with_labels=True)
        assert data.labels is not None
        both = [(data.decision == c, data.labels == c) for c in (1, 2)]
        truth.append(np.mean([2.0 * int((s & t).sum()) / (int(s.sum()) + int(t.sum())) for s, t in both]))

    def bias(value: float) -> float:
        result = run_qa(manifest, calibrator=temperature(value, classes=manifest.class_names), cases=chosen)
        expected = {each.case.case_id: each.case.expected_dsc for each in result.cases}
        scores = [expected[case_id] for case_id in chosen]
        return float(np.mean([score for score in scores if not isinstance(score, Undefined)])) - float(np.mean(truth))

    before, after = bias(1.0), bias(1.5)
    assert before > 0.05
    assert abs(after) < before


def test_volumes_are_in_millilitres_and_members_spread_around_the_pooled_volume(hippocampus: Path) -> None:
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    fitted = temperature(1.0, classes=manifest.class_names)
    (each,) = run_qa(manifest, calibrator=fitted, cases=[manifest.cases[0].id]).cases
    assert each.case.voxel_ml == 0.001
    for part in each.case.classes:
        assert part.spread is not None
        assert len(part.spread.by_member) == 5
        assert 0.8 * part.spread.low < part.sums.expected < 1.2 * part.spread.high
