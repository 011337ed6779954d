"""`segcal classify` from the shell's side: files in, files out, exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from segcal.classification import load
from segcal_cli.main import app
from tests.classification.files_data import drawn, saved

RUN = CliRunner()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return saved(tmp_path / "fit.npz", drawn(0, 400)), saved(tmp_path / "test.npz", drawn(1, 300))


def call(*arguments: object, code: int = 0) -> str:
    done = RUN.invoke(app, ["classify", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


def test_fit_apply_evaluate_and_report_follow_each_other(tmp_path: Path, files: tuple[Path, Path]) -> None:
    fit_file, test_file = files
    call("fit", fit_file, "--method", "ts", "--method", "platt", "--out", tmp_path / "cals", "--seed", 1)
    assert load(tmp_path / "cals" / "ts.safetensors").info.seed == 1

    out = tmp_path / "results"
    cals = [tmp_path / "cals" / f"{name}.safetensors" for name in ("ts", "platt")]
    shown = call("evaluate", cals[0], f"mine={cals[1]}", test_file, "--out", out, "--replicates", 50)
    assert all(name in shown for name in ("uncalibrated", "ts", "mine", "report.html"))
    summary = json.loads((out / "summary.json").read_text())
    assert [p["name"] for p in summary["pipelines"]] == ["uncalibrated", "ts", "mine"]

    before = (out / "report.html").read_bytes()
    again = RUN.invoke(app, ["report", str(out)])
    assert again.exit_code == 0, again.output
    assert (out / "report.html").read_bytes() == before

    call("apply", cals[0], test_file, "--out", tmp_path / "applied")
    second = json.loads(
        call("evaluate", tmp_path / "applied" / "calibrated.npz", "--out", tmp_path / "x", "--no-page", "--json")
    )
    assert second["pipelines"][0]["metrics"]["nll"]["mean"] == pytest.approx(
        summary["pipelines"][1]["metrics"]["nll"]["mean"], abs=1e-9
    )


def test_the_same_seed_writes_the_same_calibrator(tmp_path: Path, files: tuple[Path, Path]) -> None:
    options = ["--method", "dc", "--trials", 2, "--validation", 0.25]
    for name in ("a", "b"):
        call("fit", files[0], *options, "--out", tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_json_is_one_object_and_settings_are_read(tmp_path: Path, files: tuple[Path, Path]) -> None:
    out = tmp_path / "h.safetensors"
    text = call("fit", files[0], "--method", "histogram", "--set", "bins=5", "--set", "binning=width",
                "--classes", "a,b,c,d", "--out", out, "--json")  # fmt: skip
    found = json.loads(text)["calibrators"][0]
    assert (found["settings"]["bins"], found["settings"]["binning"]) == (5, "width")
    assert found["classes"] == ["a", "b", "c", "d"]
    assert found["file"] == str(out)


def test_validation_may_be_a_file_and_csv_and_folders_work(tmp_path: Path, files: tuple[Path, Path]) -> None:
    arrays = drawn(2, 60, 2)
    rows = zip(arrays["logits"].tolist(), arrays["labels"].tolist(), strict=True)
    lines = ["logit_0,logit_1,label", *(f"{a!r},{b!r},{y}" for (a, b), y in rows)]
    (tmp_path / "data.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "folder").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    cal = tmp_path / "c.safetensors"
    call(
        "fit", tmp_path / "data.csv", "--method", "dc", "--validation", tmp_path / "folder", "--trials", 2, "--out", cal
    )
    call("apply", cal, tmp_path / "data.csv", "--out", tmp_path / "one")
    call("apply", cal, tmp_path / "folder", "--out", tmp_path / "two")
    written = np.loadtxt(tmp_path / "one" / "calibrated.csv", delimiter=",", skiprows=1)[:, :2]
    np.testing.assert_array_equal(written, np.load(tmp_path / "two" / "calibrated" / "probabilities.npy"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "DATA", "--out", "x.safetensors"], "give --method"),
        (["fit", "DATA", "--method", "tz", "--out", "x.safetensors"], "unknown method"),
        (["fit", "DATA", "--method", "ts", "--method", "dc", "--out", "x.safetensors"], "need a folder"),
        (["fit", "DATA", "--method", "ts", "--lambda", "1", "--out", "x.safetensors"], "means nothing"),
        (["fit", "DATA", "--method", "histogram", "--set", "bins", "--out", "x.safetensors"], "NAME=VALUE"),
        (["evaluate", "cal.safetensors", "--out", "x"], "is a calibrator"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_to_do(
    files: tuple[Path, Path], arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in call(*(str(files[0]) if part == "DATA" else part for part in arguments), code=2)
    assert not (tmp_path / "x.safetensors").exists()


def test_a_broken_file_exits_1_and_is_named(tmp_path: Path, files: tuple[Path, Path]) -> None:
    (tmp_path / "broken.npz").write_bytes(files[0].read_bytes()[:200])
    assert "broken.npz" in call("fit", tmp_path / "broken.npz", "--method", "ts", "--out", tmp_path / "x", code=1)
    assert "missing.npz" in call("evaluate", tmp_path / "missing.npz", "--out", tmp_path / "y", code=1)


def test_a_method_that_needs_features_is_refused_before_any_fit_and_nothing_is_written(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    said = call("fit", files[0], "--method", "ts", "--method", "vq", "--out", tmp_path / "cals", code=1)
    assert f"{files[0].name}: vq looks at the features" in said
    assert "`features`" in said
    assert not list(tmp_path.rglob("*.safetensors"))


def test_results_are_replaced_but_no_files_of_somebody_else(tmp_path: Path, files: tuple[Path, Path]) -> None:
    for command, mine, theirs in (("evaluate", "report.html", "summary.json"), ("apply", "run.json", "run.json")):
        out, other = tmp_path / command, tmp_path / f"other_{command}"
        inputs = [files[1]]
        if command == "apply":
            call("fit", files[0], "--method", "ts", "--out", tmp_path / "ts.safetensors")
            inputs = [tmp_path / "ts.safetensors", files[1]]
        call(command, *inputs, "--out", out)
        assert (out / mine).is_file()
        call(command, *inputs, "--out", out)
        other.mkdir()
        (other / theirs).write_text('{"run": "apply"}', encoding="utf-8")
        said = call(command, *inputs, "--out", other, code=2)
        assert f"{theirs}: already exists, and {theirs} does not say that this command wrote it" in " ".join(
            said.split()
        )
        assert [path.name for path in other.iterdir()] == [theirs]


def test_a_page_does_not_stay_beside_other_numbers(tmp_path: Path, files: tuple[Path, Path]) -> None:
    call("evaluate", files[1], "--out", tmp_path / "out")
    call("evaluate", files[0], "--out", tmp_path / "out", "--no-page")
    assert not (tmp_path / "out" / "report.html").exists()


AWKWARD = ("50 rows", "two classes", "one class missing", "one class only", "constant scores", "three rows repeated")


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_rows_go_through_all_three_commands(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    n, n_classes = (50 if kind == "50 rows" else 300), (2 if kind == "two classes" else 4)
    logits, labels = rng.normal(0, 2, (n, n_classes)), rng.integers(0, n_classes, n)
    if kind == "one class missing":
        labels[labels == 3] = 0
    elif kind == "one class only":
        labels[:] = 1
    elif kind == "constant scores":
        logits[:] = 0.5
    elif kind == "three rows repeated":
        logits, labels = np.tile(logits[:3], (100, 1)), np.tile(labels[:3], 100)
    np.savez(tmp_path / "data.npz", logits=logits, labels=labels)
    methods = ("ts", "dc", "platt", "isotonic", "meta_mis")
    options = ("--trials", 3, "--out", tmp_path / "cals")
    call("fit", tmp_path / "data.npz", *(part for m in methods for part in ("--method", m)), *options)
    cals = [tmp_path / "cals" / f"{name}.safetensors" for name in methods]
    call("apply", cals[1], tmp_path / "data.npz", "--out", tmp_path / "applied")
    assert np.isfinite(np.load(tmp_path / "applied" / "calibrated.npz")["probabilities"]).all()
    call("evaluate", *cals, tmp_path / "data.npz", "--out", tmp_path / "results", "--replicates", "50")
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    for pipeline in summary["pipelines"]:
        for name, one in pipeline["metrics"].items():
            assert math.isfinite(one["mean"]), name
            assert "reason" in one or math.isfinite(one["low"]), name
    assert (tmp_path / "results" / "report.html").stat().st_size > 10_000
