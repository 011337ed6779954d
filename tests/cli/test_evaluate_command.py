"""`segcal evaluate` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from segcal_cli.main import app
from tests.apply_data import make_fitted
from tests.fit_data import write_ensemble


def evaluate(root: Path, *options: object) -> Result:
    brief = ("--replicates", "10", "--device", "cpu", "--quiet")
    arguments = ("evaluate", root / "manifest.yaml", "--out", root / "out", *brief, *options)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_results_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    assert evaluate(tmp_path).exit_code == 0
    path = tmp_path / "run=3" / "cal.safetensors"
    make_fitted("ts").save(path)
    result = evaluate(tmp_path, "--calibrator", path, "--calibrator", f"mine={path}")
    assert result.exit_code == 0, result.output
    pipelines = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["pipelines"]
    assert [pipeline["name"] for pipeline in pipelines][-2:] == ["ts(z)", "mine"]


def test_the_page_of_an_earlier_run_does_not_stay_beside_other_numbers(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    assert evaluate(tmp_path).exit_code == 0
    page = tmp_path / "out" / "report.html"
    assert CliRunner().invoke(app, ["report", str(page.parent)]).exit_code == 0
    assert page.is_file()
    assert evaluate(tmp_path).exit_code == 0
    assert not page.exists()


def test_a_study_is_not_replaced_by_an_evaluation(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text('{"run": "study"}', encoding="utf-8")
    assert evaluate(tmp_path).exit_code == 2


def test_a_folder_of_calibrators_is_told_by_what_it_holds(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    for method in ("dc", "ts"):
        make_fitted(method).save(tmp_path / "cals" / f"{method}.safetensors")
    result = evaluate(tmp_path, "--calibrator", tmp_path / "cals")
    assert result.exit_code == 1
    assert "it is a folder with dc.safetensors, ts.safetensors: name one of them" in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", ["summary.json", "cases.csv", "report.html", "pictures/case_00.npz"])
def test_files_of_somebody_else_are_not_replaced(tmp_path: Path, name: str) -> None:
    """nnU-Net keeps a summary.json of its own in the folders of its validation."""
    write_ensemble(tmp_path, n_cases=2)
    theirs = tmp_path / "out" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"foreground_mean": {}}', encoding="utf-8")
    result = evaluate(tmp_path)
    assert result.exit_code == 2
    assert f"{theirs}: already exists, and summary.json does not say that this command wrote it" in result.stderr
    assert theirs.read_text(encoding="utf-8") == '{"foreground_mean": {}}'
