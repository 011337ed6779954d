"""`--workers` and `--scheduler` as a user types them; without them there is no Dask."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("distributed")

from segcal_cli.main import app
from tests.fit_data import write_ensemble

CLUSTER_COMMANDS = ("fit", "apply", "evaluate", "study", "qa")


def test_a_fit_on_workers_prints_the_dashboard_and_the_same_calibrator(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=4)
    command = ["fit", str(tmp_path / "manifest.yaml"), "--method", "ts", "--device", "cpu", "--out"]
    alone = CliRunner().invoke(app, [*command, str(tmp_path / "alone.safetensors")])
    found = CliRunner().invoke(app, [*command, str(tmp_path / "found.safetensors"), "--workers", "1"])
    assert (alone.exit_code, found.exit_code) == (0, 0), found.output
    assert (tmp_path / "found.safetensors").read_bytes() == (tmp_path / "alone.safetensors").read_bytes()
    assert "dashboard: http://127.0.0.1:" in found.stderr
    assert "calibration cases: 3 of 3" in found.stderr
    assert "dashboard" not in found.stdout + alone.output


def test_a_machine_readable_result_has_no_dashboard_in_it(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    command = ["evaluate", str(tmp_path / "manifest.yaml"), "--device", "cpu", "--replicates", "10", "--json"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out"), "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["n_cases"] == 2
    assert "dashboard" not in result.stderr


@pytest.mark.parametrize("command", CLUSTER_COMMANDS)
def test_every_command_over_cases_has_the_options(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    assert "--workers" in shown
    assert "--scheduler" in shown


def test_one_of_them_is_enough(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    command = ["evaluate", str(tmp_path / "manifest.yaml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--workers", "2", "--scheduler", "tcp://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "give one of them" in result.stderr


def test_without_the_options_dask_is_not_imported(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=2)
    code = (
        "import sys; from typer.testing import CliRunner; from segcal_cli.main import app; "
        f"r = CliRunner().invoke(app, ['evaluate', {str(tmp_path / 'manifest.yaml')!r}, '--out', "
        f"{str(tmp_path / 'out')!r}, '--replicates', '10']); assert r.exit_code == 0, r.output; "
        "print([m for m in sys.modules if m.split('.')[0] in ('dask', 'distributed', 'bokeh')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_without_dask_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ensemble(tmp_path, n_cases=2)
    monkeypatch.setitem(sys.modules, "segcal.scale", None)
    command = ["evaluate", str(tmp_path / "manifest.yaml"), "--out", str(tmp_path / "out"), "--workers", "2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "pip install -c constraints.txt '.[dask]'" in result.stderr
