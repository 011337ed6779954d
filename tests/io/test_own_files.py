"""A file that was named by mistake, such as an input, is not overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from segcal.errors import UsageError
from segcal.io.own_files import check_replaceable_file
from segcal_cli.main import app
from tests.apply_data import make_fitted
from tests.fit_data import write_ensemble


def test_only_files_of_the_same_sort_are_replaced(tmp_path: Path) -> None:
    calibrator, page, other = tmp_path / "a.safetensors", tmp_path / "a.html", tmp_path / "manifest.yaml"
    make_fitted("ts").save(calibrator)
    page.write_text("<!DOCTYPE html><html></html>", encoding="utf-8")
    other.write_text("version: 1", encoding="utf-8")
    check_replaceable_file(calibrator, "calibrator")
    check_replaceable_file(page, "page")
    check_replaceable_file(tmp_path / "new", "page")
    (tmp_path / "reserved").touch()  # by mktemp or a workflow engine
    check_replaceable_file(tmp_path / "reserved", "calibrator")
    for path in (page, other):
        with pytest.raises(UsageError, match="already exists and is no calibrator; choose another --out"):
            check_replaceable_file(path, "calibrator")
    with pytest.raises(UsageError, match="is no page"):
        check_replaceable_file(calibrator, "page")


def test_the_commands_ask(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    manifest = tmp_path / "manifest.yaml"
    content = manifest.read_bytes()
    done = CliRunner().invoke(app, ["fit", str(manifest), "--method", "ts", "--out", str(manifest)])
    assert done.exit_code == 2, done.output
    assert manifest.read_bytes() == content

    results = tmp_path / "results"
    brief = ["--replicates", "10", "--device", "cpu", "--quiet"]
    assert CliRunner().invoke(app, ["evaluate", str(manifest), "--out", str(results), *brief]).exit_code == 0
    summary = (results / "summary.json").read_bytes()
    done = CliRunner().invoke(app, ["report", str(results), "--out", str(results / "summary.json")])
    assert done.exit_code == 2, done.output
    assert (results / "summary.json").read_bytes() == summary
