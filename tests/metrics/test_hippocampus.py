"""The real ensemble: the numbers an independent float64 implementation found for given calibrators."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml

from segcal.metrics import CaseFrame, CaseResult, MetricSettings, make_metrics
from segcal.metrics.ace import pooled_ace

PIPELINES = ("uncalibrated(z)", "ts(z)")


@pytest.fixture(scope="module")
def results(hippocampus: Path) -> dict[str, list[CaseResult]]:
    """Test cases of split 0 under two pipelines; member logits are averaged in float64."""
    manifest = yaml.safe_load((hippocampus / "manifest.yaml").read_text())
    cases = {case["id"]: case for case in manifest["cases"]}
    settings = MetricSettings(class_names=tuple(manifest["classes"]))
    found: dict[str, list[CaseResult]] = {name: [] for name in PIPELINES}
    for case_id in manifest["splits"][0]["test"]:
        members = [np.load(hippocampus / path)["logits"].astype(np.float64) for path in cases[case_id]["members"]]
        logits = torch.from_numpy(np.mean(members, axis=0))
        labels = np.asarray(nib.load(hippocampus / cases[case_id]["label"]).dataobj).T.astype(np.int64)
        frame = CaseFrame.build(case_id, torch.from_numpy(labels), settings, decision=logits.argmax(dim=0))
        for name in PIPELINES:
            metrics = make_metrics(settings)
            metrics.update(frame, torch.softmax(logits / expected(hippocampus, name).get("T", 1.0), dim=0).float())
            found[name].append(metrics.take(case_id))
    return found


def expected(folder: Path, pipeline: str) -> dict[str, float]:
    entry = json.loads((folder / "reference.json").read_text())["repeats"][0]["pipelines"][pipeline]
    return entry["test"] | ({"T": entry["T"]} if "T" in entry else {})


@pytest.mark.parametrize("column", ["nll", "ece", "ba_ece", "dsc", "flip"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_mean_over_cases_matches_the_reference(
    results: dict[str, list[CaseResult]], hippocampus: Path, pipeline: str, column: str
) -> None:
    mean = np.mean([result.values[column] for result in results[pipeline]])
    assert mean == pytest.approx(expected(hippocampus, pipeline)[column], abs=1e-6)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pooled_ace_matches_the_reference(
    results: dict[str, list[CaseResult]], hippocampus: Path, pipeline: str
) -> None:
    pooled = np.sum([result.tables["top_label_15"] for result in results[pipeline]], axis=0)
    assert float(pooled_ace(pooled)) == pytest.approx(expected(hippocampus, pipeline)["ace"], abs=1e-6)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_equal_mass_bound_is_small_on_real_cases(results: dict[str, list[CaseResult]], pipeline: str) -> None:
    values = [result.values for result in results[pipeline]]
    assert np.mean([v["equal_mass_ece_bound"] for v in values]) < 0.1 * np.mean([v["equal_mass_ece"] for v in values])
