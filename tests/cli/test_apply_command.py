"""`segcal apply` and `segcal audit` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from segcal.calibrators.matrix import MatrixScaling
from segcal.fitted import FittedCalibrator
from segcal_cli.main import app
from tests.apply_data import CLASSES, make_fitted, random_logits, rotated, temperature, write_manifest

SHIFTY = {"W": np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.0, 1.0]]), "b": np.array([0.0, 0.3, 0.0])}


def segcal(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two members of two cases with images, a manifest, a calibrator and a folder to be in."""
    cases = {case_id: [random_logits(10 * k), random_logits(10 * k + 1)] for k, case_id in enumerate("ab")}
    write_manifest(tmp_path, cases, affine=rotated())
    temperature(2.0).save(tmp_path / "ts.safetensors")
    return tmp_path


def saved(root: Path, fitted: FittedCalibrator) -> Path:
    path = root / f"{fitted.info.method}.safetensors"
    fitted.save(path)
    return path


def test_apply_writes_the_maps_and_says_where(root: Path) -> None:
    result = segcal("apply", root / "ts.safetensors", root / "manifest.yaml", "--out", root / "out", "--device", "cpu")

    assert result.exit_code == 0, result.output
    assert result.stdout == f"ts: 2 cases written to {root / 'out'}\n"
    names = {path.name for path in (root / "out").iterdir()}
    assert names == {"a.npz", "a.nii.gz", "b.npz", "b.nii.gz", "run.json"}


def test_apply_in_json_prints_one_object(root: Path) -> None:
    out = root / "out"
    command = ("apply", root / "ts.safetensors", root / "manifest.yaml", "--out", out, "--case", "b", "--json")
    values = json.loads(segcal(*command).stdout)

    assert values["done"] == ["b"]
    assert values["failed"] == {}
    again = json.loads(segcal(*command, "--resume").stdout)
    assert (again["done"], again["skipped"]) == ([], ["b"])


def test_options_reach_the_files(root: Path) -> None:
    options = ("--format", "nifti", "--dtype", "uint16", "--confidence", "--entropy", "--pooling", "logits", "--quiet")
    result = segcal("apply", root / "ts.safetensors", root / "manifest.yaml", "--out", root / "out", *options)

    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert nib.load(root / "out" / "probabilities" / "a.nii.gz").get_data_dtype() == np.uint16
    assert (root / "out" / "confidence" / "a.nii.gz").exists()
    assert (root / "out" / "entropy" / "b.nii.gz").exists()


def test_member_folders_give_the_same_maps_as_the_manifest(root: Path) -> None:
    calibrator = root / "ts.safetensors"
    segcal("apply", calibrator, root / "manifest.yaml", "--out", root / "one")
    members = ("--member", root / "member_0", "--member", root / "member_1", "--images", root / "images")
    result = segcal("apply", calibrator, *members, "--out", root / "two")

    assert result.exit_code == 0, result.output
    for name in ("a.npz", "b.npz", "a.nii.gz", "b.nii.gz"):
        assert (root / "one" / name).read_bytes() == (root / "two" / name).read_bytes()


def test_members_named_by_a_shell_pattern_are_all_taken(root: Path) -> None:
    """The shell turns `--member member_*` into `--member member_0 member_1`."""
    calibrator = root / "ts.safetensors"
    segcal("apply", calibrator, root / "manifest.yaml", "--out", root / "one")
    result = segcal("apply", calibrator, "--member", root / "member_0", root / "member_1", "--out", root / "two")

    assert result.exit_code == 0, result.output
    with np.load(root / "one" / "a.npz") as one, np.load(root / "two" / "a.npz") as two:
        np.testing.assert_array_equal(one["probabilities"], two["probabilities"])


def test_a_dataset_json_beside_the_members_is_compared_with_the_calibrator(root: Path) -> None:
    labels = {"background": 0, "tumour": 1, "liver": 2}
    (root / "member_0" / "dataset.json").write_text(json.dumps({"labels": labels}))
    result = segcal("apply", root / "ts.safetensors", "--member", root / "member_0", "--out", root / "out")

    assert result.exit_code == 1
    assert "names of classes differ" in result.stderr


