"""A manifest made from folders names the right files, the right classes, and everything that found no partner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segcal.errors import FileFormatError, ManifestError, MissingFileError
from segcal.io.dataset_json import read_dataset_json
from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from segcal.manifest_scan import ScanResult, scan

IDS = ("liver_001", "liver_002", "liver_010")
LABELS = {"background": 0, "lesion": 2, "liver": 1}


def write_npz(path: Path, *, n_channels: int = 3, key: str = "probabilities") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{key: np.full((n_channels, 1, 2, 2), 1 / n_channels, np.float32)})


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two folders as nnU-Net leaves them: npz, segmentation, pickle and json files side by side."""
    for fold in ("fold_0", "fold_1"):
        for case in IDS:
            write_npz(tmp_path / fold / f"{case}.npz")
            touch(tmp_path / fold / f"{case}.nii.gz", tmp_path / fold / f"{case}.pkl")
        write_json(tmp_path / fold / "plans.json", {})
    for case in IDS:
        touch(tmp_path / "labels" / f"{case}.nii.gz")
        touch(*(tmp_path / "images" / f"{case}_000{k}.nii.gz" for k in range(2)))
    return tmp_path


def scanned(root: Path, *, folds: tuple[str, ...] = ("fold_0", "fold_1"), **options: Any) -> ScanResult:
    options = {"kind": "probabilities", "out": root / "manifest.yaml"} | options
    return scan([root / fold for fold in folds], **options)


def test_cases_are_matched_by_name_and_paths_are_relative(root: Path) -> None:
    result = scanned(root, labels=root / "labels", images=root / "images", deployed=root / "fold_0")

    manifest = result.manifest
    assert [case.id for case in manifest.cases] == list(IDS)
    first = manifest.cases[0]
    assert first.members == ("fold_0/liver_001.npz", "fold_1/liver_001.npz")
    assert first.label == "labels/liver_001.nii.gz"
    assert first.image == "images/liver_001_0000.nii.gz"
    assert first.deployed == "fold_0/liver_001.nii.gz"
    assert (manifest.kind, manifest.axes, manifest.name) == ("probabilities", "czyx", root.name)
    assert result.unmatched == ()
    assert not (root / "manifest.yaml").exists()


def test_a_scan_survives_being_written(root: Path) -> None:
    result = scanned(root, labels=root / "labels")

    result.manifest.save(root / "manifest.yaml")

    assert Manifest.load(root / "manifest.yaml").sha256 == result.manifest.sha256


def test_the_order_of_members_is_the_order_given(root: Path) -> None:
    result = scanned(root, folds=("fold_1", "fold_0"))

    assert result.manifest.cases[0].members == ("fold_1/liver_001.npz", "fold_0/liver_001.npz")


@pytest.mark.parametrize("out", ["deep/er/manifest.yaml", "../beside.yaml"])
def test_a_manifest_elsewhere_reaches_the_same_files(root: Path, out: str) -> None:
    result = scanned(root, out=root / out, labels=root / "labels")

    case = result.manifest.cases[0]
    (root / "deep" / "er").mkdir(parents=True)
    for path, original in [(case.members[0], "fold_0/liver_001.npz"), (case.label or "", "labels/liver_001.nii.gz")]:
        assert result.manifest.resolve(path).samefile(root / original)


def test_a_linked_member_folder_keeps_its_name_beside_the_manifest(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(root / "fold_0", target_is_directory=True)

    result = scanned(root, folds=("link",))

    assert result.manifest.cases[0].members == ("link/liver_001.npz",)


def test_a_manifest_in_a_linked_folder_reaches_its_files(root: Path) -> None:
    (root / "far" / "away").mkdir(parents=True)
    (root / "link").symlink_to(root / "far" / "away", target_is_directory=True)

    manifest = scanned(root, out=root / "link" / "manifest.yaml").manifest

    assert manifest.resolve(manifest.cases[0].members[0]).samefile(root / "fold_0" / "liver_001.npz")


def test_relative_folders_and_a_relative_target_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "fold_0")

    result = scan([Path(), Path("../fold_1")], kind="probabilities", out=Path("../manifest.yaml"))

    assert [result.manifest.resolve(m).exists() for m in result.manifest.cases[0].members] == [True, True]
    assert all(not Path(m).is_absolute() for m in result.manifest.cases[0].members)


def test_what_found_no_partner_is_said(root: Path) -> None:
    (root / "fold_1" / "liver_002.npz").unlink()
    (root / "labels" / "liver_010.nii.gz").unlink()
    touch(root / "labels" / "liver_099.nii.gz")
    for k in range(2):
        (root / "images" / f"liver_001_000{k}.nii.gz").unlink()

    result = scanned(root, labels=root / "labels", images=root / "images")

    assert [case.id for case in result.manifest.cases] == ["liver_001", "liver_010"]
    assert result.manifest.case("liver_010").label is None
    assert result.unmatched == (
        f"left out, no file in {root / 'fold_1'}: liver_002",
        f"no label in {root / 'labels'}: liver_010",
        f"label without members in {root / 'labels'}: liver_099",
        f"no image in {root / 'images'}: liver_001",
    )


