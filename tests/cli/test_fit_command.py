"""`segcal fit` as a user types it: files, JSON, exit codes and messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from segcal.calibrators import CALIBRATORS
from segcal.fitted import load_calibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
from segcal_cli.main import app
from tests.fit_data import write_ensemble

SPLIT = {"calibration": [0, 1], "validation": [2]}
FIXED = ("--lambda", "1e-3", "--mu", "1e-3")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("data"), n_cases=3, shape=(2, 14, 15), split=SPLIT).path


def segcal(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["fit", *(str(argument) for argument in arguments)])


def test_one_method_gives_one_file(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "ts.safetensors"
    result = segcal(manifest, "--method", "ts", "--out", out)
    assert result.exit_code == 0, result.output
    calibrator = load_calibrator(out)
    assert calibrator.content == fit_many(Manifest.load(manifest), ["ts"])["ts"].content
    header, line = result.stdout.splitlines()[-2:]
    assert header.split() == ["method", "lambda", "mu", "fit", "NLL", "validation", "NLL", "keeps", "file"]
    assert line.split() == ["ts", "-", "-", f"{calibrator.info.fit_nll:.6f}", f"{calibrator.info.validation_nll:.6f}",
                            "order", str(out)]  # fmt: skip
    assert "warning: ts: fitted on 2 cases only" in result.stderr
    assert list(out.parent.iterdir()) == [out]


def test_one_method_into_an_existing_folder(manifest: Path, tmp_path: Path) -> None:
    assert segcal(manifest, "--method", "dc", *FIXED, "--out", tmp_path).exit_code == 0
    assert load_calibrator(tmp_path / "dc.safetensors").info.lambda_ == 1e-3


def test_several_methods_give_a_folder(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibrators"
    result = segcal(manifest, "--method", "ts", "--method", "cms_ap", "--method", "ts", *FIXED, "--out", out)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["cms_ap.safetensors", "ts.safetensors"]
    together = fit_many(Manifest.load(manifest), ["ts", "cms_ap"], lambda_=1e-3, mu=1e-3)
    for name, calibrator in together.items():
        assert load_calibrator(out / f"{name}.safetensors").content == calibrator.content


@pytest.mark.parametrize("blocked", ["fits.safetensors", "notes.txt"])
def test_several_methods_into_a_file_are_refused_before_the_fit(
    manifest: Path, tmp_path: Path, blocked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / blocked
    if blocked == "notes.txt":
        out.write_text("mine")
    monkeypatch.setattr("segcal_cli.fit.fit_many", lambda *_, **__: pytest.fail("fitted all the same"))
    result = segcal(manifest, "--method", "ts", "--method", "dc", "--out", out)
    assert result.exit_code == 2
    assert "several methods need a folder, not a file" in result.stderr


def test_json_is_one_object_with_the_metadata(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "fits"
    result = segcal(manifest, "--method", "ts", "--method", "ms_c", "--trials", 2, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["calibrators"]
    assert [entry["method"] for entry in found] == ["ts", "ms_c"]
    for entry in found:
        calibrator = load_calibrator(entry["file"])
        assert entry["sha256"] == calibrator.sha256
        assert entry["fit_nll"] == calibrator.info.fit_nll
        assert entry["warnings"] == list(calibrator.info.warnings)
    assert found[0]["lambda"] is None
    assert 0 <= found[1]["lambda"] <= 0.1


def test_quiet_prints_warnings_only(manifest: Path, tmp_path: Path) -> None:
    result = segcal(manifest, "--method", "ts", "--out", tmp_path / "a.safetensors", "--quiet")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr.startswith("warning: ")


def test_progress_names_reading_and_tuning(manifest: Path, tmp_path: Path) -> None:
    result = segcal(manifest, "--method", "dc", "--trials", 2, "--out", tmp_path / "a.safetensors")
    assert "calibration cases: 2 of 2" in result.stderr
    assert "tuning dc: 2 of 2" in result.stderr


def test_options_reach_the_fit(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    asked = ["--pooling", "probabilities", "--split", "0", "--seed", "4", "--polish", "--storage", tmp_path / "t.log"]
    assert segcal(manifest, "--method", "cms_op", "--trials", 2, *asked, "--out", out).exit_code == 0
    info = load_calibrator(out).info
    assert (info.pooling, info.seed, info.solver) == ("probabilities", 4, "exact")
    assert (tmp_path / "t.log").is_file()


def test_a_shipped_config_or_a_file_of_ones_own(manifest: Path, tmp_path: Path) -> None:
    assert segcal(manifest, "--config", "ts_p", "--out", tmp_path / "a.safetensors").exit_code == 0
    assert load_calibrator(tmp_path / "a.safetensors").info.pooling == "probabilities"
    own = tmp_path / "own.yaml"
    own.write_text("method: dc\nlambda: 0.01\nmu: 0.02\n")
    assert segcal(manifest, "--config", own, "--out", tmp_path / "b.safetensors").exit_code == 0
    info = load_calibrator(tmp_path / "b.safetensors").info
    assert (info.lambda_, info.mu) == (0.01, 0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "platt"], "unknown method `platt`; known are identity, ts"),
        ([], "nothing to fit: give --method NAME or --config NAME"),
        (["--method", "ts", "--lambda", "1e-3"], "--lambda and --mu mean nothing for ts"),
        (["--method", "dc", "--full", "--polish"], "--full already goes beyond --polish"),
        (["--method", "dc", "--split", "3"], "splits 0..0, not 3"),
        (["--config", "no_such_thing"], "no settings named `no_such_thing`"),
        (["--config", "ts", "--config", "dc_p"], "pool differently"),
        (["--config", "dc", "--config", "dc_p"], "two --config for `dc`"),
        (["--method", "dc", "--lambda", "-1"], "'--lambda': Input should be greater than or equal to 0"),
        (["--method", "ts", "--solver", "guess"], "guess"),
        (["--method", "ts", "--device", "abacus"], "abacus"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(
    manifest: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = segcal(manifest, *arguments, "--out", tmp_path / "a.safetensors")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_failures_end_with_1_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    probabilities = write_ensemble(tmp_path / "data", n_cases=2, shape=(1, 8, 9), kind="probabilities")
    out = tmp_path / "a.safetensors"
    refused = segcal(probabilities.path, "--method", "ms", *FIXED, "--out", out)
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith("error: ms: not translation-invariant")
    missing = segcal(tmp_path / "nothing.yaml", "--method", "ts", "--out", out)
    assert missing.exit_code == 1
    assert "nothing.yaml" in missing.stderr
    (probabilities.root / probabilities.cases[0].members[0]).unlink()
    broken = segcal(probabilities.path, "--method", "ts", "--out", out)
    assert broken.exit_code == 1
    assert "member_0" in broken.stderr
    assert not out.exists()
    assert "Traceback" not in broken.stderr
    assert "Traceback" in segcal(probabilities.path, "--method", "ts", "--out", out, "--debug").stderr


def test_force_fits_and_warns(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    probabilities = write_ensemble(tmp_path / "data", n_cases=3, shape=(1, 12, 13), kind="probabilities")
    out = tmp_path / "a.safetensors"
    result = segcal(probabilities.path, "--method", "ms", *FIXED, "--force", "--out", out)
    assert result.exit_code == 0
    assert "warning: ms: not translation-invariant" in result.stderr
    assert "fitted because of --force" in result.stderr
    assert load_calibrator(out).info.translation_invariant is False


def test_help_names_every_method_and_ends_with_an_example() -> None:
    result = CliRunner().invoke(app, ["fit", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert all(name in result.stdout for name in CALIBRATORS)
    assert result.stdout.rstrip().splitlines()[-1].strip().startswith("segcal fit manifest.yaml --method cms_ap")