def test_members_whose_number_of_channels_differs_are_refused(root: Path) -> None:
    calibrator = saved(root, temperature(2.0, classes=("background", "organ")))
    result = segcal("apply", calibrator, "--member", root / "member_0", "--out", root / "out")

    assert result.exit_code == 1
    assert "number of classes differs" in result.stderr


@pytest.mark.parametrize("declared", [None, "probabilities"])
def test_the_kind_of_member_files_comes_from_their_key_or_the_option(root: Path, declared: str | None) -> None:
    members = ("--member", root / "member_0")
    options = () if declared is None else ("--kind", declared)
    result = segcal("apply", root / "ts.safetensors", *members, *options, "--out", root / "out")

    assert result.exit_code == (0 if declared is None else 1)
    if declared is None:
        assert json.loads((root / "out" / "run.json").read_text())["settings"]["kind"] == "logits"


def test_nifti_members_need_the_kind_said(root: Path) -> None:
    (root / "nifti").mkdir()
    nib.save(nib.Nifti1Image(random_logits(0).T, rotated()), root / "nifti" / "a.nii.gz")
    command = ("apply", root / "ts.safetensors", "--member", root / "nifti", "--out", root / "out")
    refused = segcal(*command)

    assert refused.exit_code == 2
    assert "--kind logits" in refused.stderr
    assert segcal(*command, "--kind", "logits").exit_code == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "expected one manifest, got 0"),
        (("manifest.yaml", "manifest.yaml"), "expected one manifest, got 2"),
        (("manifest.yaml", "--member", "member_0"), "a file among --member folders"),
        (("manifest.yaml", "--images", "images"), "belong to --member"),
        (("manifest.yaml", "--dtype", "uint16"), "nnU-Net would average the raw integers"),
        (("manifest.yaml", "--format", "nifti", "--dtype", "float16"), "NIfTI has no 16-bit floats"),
        (("manifest.yaml", "--case", "aa"), "did you mean"),
    ],
)
def test_wrong_usage_ends_with_2_and_the_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(root)
    result = segcal("apply", "ts.safetensors", *options, "--out", "out")

    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not (root / "out").exists()


def test_a_second_run_into_the_same_folder_needs_resume(root: Path) -> None:
    command = ("apply", root / "ts.safetensors", root / "manifest.yaml", "--out", root / "out")
    assert segcal(*command).exit_code == 0
    refused = segcal(*command)

    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    resumed = segcal(*command, "--resume")
    assert resumed.exit_code == 0
    assert "0 cases written" in resumed.stdout
    assert "2 already finished" in resumed.stdout


def test_a_message_that_begins_with_its_case_is_not_given_the_id_again(root: Path) -> None:
    np.savez_compressed(root / "member_0" / "a.npz", logits=np.zeros((4, 4, 5, 6), np.float32))
    command = ("apply", root / "ts.safetensors", root / "manifest.yaml", "--out", root / "out", "--keep-going")
    assert f"failed: a: {root / 'member_0' / 'a.npz'} has 4 channels" in segcal(*command).stderr


def test_keep_going_lists_the_broken_case_and_ends_with_1(root: Path) -> None:
    (root / "member_1" / "a.npz").write_bytes(b"not a zip file")
    command = ("apply", root / "ts.safetensors", root / "manifest.yaml", "--out", root / "out")
    result = segcal(*command, "--keep-going")

    assert result.exit_code == 1
    assert "failed: a: " in result.stderr
    assert "a.npz" in result.stderr
    assert "1 case written" in result.stdout
    assert "1 failed" in result.stdout