def test_long_lists_are_cut(root: Path) -> None:
    touch(*(root / "labels" / f"other_{i}.nii.gz" for i in range(20)))

    (sentence,) = scanned(root, labels=root / "labels").unmatched

    assert sentence.endswith("and 12 more")


def test_folders_without_a_common_case_are_refused_with_examples(root: Path) -> None:
    for case in IDS:
        (root / "fold_1" / f"{case}.npz").rename(root / "fold_1" / f"{case}_softmax.npz")

    with pytest.raises(ManifestError, match=r"no case is in all 2 .*liver_001.*liver_001_softmax"):
        scanned(root)


@pytest.mark.parametrize("option", ["labels", "images", "deployed"])
def test_a_folder_that_matches_nothing_is_refused(root: Path, option: str) -> None:
    touch(root / "foreign" / "spleen_1.nii.gz")

    with pytest.raises(ManifestError, match=r"foreign: no \w+ file belongs to a case \(it has spleen_1"):
        scanned(root, **{option: root / "foreign"})


def test_missing_and_empty_folders_are_refused(root: Path) -> None:
    with pytest.raises(MissingFileError, match="gone"):
        scanned(root, labels=root / "gone")
    with pytest.raises(MissingFileError, match="fold_7"):
        scanned(root, folds=("fold_0", "fold_7"))
    (root / "empty").mkdir()
    with pytest.raises(ManifestError, match=r"holds no \.npz.*--save_probabilities"):
        scanned(root, folds=("empty",))


def test_a_folder_of_segmentations_is_recognised(root: Path) -> None:
    (root / "seg").mkdir()
    write_nifti(root / "seg" / "liver_001.nii.gz", np.zeros((2, 2, 2), np.uint8), affine=np.eye(4))

    with pytest.raises(ManifestError, match=r"segmentation.*--save_probabilities"):
        scanned(root, folds=("seg",))


def test_nifti_members_are_taken_when_there_is_no_npz(root: Path) -> None:
    (root / "maps").mkdir()
    write_nifti(root / "maps" / "liver_001.nii.gz", np.zeros((4, 2, 2, 2), np.float32), affine=np.eye(4))

    manifest = scanned(root, folds=("maps",), kind="logits").manifest

    assert manifest.cases[0].members == ("maps/liver_001.nii.gz",)
    assert manifest.n_classes == 4


def test_the_declared_kind_must_be_the_files(root: Path) -> None:
    with pytest.raises(FileFormatError, match=r"`probabilities`.*`kind: logits`"):
        scanned(root, kind="logits")


def test_two_files_for_one_case_are_refused(root: Path) -> None:
    touch(root / "labels" / "liver_001.png")

    with pytest.raises(ManifestError, match=r"both liver_001\.nii\.gz and liver_001\.png"):
        scanned(root, labels=root / "labels")


def test_hidden_files_and_folders_are_no_cases(root: Path) -> None:
    touch(root / "fold_0" / "._liver_001.npz", root / "labels" / ".DS_Store.nii.gz")
    (root / "fold_0" / "folder.npz").mkdir()

    assert len(scanned(root, folds=("fold_0",)).manifest.cases) == 3


def test_an_image_without_channel_number_goes_first(root: Path) -> None:
    touch(root / "images" / "liver_001.png")

    manifest = scanned(root, images=root / "images").manifest

    assert manifest.case("liver_001").image == "images/liver_001.png"
    assert manifest.case("liver_002").image == "images/liver_002_0000.nii.gz"


def test_case_ids_that_end_in_four_digits_keep_them(tmp_path: Path) -> None:
    for case in ("street_0001", "street_0002"):
        write_npz(tmp_path / "seed_0" / f"{case}.npz")
        touch(tmp_path / "images" / f"{case}_0000.png", tmp_path / "labels" / f"{case}.png")

    manifest = scanned(tmp_path, folds=("seed_0",), images=tmp_path / "images", labels=tmp_path / "labels").manifest

    assert manifest.case("street_0002").image == "images/street_0002_0000.png"
    assert manifest.case("street_0002").label == "labels/street_0002.png"


# --- classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["fold_1/dataset.json", "dataset.json"])
def test_classes_come_from_a_dataset_json_nearby_in_the_order_of_their_values(root: Path, place: str) -> None:
    write_json(root / place, {"labels": LABELS | {"ignore": 3}})

    result = scanned(root)

    assert result.manifest.class_names == ("background", "liver", "lesion")
    assert result.manifest.ignore_label == 3
    assert result.source == f"from {root / place}"


