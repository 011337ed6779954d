"""Cross-validation folders to a manifest: every case by the fold that did not see it, everything doubtful said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from segcal.cases import load_case
from segcal.errors import FileFormatError, ManifestError, MissingFileError
from segcal.fitting.run import fit
from segcal.manifest import Manifest
from segcal.nnunet.collect import OutOfFold, collect_out_of_fold
from segcal_cli.main import app
from tests.apply_data import random_logits, rotated
from tests.nnunet.folders import REGION_LABELS, decided, filled, inside, turned_affine, write_case, write_documents
from tests.nnunet.folders import write_labels as write_map

SHAPE = (3, 6, 7, 8)
BOX = ((1, 4), (0, 7), (3, 8))
MODEL = "Dataset007_Liver/nnUNetTrainer__nnUNetPlans__3d_fullres"
SPLITS = [{"train": ["c", "d"], "val": ["a", "b"]}, {"train": ["a", "b"], "val": ["c", "d"]}]


def collect(root: Path, **how: Any) -> OutOfFold:
    return collect_out_of_fold(root / MODEL, labels=root / "labelsTr", out=root / "oof.yaml", **how)


def add_case(root: Path, fold: int | str, case_id: str, seed: int, **how: Any) -> None:
    probs = filled(random_logits(seed, SHAPE), how.get("box"))
    write_case(root / MODEL / f"fold_{fold}" / "validation", case_id, probs, **how)
    truth = decided(filled(random_logits(seed + 100, SHAPE), None))
    write_map(root / "labelsTr" / f"{case_id}.nii.gz", truth, how.get("affine", rotated()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two folds of two cases; case b was cropped."""
    write_documents(tmp_path / MODEL)
    for seed, (fold, case_id) in enumerate([(0, "a"), (0, "b"), (1, "c"), (1, "d")]):
        add_case(tmp_path, fold, case_id, seed, **({"box": BOX} if case_id == "b" else {}))
    (tmp_path / "splits_final.json").write_text(json.dumps(SPLITS))
    return tmp_path


def test_every_case_has_the_one_prediction_of_its_fold(root: Path) -> None:
    found = collect(root, splits=root / "splits_final.json")

    manifest = found.manifest
    assert {case.id: case.members for case in manifest.cases} == {
        case_id: (f"{MODEL}/fold_{fold}/validation/{case_id}.npz",)
        for fold, case_id in [(0, "a"), (0, "b"), (1, "c"), (1, "d")]
    }
    assert [case.label for case in manifest.cases] == [f"labelsTr/{case_id}.nii.gz" for case_id in "abcd"]
    assert (manifest.kind, manifest.classes, manifest.name) == (
        "probabilities",
        ("background", "liver", "tumour"),
        "Dataset007_Liver",
    )
    assert manifest.prediction is not None
    assert manifest.prediction.model_dump(exclude_none=True) == {"mirroring": True, "step_size": 0.5}
    assert found.cases_by_fold == {0: 2, 1: 2}
    assert len(found.warnings) == 1
    assert "single model" in found.warnings[0]


def test_the_filling_around_a_crop_is_not_fitted_on(root: Path) -> None:
    manifest = collect(root).manifest.save(root / "elsewhere.yaml")

    data = load_case(
        Manifest.load(root / "elsewhere.yaml"),
        manifest.case("b"),
        pooling="logits",
        device=torch.device("cpu"),
        with_labels=True,
    )

    expected = np.zeros(SHAPE[1:], dtype=bool)
    expected[inside(BOX)[1:]] = True
    assert data.inside is not None
    np.testing.assert_array_equal(data.inside.numpy(), expected)
    assert [case.crop for case in manifest.cases if case.id != "b"] == [None] * 3


def test_the_manifest_can_be_fitted(root: Path) -> None:
    manifest = collect(root).manifest.save(root / "oof.yaml")

    fitted = fit(manifest, method="ts", device=torch.device("cpu"))

    assert fitted.info.prediction is not None
    assert fitted.info.prediction.items() >= {"mirroring": True, "step_size": 0.5}.items()
    assert fitted.info.kind == "probabilities"


def test_fold_all_is_refused(root: Path) -> None:
    add_case(root, "all", "a", 0)
    assert any("fold_all was left out" in warning for warning in collect(root).warnings)
    assert not any("fold_all" in member for case in collect(root).manifest.cases for member in case.members)

    for fold in (0, 1):
        (root / MODEL / f"fold_{fold}").rename(root / f"gone_{fold}")
    with pytest.raises(ManifestError, match="trained on every case"):
        collect(root)


def test_cases_a_fold_was_trained_on_are_left_out(root: Path) -> None:
    splits = [{"train": ["b", "c", "d"], "val": ["a", "b"]}, {"train": ["a", "b"], "val": ["c"]}]
    (root / "splits_final.json").write_text(json.dumps(splits))

    found = collect(root, splits=root / "splits_final.json")

    assert [case.id for case in found.manifest.cases] == ["a", "c", "d"]
    assert any("overlap" in w and "fold 0 was trained on them: b" in w for w in found.warnings)
    assert any("fold 1 predicted cases that splits_final.json does not give it: d" in w for w in found.warnings)


