"""The benchmarks: their data are what they claim, and every run leaves entries a machine can read."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from segcal.calibrators.temperature import TemperatureScaling
from segcal.cases import load_case
from segcal.fitting.exact import ExactSolver
from segcal.fitting.gather import labelled_voxels
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import concatenate
from segcal.io.archive import read_npz_header
from segcal.manifest import Manifest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHAPE = (16, 24, 24)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("SEGCAL_BENCH_RESULTS", str(tmp_path / "latest.json"))
    return importlib.import_module("_results")


@pytest.fixture
def brats(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_brats")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_children")


def read_entries(path: Path) -> dict[str, dict[str, object]]:
    entries = json.loads(path.read_bytes())
    assert all(list(one) == ["name", "value", "unit", "target", "ok"] for one in entries)
    for one in entries:
        assert isinstance(one["name"], str)
        assert one["value"] is None or isinstance(one["value"], float)
        assert isinstance(one["unit"], str)
        assert (one["target"] is None) == (one["ok"] is None)
    named = {one["name"]: one for one in entries}
    assert len(named) == len(entries)
    return named


def test_an_entry_is_replaced_by_name_and_others_stay(results: ModuleType, tmp_path: Path) -> None:
    results.record([results.entry("a", 3.0, "x", 2.0), results.entry("b", 1.0, "s")])
    results.record([results.entry("a", 1.5, "x", 2.0)])
    results.record([results.entry("a", 9.0, "x", 2.0)], quick=True)

    found = read_entries(tmp_path / "latest.json")

    assert {name: one["ok"] for name, one in found.items()} == {"a": True, "b": None, "quick/a": None}
    assert found["quick/a"]["target"] is None


@pytest.mark.parametrize(
    ("value", "at_least", "ok"), [(1.9, False, True), (2.1, False, False), (2.1, True, True), (None, True, False)]
)
def test_a_target_is_judged_in_its_direction(
    results: ModuleType, value: float | None, at_least: bool, ok: bool
) -> None:
    assert results.entry("a", value, "x", 2.0, at_least=at_least).ok is ok


def test_a_measured_process_is_not_charged_with_the_memory_of_the_one_that_starts_it(children: ModuleType) -> None:
    held = np.ones(300_000_000, dtype=np.uint8)

    small = children.run([sys.executable, "-c", "print('done')"])
    large = children.run([sys.executable, "-c", "held = bytearray(200_000_000)"])

    assert held.nbytes > 250e6
    assert small.printed == "done\n"
    assert small.peak_mb < 100
    assert 200 < large.peak_mb < 300


def test_a_measured_process_that_fails_is_an_error_with_its_words(children: ModuleType) -> None:
    with pytest.raises(children.ChildError, match=r"(?s)ended with 3:.*out of luck"):
        children.run([sys.executable, "-c", "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"])


def test_the_committed_results_have_the_schema() -> None:
    assert read_entries(BENCHMARKS / "results" / "latest.json")


def test_every_script_is_run_by_one_target_and_every_target_names_scripts_that_exist() -> None:
    named = {}
    for target in ("bench", "experiments"):
        printed = subprocess.run(
            ["make", "--dry-run", target], cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True
        )
        assert not printed.stderr
        named[target] = set(re.findall(r"benchmarks/(\w+)\.py", printed.stdout))
    scripts = {path.stem for path in BENCHMARKS.glob("[!_]*.py")}

    assert named["bench"] | named["experiments"] == scripts
    assert not named["bench"] & named["experiments"]


def test_cases_are_the_same_bytes_for_a_seed_and_others_for_another(brats: ModuleType, tmp_path: Path) -> None:
    first, again, other = (
        brats.brats_manifest(1, shape=SHAPE, n_members=2, seed=seed, folder=tmp_path / name)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )

    def contents(path: Path) -> dict[str, bytes]:
        return {str(file.relative_to(path.parent)): file.read_bytes() for file in path.parent.rglob("*.*z")}

    assert len(contents(first)) == 3
    assert contents(first) == contents(again)
    assert not set(contents(first).values()) & set(contents(other).values())


def test_cases_are_stored_as_the_two_programs_store_them(brats: ModuleType, tmp_path: Path) -> None:
    headers = {}
    for kind in ("logits", "probabilities"):
        manifest = Manifest.load(brats.brats_manifest(1, kind=kind, shape=SHAPE, n_members=2, folder=tmp_path))
        headers[kind] = read_npz_header(manifest.resolve(manifest.cases[0].members[0]))[kind]

    assert {kind: header.dtype for kind, header in headers.items()} == {
        "logits": np.dtype("float16"),
        "probabilities": np.dtype("float32"),
    }
    assert all(header.shape == (5, *SHAPE) for header in headers.values())


def test_members_are_overconfident_and_most_voxels_are_certain_background(brats: ModuleType, tmp_path: Path) -> None:
    manifest = Manifest.load(brats.brats_manifest(2, shape=(31, 48, 48), folder=tmp_path))
    loaded = [
        load_case(manifest, case, pooling="logits", device=torch.device("cpu"), with_labels=True)
        for case in manifest.cases
    ]
    rows = concatenate(block for case in loaded for part in labelled_voxels(case) for block in part.rows())
    certain = torch.softmax(rows.logits, 1)[:, 0] > 0.99

    fitted = ExactSolver(TemperatureScaling, rows).solve(Penalty()).calibrator

    assert isinstance(fitted, TemperatureScaling)
    assert fitted.temperature > 1.15
    assert 0.9 < float(certain.double().mean()) < 0.999
    assert float((rows.labels[certain] == 0).double().mean()) > 0.97
    assert int((torch.bincount(rows.labels, minlength=5) > 0).sum()) >= 4


def test_a_quick_run_prints_its_table_and_writes_quick_entries_only(tmp_path: Path) -> None:
    target = tmp_path / "latest.json"
    size = [str(n) for n in SHAPE]
    options = ["--part", "fit", "--cases", "2", "--trials", "1", "--shape", *size, "--data", str(tmp_path / "data")]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "brats.py"), "--quick", *options],
        env={**os.environ, "SEGCAL_BENCH_RESULTS": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )

    found = read_entries(target)

    assert "| fit 8 methods, 2 cases |" in done.stdout
    assert all(name.startswith("quick/brats/") for name in found)
    assert found["quick/brats/fit 2 cases/cpu over floor"]["value"] > 0  # type: ignore[operator]
    assert all(one["target"] is None for one in found.values())