def test_the_labels_parent_is_looked_at_too(root: Path, tmp_path: Path) -> None:
    for case in IDS:
        touch(tmp_path / "raw" / "labelsTr" / f"{case}.nii.gz")
    write_json(tmp_path / "raw" / "dataset.json", {"labels": {"0": "background", "1": "liver", "2": "tumour"}})

    manifest = scanned(root, labels=tmp_path / "raw" / "labelsTr").manifest

    assert manifest.class_names == ("background", "liver", "tumour")


def test_a_named_dataset_json_goes_before_one_nearby(root: Path) -> None:
    write_json(root / "dataset.json", {"labels": {"wrong": 0, "one": 1}})
    other = write_json(root / "model" / "dataset.json", {"labels": LABELS})

    assert scanned(root, dataset_json=other).manifest.class_names == ("background", "liver", "lesion")


def test_given_classes_go_before_a_dataset_json_nearby(root: Path) -> None:
    write_json(root / "dataset.json", {"labels": LABELS})

    assert scanned(root, classes=["a", "b", "c"]).manifest.class_names == ("a", "b", "c")


def test_without_names_classes_are_numbered(root: Path) -> None:
    result = scanned(root)

    assert result.manifest.class_names == ("class_0", "class_1", "class_2")
    assert "no dataset.json" in result.source


def test_regions_are_taken_in_the_order_of_the_file(root: Path) -> None:
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4}
    write_json(root / "dataset.json", {"labels": labels, "regions_class_order": [1, 2, 3]})

    manifest = scanned(root).manifest

    assert manifest.regions is not None
    assert [(region.name, region.labels) for region in manifest.regions] == [
        ("whole", (1, 2, 3)),
        ("core", (2, 3)),
        ("enhancing", (3,)),
    ]
    assert manifest.regions_class_order == (1, 2, 3)
    assert manifest.ignore_label == 4
    assert manifest.classes is None


def test_names_that_do_not_fit_the_channels_are_refused(root: Path) -> None:
    write_json(root / "dataset.json", {"labels": LABELS | {"vessel": 3}})

    with pytest.raises(ManifestError, match=r"has 3 channels, but there are 4 names \(background, liver, lesion, ves"):
        scanned(root)


def test_members_of_models_with_different_labels_are_refused(root: Path) -> None:
    write_json(root / "fold_0" / "dataset.json", {"labels": LABELS})
    write_json(root / "fold_1" / "dataset.json", {"labels": {"background": 0, "liver": 2, "lesion": 1}})

    with pytest.raises(ManifestError, match="describe different labels"):
        scanned(root)


def test_both_names_and_a_dataset_json_are_refused(root: Path) -> None:
    with pytest.raises(ManifestError, match="give one of them"):
        scanned(root, classes=["a", "b", "c"], dataset_json=root / "dataset.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no `labels`"),
        ([], "no JSON object"),
        ({"labels": {"a": 0, "b": "x"}}, "'b' is 'x'"),
        ({"labels": {"a": 0, "b": True}}, "'b' is True"),
        ({"labels": {"a": 0, "b": []}}, r"'b' is \[\]"),
        ({"labels": {"a": 0, "b": 2}}, r"are \[0, 2\]; expected 0\.\.1"),
        ({"labels": {"a": 0, "b": 1, "c": 1}}, r"are \[0, 1, 1\]"),
        ({"labels": {"a": 0, "b": 1, "ignore": [2, 3]}}, "single value"),
        ({"labels": {"a": 0, "b": [1, 2]}}, "regions_class_order is None; expected a list of 1"),
        ({"labels": {"a": 0, "b": [1, 2]}, "regions_class_order": [1, 2]}, r"is \[1, 2\]; expected a list of 1"),
    ],
)
def test_a_dataset_json_that_says_nothing_clear_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_dataset_json(write_json(tmp_path / "dataset.json", content))


def test_an_unreadable_dataset_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dataset.json"
    path.write_text("{")
    with pytest.raises(FileFormatError, match="not valid JSON"):
        read_dataset_json(path)
    with pytest.raises(MissingFileError):
        read_dataset_json(tmp_path / "gone.json")
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_dataset_json(tmp_path)


def test_a_damaged_file_does_not_hide_the_others(tmp_path: Path) -> None:
    for case_id in IDS:
        write_npz(tmp_path / f"m/{case_id}.npz")
    (tmp_path / f"m/{IDS[0]}.npz").write_bytes(b"no archive")
    found = scan([tmp_path / "m"], kind="probabilities", out=tmp_path / "manifest.yaml")
    assert [case.id for case in found.manifest.cases] == list(IDS)
    assert found.manifest.n_classes == 3
    for case_id in IDS:
        (tmp_path / f"m/{case_id}.npz").write_bytes(b"no archive")
    with pytest.raises(FileFormatError, match=IDS[0]):
        scan([tmp_path / "m"], kind="probabilities", out=tmp_path / "manifest.yaml")