def test_a_case_of_several_folds_is_taken_once_and_said(root: Path) -> None:
    add_case(root, 1, "a", 9)

    found = collect(root)

    assert found.manifest.case("a").members == (f"{MODEL}/fold_0/validation/a.npz",)
    assert any("validated by several folds, the first one was taken: a" in w for w in found.warnings)


def test_a_fold_that_the_splits_do_not_describe_is_said(root: Path) -> None:
    (root / "splits_final.json").write_text(json.dumps(SPLITS[:1]))

    found = collect(root, splits=root / "splits_final.json")

    assert any("nothing says what fold 1 was trained on" in warning for warning in found.warnings)


def test_missing_probabilities_are_said_with_the_command_that_makes_them(root: Path) -> None:
    (root / MODEL / "fold_1" / "validation" / "d.npz").unlink()
    command = "nnUNetv2_train Dataset007_Liver 3d_fullres 1 --val --npz"
    found = collect(root)
    assert any("fold 1: without saved probabilities: d;" in w and command in w for w in found.warnings)
    assert [case.id for case in found.manifest.cases] == ["a", "b", "c"]

    for path in (root / MODEL).rglob("*.npz"):
        path.unlink()
    with pytest.raises(ManifestError, match=rf"no fold has saved probabilities.*{command}"):
        collect(root)


def test_another_trainer_and_plan_are_part_of_the_command(tmp_path: Path) -> None:
    model = tmp_path / "Dataset001_X" / "MyTrainer__MyPlans__2d"
    (model / "fold_3" / "validation").mkdir(parents=True)
    with pytest.raises(ManifestError, match="nnUNetv2_train Dataset001_X 2d 3 --val --npz -tr MyTrainer -p MyPlans"):
        collect_out_of_fold(model, labels=tmp_path, out=tmp_path / "m.yaml")


def test_labels_that_do_not_belong_are_said_or_refused(root: Path) -> None:
    (root / "labelsTr" / "c.nii.gz").unlink()
    found = collect(root)
    assert found.manifest.case("c").label is None
    assert any(warning.endswith("labelsTr: c") for warning in found.warnings)

    for path in (root / "labelsTr").iterdir():
        path.unlink()
    with pytest.raises(ManifestError, match="no label belongs to a case"):
        collect(root)
    with pytest.raises(MissingFileError):
        collect_out_of_fold(root / MODEL, labels=root / "nowhere", out=root / "oof.yaml")


def test_region_models_bring_their_regions(tmp_path: Path) -> None:
    write_documents(tmp_path / MODEL, labels=REGION_LABELS)
    probs = filled(random_logits(0, (2, *SHAPE[1:])), BOX, regions=True)
    write_case(tmp_path / MODEL / "fold_0" / "validation", "a", probs, box=BOX, regions=True)
    (tmp_path / MODEL / "fold_0" / "validation" / "a.pkl").unlink()
    write_map(tmp_path / "labelsTr" / "a.nii.gz", decided(probs, regions=True), rotated())

    found = collect(tmp_path)

    manifest = found.manifest
    assert (manifest.class_names, manifest.regions_class_order) == (("whole", "core"), (1, 2))
    assert manifest.ignore_label == 3
    assert manifest.case("a").crop == BOX
    assert any("there is no .pkl" in warning for warning in found.warnings)


def test_labels_of_another_orientation_than_the_reader_turned_to_are_refused(root: Path) -> None:
    write_documents(root / MODEL, reader="NibabelIOWithReorient")
    for path in (root / "labelsTr").iterdir():
        write_map(path, np.asarray(nib.load(path).dataobj).T, np.diag([0.8, 1.1, 2.5, 1.0]))
    assert len(collect(root).manifest.cases) == 4

    labels = np.asarray(nib.load(root / "labelsTr" / "c.nii.gz").dataobj).T
    write_map(root / "labelsTr" / "c.nii.gz", labels, turned_affine())
    with pytest.raises(ManifestError, match=r"c\.nii\.gz.*RAS.*1 of 4"):
        collect(root)


@pytest.mark.parametrize("content", ["{}}", "[1]", '[{"train": ["a"]}]', '[{"train": "a", "val": []}]'])
def test_a_file_that_is_no_splits_file_is_refused(root: Path, content: str) -> None:
    (root / "splits_final.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"splits_final\.json"):
        collect(root, splits=root / "splits_final.json")


def test_the_command_writes_a_manifest_that_checks_well(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nnunetv2", None)
    arguments = ["nnunet", "collect", root / MODEL, "--labels", root / "labelsTr", "--out", root / "oof.yaml"]
    words = [str(argument) for argument in [*arguments, "--splits", root / "splits_final.json"]]

    result = CliRunner().invoke(app, words)

    assert result.exit_code == 0, result.output
    assert "4 out-of-fold cases (4 labelled) of folds 0, 1" in result.stdout
    assert "single model" in result.stderr
    checked = CliRunner().invoke(app, ["manifest", "check", str(root / "oof.yaml"), "--json"])
    assert json.loads(checked.stdout)["counts"].get("fatal", 0) == 0
    assert CliRunner().invoke(app, words).exit_code == 2
