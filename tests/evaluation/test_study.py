"""Studies: the repeats and sensitivities that were asked for, shifted data, and the same bytes after a kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from cli.main import app
from segcal.errors import DataError, Interrupted, MismatchError, OutputError, SegcalError, SettingsError, UsageError
from segcal.evaluation.plan import plan_fits, resized, study_splits
from segcal.evaluation.shifted import shifted_data
from segcal.evaluation.study import study
from segcal.evaluation.study_settings import StudySettings, load_study_settings
from segcal.manifest import Manifest, Split
from tests.evaluation.conftest import files_below

CPU = torch.device("cpu")
SMALL = StudySettings.parse(
    {
        "pipelines": [{"method": "ts", "pooling": "logits"}, {"method": "dc", "pooling": "probabilities"}],
        "trials": 2,
        "rows": 4000,
        "replicates": 100,
        "member_counts": [2],
        "calibration_sizes": [3],
        "sensitivity_methods": ["ts"],
        "bins": [20],
    },
    source="test",
)


@pytest.fixture(scope="module")
def finished(phantom: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "out"
    study(phantom, SMALL, out, device=CPU)
    return out


def test_the_terminal_says_below_the_table_what_the_brackets_of_ace_are(
    phantom: Manifest, finished: Path, tmp_path: Path
) -> None:
    out, config = tmp_path / "out", tmp_path / "small.yaml"
    shutil.copytree(finished, out)
    config.write_text(yaml.safe_dump(SMALL.model_dump(mode="json")))
    command = ["study", str(phantom.path), "--config", str(config), "--out", str(out), "--resume", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert result.stdout.rindex("ACE: mean [smallest, largest repeat]") > result.stdout.rindex("ts(z)")


def test_all_pipelines_repeats_and_sensitivities_are_there(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    names = [p["name"] for p in summary["pipelines"]]
    assert names == ["p0", "uncalibrated(p)", "uncalibrated(z)", "ts(z)", "dc(p)", "ts(z) M=2", "ts(z) n=3"]
    assert summary["n_repeats"] == 3
    assert all(len(p["metrics"]["nll"]["by_repeat"]) == 3 for p in summary["pipelines"])
    assert set(summary["bins"]) == {"50", "15", "20"}
    for name, values in summary["bins"]["50"].items():
        reported = next(p for p in summary["pipelines"] if p["name"] == name)["metrics"]["ece"]["mean"]
        assert values["ece"] == pytest.approx(reported, abs=1e-12)
    for name, values in summary["bins"]["15"].items():
        reported = next(p for p in summary["pipelines"] if p["name"] == name)["metrics"]["ace"]["mean"]
        assert values["ace"] == pytest.approx(reported, abs=1e-12)


def test_fewer_members_are_really_fewer_members(finished: Path) -> None:
    metrics = {p["name"]: p["metrics"] for p in json.loads((finished / "summary.json").read_text())["pipelines"]}
    assert metrics["ts(z) M=2"]["dsc"]["mean"] != metrics["ts(z)"]["dsc"]["mean"]
    assert metrics["ts(z) n=3"]["dsc"]["mean"] == metrics["ts(z)"]["dsc"]["mean"]
    assert metrics["ts(z) n=3"]["nll"]["mean"] != metrics["ts(z)"]["nll"]["mean"]


def test_a_folder_with_a_study_is_refused_without_resume_and_with_other_settings(
    finished: Path, phantom: Manifest
) -> None:
    with pytest.raises(UsageError, match="--resume"):
        study(phantom, SMALL, finished, device=CPU)
    with pytest.raises(UsageError, match=r"another study: settings \(seed\) changed"):
        study(phantom, SMALL.changed(seed=1), finished, resume=True, device=CPU)


@pytest.mark.parametrize("content", ["[]", "{}", "{", '{"settings": 3}'])
def test_a_study_json_by_another_hand_is_said_to_be_none(phantom: Manifest, tmp_path: Path, content: str) -> None:
    (tmp_path / "study.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"another study: its study.json is none that this version writes"):
        study(phantom, SMALL, tmp_path, resume=True, device=CPU)


def test_a_folder_that_cannot_be_made_is_said_at_once_and_in_words(phantom: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(OutputError, match=r"cannot be a folder, .*file is a file; choose another path"):
        study(phantom, SMALL, tmp_path / "file", device=CPU)


def test_a_study_that_is_stopped_says_how_to_go_on(phantom: Manifest, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"out are kept; run the same command with --resume to go on"):
        study(phantom, SMALL, tmp_path / "out", device=CPU, progress=stop)


def test_resuming_a_finished_study_fits_and_measures_nothing(
    finished: Path, phantom: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_below(finished)

    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("a cached result was computed again")

    monkeypatch.setattr("segcal.evaluation.study.fit_many", forbidden)
    monkeypatch.setattr("segcal.evaluation.work.measure_case", forbidden)
    study(phantom, SMALL, finished, resume=True, device=CPU)
    assert files_below(finished) == before


KILLED = """
import sys, torch
from pathlib import Path
from segcal.evaluation.study import study
from segcal.evaluation.study_settings import StudySettings
from segcal.manifest import Manifest
manifest, settings, out = sys.argv[1:]
parsed = StudySettings.model_validate_json(settings)
study(Manifest.load(manifest), parsed, Path(out), resume=True, device=torch.device("cpu"))
"""


def test_a_study_killed_at_any_moment_ends_with_the_same_bytes(
    finished: Path, phantom: Manifest, tmp_path: Path
) -> None:
    """Killed once after the first fit appeared and once after the first repeat was measured."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(phantom.path), SMALL.model_dump_json(), str(out)]
    for awaited in ("fits/*.safetensors", "repeats/*/done"):
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 300
        while not list(out.glob(awaited)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert files_below(out) == files_below(finished)


def test_shifted_data_are_measured_with_the_same_calibrators(phantom: Manifest, tmp_path: Path) -> None:
    settings = SMALL.changed(member_counts=(), calibration_sizes=(), bins=())
    result = study(phantom, settings, tmp_path / "out", shifted=phantom, device=CPU)
    assert result.shifted is not None
    assert (tmp_path / "out" / "shifted" / "table.md").is_file()
    for here, there in zip(result.summary["pipelines"], result.shifted["pipelines"], strict=True):
        assert here["metrics"] == there["metrics"], "the same cases under another name give the same numbers"


def changed(manifest: Manifest, *, keep: Sequence[str] | None = None, rename: str = "", **keys: Any) -> Manifest:
    """The same files under a manifest with other keys, some of the cases, or other names for them."""
    content = manifest.model_dump(mode="json", exclude_none=True) | keys
    del content["splits"]
    content["cases"] = [case for case in content["cases"] if keep is None or case["id"] in keep]
    for case in content["cases"]:
        case["id"] += rename
    return Manifest.from_content(content, manifest.path)


def forbid_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("something was fitted")

    monkeypatch.setattr("segcal.evaluation.study.fit_many", forbidden)


@pytest.mark.parametrize(
    ("pipeline", "keys", "message"),
    [
        ("ms", {"kind": "probabilities"}, "kind differs: ms was fitted on logits"),
        ("ts", {"classes": ["background", "lesion", "organ", "vessel"]}, "names of classes differ"),
    ],
)
def test_shifted_data_that_evaluate_would_refuse_are_refused_before_any_fit(
    phantom: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: str,
    keys: dict[str, Any],
    message: str,
) -> None:
    forbid_fits(monkeypatch)
    settings = SMALL.changed(pipelines=({"method": pipeline, "pooling": "logits"},))
    with pytest.raises(MismatchError, match=f"shifted data .*{message}"):
        study(phantom, settings, tmp_path / "out", shifted=changed(phantom, **keys), device=CPU)
    assert not (tmp_path / "out").exists()


def test_shifted_data_with_other_members_are_measured_with_a_warning_or_refused_if_too_few(phantom: Manifest) -> None:
    content = phantom.model_dump(mode="json", exclude_none=True)
    for case in content["cases"]:
        case["members"] = case["members"][:2]
    fewer = Manifest.from_content(content, phantom.path)
    tasks = plan_fits(phantom, SMALL, phantom.splits[0])
    assert any(
        "fitted on 3, applied to 2" in text for text in shifted_data(fewer, phantom, phantom.splits, tasks).warnings
    )

    for case in content["cases"]:
        case["members"] = case["members"][:1]
    one = Manifest.from_content(content, phantom.path)
    with pytest.raises(UsageError, match="member_counts: 2 is more than the 1 members of the shifted data"):
        shifted_data(one, phantom, phantom.splits, tasks)


def test_no_case_of_the_fit_is_measured_on_shifted_data_that_lack_a_test_case(phantom: Manifest) -> None:
    tasks = plan_fits(phantom, SMALL, phantom.splits[0])
    ids = sorted(case.id for case in phantom.cases)
    found = shifted_data(changed(phantom, keep=ids[1:]), phantom, phantom.splits, tasks)

    assert found.ids == (phantom.splits[0].test[1:], phantom.splits[1].test, phantom.splits[2].test)
    assert [text for text in found.warnings if "test cases" in text] == [
        f"repeat 1: measured on 2 of its 3 test cases; the shifted data 'phantom' have no label of {ids[0]}"
    ]
    with pytest.raises(DataError, match="no labelled case of the test cases of repeat 1"):
        shifted_data(changed(phantom, keep=ids[3:]), phantom, phantom.splits, tasks)


def test_shifted_data_of_other_names_are_measured_whole(phantom: Manifest) -> None:
    tasks = plan_fits(phantom, SMALL, phantom.splits[0])
    others = changed(phantom, rename="_foggy")
    found = shifted_data(others, phantom, phantom.splits, tasks)
    assert found.ids == (tuple(sorted(case.id for case in others.cases)),) * 3
    assert not found.warnings


@pytest.mark.parametrize(
    ("settings", "keys", "message"),
    [
        ({"member_counts": (3,)}, {}, "member_counts: 3 is not fewer than the 3 members"),
        ({"calibration_sizes": (50,)}, {}, "calibration_sizes: 50 of"),
        ({"sensitivity_methods": ("ms",)}, {"kind": "probabilities"}, "ms: not translation-invariant"),
    ],
)
def test_a_study_that_cannot_be_finished_is_refused_before_its_folder_is_opened(
    phantom: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    keys: dict[str, Any],
    message: str,
) -> None:
    forbid_fits(monkeypatch)
    with pytest.raises(SegcalError, match=message):
        study(changed(phantom, **keys), SMALL.changed(**settings), tmp_path / "out", device=CPU)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["out", "out/shifted"])
