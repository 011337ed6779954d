"""On real data, through the command line: metrics of given calibrators are those of an independent implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app

METHODS = ("ts", "ms", "ms_c", "dc", "cdc", "cms_ap", "cms_op")
METRICS = ("nll", "ece", "ba_ece", "dsc", "flip", "ace")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def results(hippocampus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All methods fitted on every voxel with the reference's penalties, then evaluated on the test cases of split 0."""
    folder = tmp_path_factory.mktemp("hippocampus")
    manifest = str(hippocampus / "manifest.yaml")
    methods = [option for method in METHODS for option in ("--method", method)]
    fixed = ["--lambda", "1e-3", "--mu", "1e-3", "--full", "--split", "0", "--quiet"]
    run("fit", manifest, *methods, *fixed, "--out", str(folder / "fits"))
    files = [str(folder / "fits" / f"{method}.safetensors") for method in METHODS]
    given = [option for file in files for option in ("--calibrator", file)]
    brief = ["--split", "0", "--replicates", "200", "--quiet"]
    run("evaluate", manifest, *given, *brief, "--out", str(folder / "results"))
    return folder / "results"


def test_every_metric_of_every_pipeline_matches_the_reference(results: Path, hippocampus: Path) -> None:
    reference = json.loads((hippocampus / "reference.json").read_text())["repeats"][0]["pipelines"]
    summary = json.loads((results / "summary.json").read_text())
    found = {p["name"]: p["metrics"] for p in summary["pipelines"]}
    for name in ["uncalibrated(z)", "uncalibrated(p)", *(f"{method}(z)" for method in METHODS)]:
        for metric in METRICS:
            expected = reference[name]["test"][metric]
            assert found[name][metric]["mean"] == pytest.approx(expected, abs=1e-4), (name, metric)


def test_preserving_methods_flip_nothing_and_keep_the_pooled_dice(results: Path) -> None:
    found = {p["name"]: p for p in json.loads((results / "summary.json").read_text())["pipelines"]}
    for name in ("ts(z)", "cms_ap(z)", "cms_op(z)"):
        assert found[name]["metrics"]["flip"]["mean"] == 0.0
        assert found[name]["metrics"]["dsc"]["mean"] == found["uncalibrated(z)"]["metrics"]["dsc"]["mean"]
        assert not found[name]["flip_applicable"]


def test_shifts_of_the_logits_move_matrix_scaling_and_nothing_translation_invariant(
    results: Path, hippocampus: Path
) -> None:
    case = json.loads((hippocampus / "reference.json").read_text())["dataset"] + "_001"
    for method in METHODS:
        file = str(results.parent / "fits" / f"{method}.safetensors")
        audited = json.loads(run("audit", file, str(hippocampus / "manifest.yaml"), "--case", case, "--json"))
        if method == "ms":
            assert audited["shift_change"] > 0.01
        else:
            assert audited["shift_change"] < 1e-4, method


@pytest.mark.slow
def test_the_quick_study_runs_on_real_data(hippocampus: Path, tmp_path: Path) -> None:
    """Which methods win is reported in docs/hippocampus.md; asserted is what must hold whatever the data say."""
    run("study", str(hippocampus / "manifest.yaml"), "--config", "quick", "--quiet", "--out", str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {p["name"]: p["metrics"] for p in summary["pipelines"]}
    assert summary["n_repeats"] == 3
    for name in ("ts(z)", "cms_ap(z)", "cms_op(z)"):
        assert found[name]["flip"]["mean"] == 0.0
        assert found[name]["dsc"]["mean"] == found["uncalibrated(z)"]["dsc"]["mean"]
        assert found[name]["nll"]["mean"] < found["uncalibrated(z)"]["nll"]["mean"]