@pytest.mark.parametrize(
    ("fitted", "options", "complaint"),
    [
        (temperature(2.0, classes=("background", "organ")), (), "number of classes differs"),
        (temperature(2.0, classes=("background", "tumour", "liver")), (), "names of classes differ"),
        (temperature(2.0), ("--pooling", "probabilities"), "pooling differs"),
        (temperature(2.0, classes=("whole",), regions=True), (), "was fitted for regions"),
        (make_fitted("ms", SHIFTY, kind="probabilities"), (), "kind differs"),
    ],
)
def test_a_calibrator_for_other_data_is_refused(
    root: Path, fitted: FittedCalibrator, options: tuple[str, ...], complaint: str
) -> None:
    calibrator = saved(root, fitted)
    result = segcal("apply", calibrator, root / "manifest.yaml", "--out", root / "out", *options)

    assert result.exit_code == 1
    assert complaint in result.stderr
    assert not (root / "out").exists()


def test_force_turns_the_mismatch_of_kind_into_a_warning(root: Path) -> None:
    calibrator = saved(root, make_fitted("ms", SHIFTY, kind="probabilities"))
    result = segcal("apply", calibrator, root / "manifest.yaml", "--out", root / "out", "--force")

    assert result.exit_code == 0
    assert "warning: kind differs" in result.stderr


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda content: b"PK\x03\x04 something else", "not a calibrator"),
        (lambda content: content[: len(content) // 2], "truncated"),
        (lambda content: content.replace(b"segcal-calibrator-1", b"segcal-calibrator-9"), "segcal-calibrator-9"),
    ],
)
def test_files_that_are_no_calibrators_are_refused(root: Path, damage: object, complaint: str) -> None:
    assert callable(damage)
    (root / "ts.safetensors").write_bytes(damage((root / "ts.safetensors").read_bytes()))
    result = segcal("apply", root / "ts.safetensors", root / "manifest.yaml", "--out", root / "out")

    assert result.exit_code == 1
    assert complaint in result.stderr
    assert not (root / "out").exists()


def test_audit_prints_a_table_and_the_verdicts(root: Path) -> None:
    result = segcal("audit", root / "ts.safetensors", root / "manifest.yaml")

    assert result.exit_code == 0, result.output
    assert "declared translation-invariant: holds (max |Δp|" in result.stdout
    assert "declared decision-preserving: holds (0 flips in 240 voxels)" in result.stdout
    assert "declared order-preserving: holds" in result.stdout
    assert "spatial std of the pooled free energy: mean" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[1:3]] == ["a", "b"]


def test_audit_in_json(root: Path) -> None:
    calibrator = saved(root, make_fitted("dc", SHIFTY))
    result = segcal("audit", calibrator, root / "manifest.yaml", "--json", "--seed", "3")

    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert values["holds"] is True
    assert values["n_flips"] == sum(case["n_flips"] for case in values["cases"]) > 0
    assert values["seed"] == 3
    assert set(values["free_energy_std"]) == {"mean", "p25", "p50", "p75"}


def test_audit_ends_with_1_when_a_declared_property_does_not_hold(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixScaling, "translation_invariant", True)
    calibrator = saved(root, make_fitted("ms", SHIFTY, classes=CLASSES))
    result = segcal("audit", calibrator, root / "manifest.yaml", "--quiet")

    assert result.exit_code == 1
    assert "declared translation-invariant: DOES NOT HOLD" in result.stderr


def test_a_file_that_declares_what_its_method_is_not_is_refused_before_it_is_audited(root: Path) -> None:
    honest = make_fitted("ms", SHIFTY, classes=CLASSES)
    info = honest.info.model_copy(update={"preserves": "argmax"})
    result = segcal("audit", saved(root, FittedCalibrator(honest.calibrator, info)), root / "manifest.yaml")

    assert result.exit_code == 1
    assert "metadata field `preserves` is 'argmax'" in result.stderr


@pytest.mark.parametrize("command", ["apply", "audit"])
def test_help_ends_with_an_example(command: str) -> None:
    result = segcal(command, "--help")

    assert result.exit_code == 0
    assert f"segcal {command} cms_ap.safetensors manifest.yaml" in result.stdout