def test_a_study_does_not_replace_files_of_somebody_else(
    phantom: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    forbid_fits(monkeypatch)
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "table.md").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"table\.md: already exists, .*--out"):
        study(phantom, SMALL, tmp_path / "out", shifted=phantom, device=CPU)
    assert (tmp_path / folder / "table.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("key", ["pipelines", "sensitivity_methods"])
def test_a_misspelt_method_is_named_wherever_it_stands(key: str) -> None:
    wrong = {"pipelines": [{"method": "ts_", "pooling": "logits"}], "sensitivity_methods": ["ts_"]}
    right = {"pipelines": [{"method": "ts", "pooling": "logits"}]}
    with pytest.raises(SettingsError, match=rf"x: `{key}\.0.*: unknown method `ts_`, did you mean `ts`\?"):
        StudySettings.parse({**right, key: wrong[key]}, source="x")


def test_splits_are_drawn_when_none_are_given(phantom: Manifest) -> None:
    content = phantom.model_dump(mode="json", exclude_none=True)
    del content["splits"]
    drawn = study_splits(Manifest.from_content(content, phantom.path), SMALL.changed(repeats=4))
    assert len(drawn) == 4
    assert len({split.test for split in drawn}) > 1
    assert all(len(split.calibration) == 5 and len(split.validation) == 2 for split in drawn)


def test_resizing_keeps_the_test_cases_and_nests_the_calibration_sets() -> None:
    split = Split(calibration=("a", "b", "c"), validation=("d", "e"), test=("x", "y"))
    small, large = resized(split, 2, seed=0), resized(split, 4, seed=0)
    assert small.test == large.test == split.test
    assert set(small.calibration) < set(large.calibration)
    with pytest.raises(UsageError, match="none for validation"):
        resized(split, 5, seed=0)


def test_shipped_studies_load_and_the_paper_has_all_rows_of_its_table() -> None:
    rows = {(p.method, p.pooling) for p in load_study_settings("paper").pipelines}
    on_logits = {"ms", "dc", "ms_c", "lts", "lts_ti", "cdc", "cms_ap", "cms_op", "ts", "ets"}
    on_probabilities = {"cdc", "cms_ap", "cms_op", "ts", "ets", "dc"}
    assert rows == {(m, "logits") for m in on_logits} | {(m, "probabilities") for m in on_probabilities}
    assert load_study_settings("quick").trials < load_study_settings("paper").trials
    with pytest.raises(SettingsError, match="the nearest are paper"):
        load_study_settings("papr")
    with pytest.raises(SettingsError, match="did you mean `trials`"):
        StudySettings.parse({"pipelines": [], "trails": 3}, source="x")


def test_a_misspelt_key_inside_a_list_is_named_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"unknown key `pipelines\.0\.poolng`, did you mean `pooling`"):
        StudySettings.parse({"pipelines": [{"method": "ts", "poolng": "logits"}]}, source="x")


def test_a_study_is_not_resumed_on_files_that_changed(finished: Path, phantom: Manifest, tmp_path: Path) -> None:
    shutil.copytree(phantom.root, tmp_path / "data")
    shutil.copytree(finished, tmp_path / "out")
    changed = Manifest.load(tmp_path / "data" / phantom.path.name)
    study(changed, SMALL, tmp_path / "out", resume=True, device=CPU)
    member = changed.resolve(changed.cases[0].members[0])
    with np.load(member) as content:
        np.savez_compressed(member, logits=content["logits"] + np.float32(1))
    with pytest.raises(UsageError, match="another study: files of the cases changed"):
        study(changed, SMALL, tmp_path / "out", resume=True, device=CPU)
