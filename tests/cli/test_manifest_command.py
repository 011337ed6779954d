"""`segcal manifest scan` and `segcal manifest check` as a user types them: output, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from segcal_cli.main import app

SHAPE = (4, 5, 6)


def segcal(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["manifest", *(str(argument) for argument in arguments)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two members and labels of two cases."""
    truth = np.zeros(SHAPE, np.uint8)
    truth[:2, 1:3, :4] = 1
    (tmp_path / "labels").mkdir()
    for m in range(2):
        (tmp_path / f"fold_{m}").mkdir()
    for i in range(2):
        write_nifti(tmp_path / "labels" / f"case_{i}.nii.gz", truth, affine=np.eye(4))
        for m in range(2):
            noise = np.random.default_rng(2 * i + m).normal(size=(2, *SHAPE))
            logits = (5 * np.stack([truth == 0, truth == 1]) + noise).astype(np.float32)
            np.savez_compressed(tmp_path / f"fold_{m}" / f"case_{i}.npz", logits=logits)
    return tmp_path


def scan_arguments(root: Path, *extra: object) -> list[object]:
    members = ["--member", root / "fold_0", "--member", root / "fold_1"]
    return ["scan", *members, "--labels", root / "labels", "--kind", "logits", "--out", root / "m.yaml", *extra]


def test_scan_writes_a_manifest_and_says_what_is_in_it(root: Path) -> None:
    result = segcal(*scan_arguments(root, "--classes", "background, organ", "--name", "small"))

    assert result.exit_code == 0, result.output
    manifest = Manifest.load(root / "m.yaml")
    assert (manifest.name, manifest.class_names, manifest.n_members) == ("small", ("background", "organ"), 2)
    assert "2 cases (2 labelled), 2 members" in result.stdout
    assert "background, organ (as given)" in result.stdout
    assert f"segcal manifest check {root / 'm.yaml'}" in result.stdout


def test_scan_in_json(root: Path) -> None:
    result = segcal(*scan_arguments(root, "--json"))

    values = json.loads(result.stdout)
    assert values["n_cases"] == values["n_labelled"] == values["n_members"] == 2
    assert values["classes"] == ["class_0", "class_1"]
    assert values["sha256"] == Manifest.load(root / "m.yaml").sha256
    assert values["unmatched"] == []


def test_folders_expanded_by_the_shell_are_all_members(root: Path) -> None:
    result = segcal("scan", "--member", root / "fold_0", root / "fold_1", "--kind", "logits", "--out", root / "m.yaml")

    assert result.exit_code == 0, result.output
    assert Manifest.load(root / "m.yaml").cases[0].members == ("fold_0/case_0.npz", "fold_1/case_0.npz")


def test_scan_says_what_it_could_not_match(root: Path) -> None:
    (root / "fold_1" / "case_1.npz").unlink()

    result = segcal(*scan_arguments(root, "--quiet"))

    assert result.exit_code == 0
    assert "case_1" in result.stderr
    assert result.stdout == ""


def test_scan_replaces_nothing_unless_forced(root: Path) -> None:
    (root / "m.yaml").write_text("mine")

    refused = segcal(*scan_arguments(root))
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert (root / "m.yaml").read_text() == "mine"

    assert segcal(*scan_arguments(root, "--force")).exit_code == 0
    assert len(Manifest.load(root / "m.yaml").cases) == 2


def test_scan_leaves_nothing_behind_when_it_fails(root: Path) -> None:
    result = segcal(*scan_arguments(root, "--classes", "a,b,c"))

    assert result.exit_code == 1
    assert "has 2 channels" in result.stderr
    assert not (root / "m.yaml").exists()


@pytest.mark.parametrize("kind", ["logit", ""])
def test_an_unknown_kind_is_wrong_usage(root: Path, kind: str) -> None:
    result = segcal("scan", "--member", root / "fold_0", "--kind", kind, "--out", root / "m.yaml")

    assert result.exit_code == 2
    assert "probabilities" in result.stderr


def test_the_kind_is_never_guessed(root: Path) -> None:
    result = segcal("scan", "--member", root / "fold_0", "--out", root / "m.yaml")

    assert result.exit_code == 2
    assert "--kind" in result.stderr


def test_a_sound_manifest_passes_the_check(root: Path) -> None:
    segcal(*scan_arguments(root))

    result = segcal("check", root / "m.yaml")

    assert result.exit_code == 0, result.output
    assert result.stdout == "2 cases, 6 files opened: 0 fatal, 0 warning, 0 note; usable\n"


def test_a_fatal_finding_ends_with_1_and_is_one_line(root: Path) -> None:
    segcal(*scan_arguments(root))
    (root / "fold_0" / "case_1.npz").unlink()

    result = segcal("check", root / "m.yaml")

    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("fatal   case_1 (fold_0/case_1.npz): ")
    assert lines[1].startswith("2 cases, 6 files opened: 1 fatal")
    assert "Traceback" not in result.output


def test_check_in_json_and_quiet(root: Path) -> None:
    segcal(*scan_arguments(root))
    (root / "fold_0" / "case_1.npz").unlink()
    write_nifti(root / "labels" / "case_0.nii.gz", np.zeros(SHAPE, np.uint8), affine=np.eye(4))

    machine = segcal("check", root / "m.yaml", "--json")
    quiet = segcal("check", root / "m.yaml", "--quiet")

    assert machine.exit_code == quiet.exit_code == 1
    values = json.loads(machine.stdout)
    assert values["counts"] == {"fatal": 1, "warning": 0, "note": 1}
    assert [finding["code"] for finding in values["findings"]] == ["no_foreground", "missing_file"]
    assert [line.split()[0] for line in quiet.stdout.splitlines()] == ["fatal"]


def test_a_manifest_that_cannot_be_read_is_one_message(root: Path) -> None:
    (root / "m.yaml").write_text("version: 1\nclases: []\n")

    result = segcal("check", root / "m.yaml")

    assert result.exit_code == 1
    assert "clases: unknown key; did you mean `classes`?" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["scan", "check"])
def test_help_ends_with_an_example(command: str) -> None:
    result = segcal(command, "--help")

    assert result.exit_code == 0
    assert f"segcal manifest {command}" in result.stdout.split("Example:")[1]


def test_the_real_ensemble_is_scanned_and_checked(hippocampus: Path, tmp_path: Path) -> None:
    out = tmp_path / "scanned.yaml"
    members = [hippocampus / f"member_{m}" for m in range(5)]
    folders = ["--labels", hippocampus / "labels", "--images", hippocampus / "images"]
    named = ["--dataset-json", hippocampus / "model" / "dataset.json", "--kind", "logits"]

    scanned = segcal("scan", "--member", *members, *folders, *named, "--out", out)
    checked = segcal("check", out, "--json")

    assert scanned.exit_code == 0, scanned.output
    manifest, given = Manifest.load(out), Manifest.load(hippocampus / "manifest.yaml")
    assert manifest.class_names == given.class_names
    assert [case.id for case in manifest.cases] == [case.id for case in given.cases]
    for found, case in zip(manifest.cases, given.cases, strict=True):
        for path, original in zip(
            [*found.members, found.label, found.image], [*case.members, case.label, case.image], strict=True
        ):
            assert path is not None
            assert original is not None
            assert manifest.resolve(path).samefile(given.resolve(original))
    assert checked.exit_code == 0, checked.output
    assert json.loads(checked.stdout)["counts"] == {"fatal": 0, "warning": 0, "note": 0}
    assert yaml.safe_load(out.read_text())["kind"] == "logits"
