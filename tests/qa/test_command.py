"""`segcal qa` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from segcal_cli.main import app
from tests.apply_data import rotated, temperature, write_manifest
from tests.qa.batches import blob


def segcal(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    poor = [blob(k, sharp=0.1, noise=1.0) for k in (2, 3)]
    write_manifest(tmp_path, {"good": [blob(0), blob(1)], "poor": poor}, affine=rotated())
    temperature(1.5).save(tmp_path / "ts.safetensors")
    return tmp_path


def test_a_manifest_and_a_folder_are_looked_at(root: Path) -> None:
    calibrator, manifest = root / "ts.safetensors", root / "manifest.yaml"
    result = segcal("qa", manifest, "--calibrator", calibrator, "--out", root / "qa", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "poor" in result.stdout
    assert {path.name for path in (root / "qa").iterdir()} == {"qa.csv", "qa.json", "qa.html"}

    assert segcal("apply", calibrator, manifest, "--out", root / "applied").exit_code == 0
    result = segcal("qa", root / "applied", "--images", root / "images", "--out", root / "qa2", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["classes"] == ["class 1", "class 2"]
    assert [case["case"] for case in values["cases"]] == ["poor", "good"]


def test_strict_ends_with_1_when_a_case_is_flagged(root: Path) -> None:
    command = ("qa", root / "manifest.yaml", "--calibrator", root / "ts.safetensors", "--out", root / "qa", "--strict")
    assert segcal(*command).exit_code == 1
    assert segcal(*command, "--case", "good").exit_code == 0


def test_results_are_replaced_but_no_files_of_somebody_else(root: Path) -> None:
    command = ("qa", root / "manifest.yaml", "--calibrator", root / "ts.safetensors", "--out", root / "qa")
    assert segcal(*command).exit_code == segcal(*command).exit_code == 0
    (root / "qa" / "qa.json").write_text('{"format": "mine"}', encoding="utf-8")
    result = segcal(*command)
    assert result.exit_code == 2
    assert "qa.json: already exists, and qa.json does not say that this command wrote it" in result.stderr
    assert (root / "qa" / "qa.json").read_text(encoding="utf-8") == '{"format": "mine"}'


def test_a_case_that_cannot_be_read_ends_with_1_after_the_rest_is_done(root: Path) -> None:
    (root / "member_0" / "good.npz").write_bytes(b"broken")
    result = segcal("qa", root / "manifest.yaml", "--calibrator", root / "ts.safetensors", "--out", root / "qa")
    assert result.exit_code == 1
    assert "not looked at: good" in result.stderr
    assert "poor" in (root / "qa" / "qa.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("manifest.yaml",), 2, "needs --calibrator"),
        (("member_0",), 2, "has no run.json"),
        (("nowhere",), 1, "no such folder"),
        (("ts.safetensors",), 2, "a calibrator goes to --calibrator"),
        (("member_0", "--config", "qaa"), 2, "no settings named `qaa`"),
    ],
)
def test_wrong_calls_are_explained(root: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    first, *rest = arguments
    result = segcal("qa", root / first, *rest, "--out", root / "qa")
    assert result.exit_code == code
    assert said in result.stderr
    assert not (root / "qa").exists()


def test_a_folder_that_cannot_be_written_is_said_before_any_case_is_read(root: Path) -> None:
    (root / "file").write_text("in the way", encoding="utf-8")
    command = ("qa", root / "manifest.yaml", "--calibrator", root / "ts.safetensors", "--out", root / "file")
    result = segcal(*command)
    assert result.exit_code == 1
    assert "cannot be a folder" in result.stderr
    assert "qa: " not in result.stderr, "cases were looked at for a result that cannot be kept"
