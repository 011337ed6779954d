"""A case from disk: pooled logits, labels and decision on one grid, or an error that says what does not fit."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import expit

from segcal import cases
from segcal.cases import CaseData, Want, load_case, load_deployed, load_poolings
from segcal.device import resolve_device
from segcal.errors import DataError, GeometryError, MissingFileError, UsageError
from segcal.io.members import Member, read_member
from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from segcal.types import IGNORED, Pooling

CPU = torch.device("cpu")
SHAPE = (4, 5, 6)
AFFINE = np.array([[-1.5, 0, 0, 10], [0, 1.5, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1.0]])
TILTED = np.array([[0, 0, 3, 1], [0, 1.5, 0, 2], [-1.5, 0, 0, 3], [0, 0, 0, 1.0]])
CLASSES = ["background", "organ", "tumour"]
AnyArray = np.ndarray[Any, Any]


def drawn_logits(n_members: int = 3, n_classes: int = 3, seed: int = 0) -> AnyArray:
    values = np.random.default_rng(seed).normal(scale=4, size=(n_members, n_classes, *SHAPE))
    return values.astype(np.float16)


def drawn_labels(n_labels: int = 3, seed: int = 1) -> AnyArray:
    return np.random.default_rng(seed).integers(0, n_labels, size=SHAPE).astype(np.uint8)


class Study:
    """A folder with one case and its manifest, changed piece by piece by the tests."""

    def __init__(self, folder: Path, logits: AnyArray | None = None) -> None:
        self.folder = folder
        self.logits = drawn_logits() if logits is None else logits
        self.labels = drawn_labels()
        self.case: dict[str, Any] = {"id": "case_1", "members": [], "label": "label.nii.gz"}
        self.content: dict[str, Any] = {"version": 1, "name": "test", "kind": "logits", "classes": CLASSES}
        for m, values in enumerate(self.logits):
            self.member(m, logits=values)
        self.label(self.labels)

    def member(self, m: int, **arrays: Any) -> None:
        name = f"member_{m}.npz"
        np.savez_compressed(self.folder / name, **arrays)
        if name not in self.case["members"]:
            self.case["members"].append(name)

    def label(self, values: AnyArray, affine: AnyArray = AFFINE) -> None:
        write_nifti(self.folder / "label.nii.gz", values, affine=affine)

    def load(self, pooling: Pooling = "logits", *, with_labels: bool = True, **options: Any) -> CaseData:
        manifest = self.manifest()
        case = manifest.case("case_1")
        return load_case(manifest, case, pooling=pooling, device=CPU, with_labels=with_labels, **options)

    def manifest(self) -> Manifest:
        return Manifest.from_content({**self.content, "cases": [self.case]}, self.folder / "manifest.yaml")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path)


def test_a_case_is_pooled_and_labelled(study: Study) -> None:
    case = study.load()
    mean = study.logits.astype(np.float64).mean(0)
    np.testing.assert_allclose(case.logits.numpy(), mean, atol=1e-5)
    assert case.labels is not None
    assert case.labels.dtype == torch.int64
    np.testing.assert_array_equal(case.labels.numpy(), study.labels)
    np.testing.assert_array_equal(case.decision.numpy(), case.logits.numpy().argmax(0))
    assert case.decision.dtype == torch.int64
    assert (case.region_labels, case.valid, case.inside, case.crop) == (None, None, None, None)
    assert (case.case_id, case.kind, case.n_floored) == ("case_1", "logits", 0)
    assert case.grid is not None
    np.testing.assert_allclose(case.grid.affine, AFFINE)


def test_ties_go_to_the_first_class(tmp_path: Path) -> None:
    assert (Study(tmp_path, np.ones((2, 3, *SHAPE), dtype=np.float16)).load().decision == 0).all()


def test_only_the_first_members_are_used_when_asked(study: Study) -> None:
    case = study.load(n_members=1)
    np.testing.assert_allclose(case.logits.numpy(), study.logits[0], atol=1e-6)
    for n_members in (0, 4):
        with pytest.raises(UsageError, match="the manifest lists 3"):
            study.load(n_members=n_members)


def test_both_poolings_differ_as_they_should(study: Study) -> None:
    p = torch.from_numpy(study.logits.astype(np.float64)).softmax(1).mean(0)
    np.testing.assert_allclose(study.load("probabilities").logits.exp().numpy(), p, atol=1e-6)


def test_several_poolings_of_one_read_are_the_single_ones(study: Study) -> None:
    wanted = [Want("logits"), Want("probabilities", 2), Want("logits", 1)]
    manifest = study.manifest()
    several = load_poolings(manifest, manifest.case("case_1"), wanted, device=CPU, with_labels=True)
    for want, found in zip(wanted, several, strict=True):
        alone = study.load(want.pooling, n_members=want.n_members)
        assert torch.equal(found.logits, alone.logits)
        assert torch.equal(found.decision, alone.decision)


def test_voxels_outside_the_crop_are_known_and_background(study: Study) -> None:
    crop = np.array([[1, 3], [0, 4], [2, 6]])
    for m, values in enumerate(study.logits):
        inside = np.full_like(values, np.nan)
        box = (slice(None), *(slice(a, b) for a, b in crop))
        inside[box] = values[box]
        study.member(m, logits=inside, crop=crop)
    case = study.load()
    assert case.crop == ((1, 3), (0, 4), (2, 6))
    assert case.inside is not None
    expected = np.zeros(SHAPE, dtype=bool)
    expected[1:3, 0:4, 2:6] = True
    np.testing.assert_array_equal(case.inside.numpy(), expected)
    assert (case.logits[:, ~case.inside] == 0).all()
    assert (case.decision[~case.inside] == 0).all()
    assert case.logits.isfinite().all()


def test_ignored_voxels_are_marked(study: Study) -> None:
    study.content["ignore_label"] = 255
    assert study.load().valid is None
    study.labels[0, 0, :3] = 255
    study.label(study.labels)
    case = study.load()
    assert case.labels is not None
    assert case.valid is not None
    np.testing.assert_array_equal(case.valid.numpy(), study.labels != 255)
    np.testing.assert_array_equal(case.labels.numpy(), np.where(study.labels == 255, IGNORED, study.labels.astype(int)))
    study.label(np.full_like(study.labels, 255))
    with pytest.raises(DataError, match="case_1: every voxel carries the ignore label 255"):
        study.load()


def test_labels_outside_the_classes_are_refused(study: Study) -> None:
    study.labels[1, 2, 3], study.labels[1, 2, 4] = 3, 200
    study.label(study.labels)
    with pytest.raises(
        DataError, match=r"case_1: .*label\.nii\.gz holds .*3, 200, expected 0 to 2 \(background.*`ignore_label`"
    ):
        study.load()
    study.label(np.where(study.labels > 2, -1, study.labels.astype(np.int16)).astype(np.int16))
    with pytest.raises(DataError, match="values -1, expected 0 to 2"):
        study.load()
    study.label(np.where(study.labels > 2, 10**6, study.labels.astype(np.int32)).astype(np.int32))
    with pytest.raises(DataError, match="values 1000000, expected"):
        study.load()


def test_a_label_of_another_shape_is_refused_with_a_hint_when_the_axes_are_reversed(study: Study) -> None:
    study.label(study.labels[:, :, :5])
    with pytest.raises(GeometryError, match=r"case_1: prediction grid \(4, 5, 6\).*label grid \(4, 5, 5\).*") as error:
        study.load()
    assert "cxyz" not in str(error.value)
    members, label = study.folder / "member_0.npz", study.folder / "label.nii.gz"
    assert f"({members} vs {label})" in str(error.value)  # both may have one name, in two folders
    assert "`segcal manifest check` says whether another order of axes would fit" in str(error.value)
    study.label(study.labels.transpose(2, 1, 0))
    with pytest.raises(GeometryError, match=r"set `axes: cxyz`"):
        study.load()


@pytest.mark.parametrize("role", ["label", "deployed"])
def test_the_voxels_of_another_image_are_not_unpacked(study: Study, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    study.label(study.labels[:, :, :5])
    study.case["deployed"] = "label.nii.gz"
    monkeypatch.setattr("segcal.case_labels.read_labels", lambda path: pytest.fail(f"unpacked {path.name}"))
    manifest = study.manifest()

    def load() -> object:
        if role == "label":
            return study.load()
        return load_deployed(manifest, manifest.case("case_1"), device=CPU, shape=SHAPE)

    with pytest.raises(GeometryError, match=r"grid \(4, 5, 5\)"):
        load()


def test_the_hint_works(study: Study) -> None:
    for m, values in enumerate(study.logits):
        study.member(m, logits=values.transpose(0, 3, 2, 1))
    with pytest.raises(GeometryError, match="cxyz"):
        study.load()
    study.content["axes"] = "cxyz"
    np.testing.assert_allclose(study.load().logits.numpy(), study.logits.astype(np.float64).mean(0), atol=1e-5)


def test_the_hint_names_the_other_order_than_the_manifest_has(study: Study) -> None:
    study.content["axes"] = "cxyz"
    with pytest.raises(GeometryError, match=r"says `axes: cxyz`.*\(class, z, y, x\), set `axes: czyx`"):
        study.load()


def nifti_members(study: Study, affines: list[AnyArray]) -> None:
    study.case["members"] = []
    for m, affine in enumerate(affines):
        write_nifti(study.folder / f"member_{m}.nii.gz", study.logits[m].astype(np.float32), affine=affine)
        study.case["members"].append(f"member_{m}.nii.gz")


def test_nifti_members_and_label_must_lie_in_one_place(study: Study) -> None:
    moved = AFFINE.copy()
    moved[0, 3] += 1
    nifti_members(study, [AFFINE, AFFINE])
    case = study.load()
    np.testing.assert_allclose(case.logits.numpy(), study.logits[:2].astype(np.float64).mean(0), atol=1e-5)
    study.label(study.labels, moved)
    with pytest.raises(GeometryError, match=r"case_1: label .*label\.nii\.gz .*elsewhere in space"):
        study.load()
    nifti_members(study, [AFFINE, moved])
    with pytest.raises(GeometryError, match=r"case_1: .*member_1\.nii\.gz lies elsewhere in space"):
        study.load(with_labels=False)


def test_a_wrong_number_of_channels_is_refused(study: Study) -> None:
    study.content["classes"] = ["background", "organ"]
    with pytest.raises(DataError, match=r"case_1: .*member_0\.npz has 3 channels but the manifest names 2 classes"):
        study.load()


def test_missing_files_and_labels_are_named(study: Study) -> None:
    (study.folder / "member_1.npz").unlink()
    with pytest.raises(MissingFileError, match=r"member_1\.npz"):
        study.load()
    study.case["members"].remove("member_1.npz")
    (study.folder / "label.nii.gz").unlink()
    with pytest.raises(MissingFileError, match=r"label\.nii\.gz"):
        study.load()
    assert study.load(with_labels=False).labels is None
    del study.case["label"]
    with pytest.raises(DataError, match="case_1: has no label"):
        study.load()


def test_without_labels_the_geometry_comes_from_the_file_beside(study: Study) -> None:
    del study.case["label"]
    assert study.load(with_labels=False).grid is None
    nib.save(nib.Nifti1Image(np.zeros(SHAPE[::-1], dtype=np.int16), TILTED), study.folder / "image.nii.gz")
    study.case["image"] = "image.nii.gz"
    grid = study.load(with_labels=False).grid
    assert grid is not None
    np.testing.assert_allclose(grid.affine, TILTED)
    study.case["deployed"] = "label.nii.gz"
    grid = study.load(with_labels=False).grid
    assert grid is not None
    np.testing.assert_allclose(grid.affine, AFFINE)
    nib.save(nib.Nifti1Image(np.zeros((3, 3, 3), dtype=np.int16), AFFINE), study.folder / "image.nii.gz")
    del study.case["deployed"]
    with pytest.raises(GeometryError, match=r"image grid \(3, 3, 3\)"):
        study.load(with_labels=False)


def test_a_flat_case_with_png_labels(tmp_path: Path) -> None:
    study = Study(tmp_path)
    for m, values in enumerate(study.logits):
        study.member(m, logits=values[:, 0])
    Image.fromarray(study.labels[0]).save(tmp_path / "label.png")
    study.case["label"] = "label.png"
    study.content["axes"] = "cyx"
    case = study.load()
    assert case.labels is not None
    np.testing.assert_array_equal(case.labels.numpy(), study.labels[:1])
    assert case.logits.shape == (3, 1, 5, 6)
    assert case.grid is not None
    assert (case.grid.shape, case.grid.affine) == ((1, 5, 6), None)


REGIONS = [
    {"name": "whole", "labels": [1, 2, 3]},
    {"name": "core", "labels": [2, 3]},
    {"name": "active", "labels": [3]},
]


@pytest.fixture
def region_study(tmp_path: Path) -> Study:
    study = Study(tmp_path)
    for m, values in enumerate(study.logits):
        study.member(m, probabilities=expit(values.astype(np.float32)))
    del study.content["classes"]
    study.content.update(kind="probabilities", regions=REGIONS, regions_class_order=[1, 2, 3])
    study.labels = drawn_labels(4)
    study.label(study.labels)
    return study


@pytest.mark.parametrize("pooling", ["logits", "probabilities"])
def test_region_models_have_a_label_and_a_decision_per_region(region_study: Study, pooling: Pooling) -> None:
    case = region_study.load(pooling)
    assert case.labels is None
    assert case.region_labels is not None
    expected = np.stack([np.isin(region_study.labels, region["labels"]) for region in REGIONS])
    np.testing.assert_array_equal(case.region_labels.numpy(), expected)
    p = expit(region_study.logits.astype(np.float32)).astype(np.float64)
    log_odds = np.log(p / (1 - p)).mean(0) if pooling == "logits" else np.log(p.mean(0) / (1 - p.mean(0)))
    np.testing.assert_allclose(case.logits.numpy(), log_odds, rtol=1e-4, atol=1e-4)
    assert case.decision.dtype == torch.bool
    np.testing.assert_array_equal(case.decision.numpy(), case.logits.numpy() > 0)
    assert case.valid is None


def test_region_models_know_ignored_voxels_and_refuse_labels_of_no_region(region_study: Study) -> None:
    region_study.labels[0, 0, 0] = 4
    region_study.label(region_study.labels)
    with pytest.raises(DataError, match=r"values 4, expected 0 or a label of a region \(1, 2, 3\)"):
        region_study.load()
    region_study.content["ignore_label"] = 4
    case = region_study.load()
    assert case.valid is not None
    np.testing.assert_array_equal(case.valid.numpy(), region_study.labels != 4)
    assert case.region_labels is not None
    assert not case.region_labels[:, 0, 0, 0].any()


def test_the_deployed_segmentation_is_read_and_checked(study: Study) -> None:
    manifest = study.manifest()
    assert load_deployed(manifest, manifest.case("case_1"), device=CPU) is None
    deployed = drawn_labels(seed=5)
    write_nifti(study.folder / "deployed.nii.gz", deployed, affine=AFFINE)
    study.case["deployed"] = "deployed.nii.gz"
    manifest = study.manifest()
    found = load_deployed(manifest, manifest.case("case_1"), device=CPU, shape=SHAPE)
    assert found is not None
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), deployed)
    with pytest.raises(GeometryError, match=r"deployed segmentation grid \(4, 5, 6\)"):
        load_deployed(manifest, manifest.case("case_1"), device=CPU, shape=(4, 5, 7))
    deployed[0, 0, 0] = 9
    write_nifti(study.folder / "deployed.nii.gz", deployed, affine=AFFINE)
    with pytest.raises(DataError, match=r"deployed\.nii\.gz holds the label values 9"):
        load_deployed(manifest, manifest.case("case_1"), device=CPU)


def test_values_that_are_not_finite_name_the_file(study: Study) -> None:
    study.logits[1, 0, 0, 0, 0] = np.nan
    study.member(1, logits=study.logits[1])
    with pytest.raises(DataError, match=r"member_1\.npz: 1 of 360 values"):
        study.load()


def test_at_most_two_members_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(tmp_path, drawn_logits(n_members=8))
    read: list[weakref.ref[Member]] = []
    lock = threading.Lock()

    def watched(path: Path, **options: Any) -> Member:
        member = read_member(path, **options)
        with lock:
            read.append(weakref.ref(member))
        return member

    class Executor(ThreadPoolExecutor):
        n_started = 0

        def submit(self, *args: Any, **options: Any) -> Future[Any]:
            # The one that asks for another member is the one that holds them. A thread that has just delivered one
            # may need a moment to leave its last frame, hence the patience.
            self.n_started += 1
            gone = self.n_started - cases.MEMBERS_IN_MEMORY
            for _ in range(300):
                if sum(ref() is None for ref in read) >= gone:
                    return super().submit(*args, **options)
                time.sleep(0.01)
            raise AssertionError(f"read {self.n_started} starts while {len(read)} members are still in memory")

    monkeypatch.setattr(cases, "read_member", watched)
    monkeypatch.setattr(cases, "ThreadPoolExecutor", Executor)
    case = study.load()
    assert len(read) == 8
    assert cases.MEMBERS_IN_MEMORY == 2
    np.testing.assert_allclose(case.logits.numpy(), study.logits.astype(np.float64).mean(0), atol=1e-5)


def test_the_result_does_not_depend_on_which_member_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(tmp_path, drawn_logits(n_members=6))
    expected = study.load().logits
    first_done = threading.Event()

    def late(path: Path, **options: Any) -> Member:
        if path.name == "member_0.npz":
            first_done.wait(timeout=10)
        member = read_member(path, **options)
        first_done.set()
        return member

    monkeypatch.setattr(cases, "read_member", late)
    assert torch.equal(study.load().logits, expected)


def test_real_cases_agree_with_numpy(hippocampus: Path) -> None:
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    case = manifest.cases[0]
    data = load_case(manifest, case, pooling="logits", device=CPU, with_labels=True)
    mean = np.mean([np.load(manifest.resolve(m))["logits"].astype(np.float64) for m in case.members], axis=0)
    np.testing.assert_allclose(data.logits.numpy(), mean, atol=1e-5)
    assert data.labels is not None
    assert (data.labels == data.decision).float().mean() > 0.9


def test_devices_are_resolved_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def present(cuda: bool, mps: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    present(cuda=False, mps=False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    for name in ("cuda", "mps"):
        with pytest.raises(UsageError, match=f"'{name}' is not available.*--device auto"):
            resolve_device(name)
    with pytest.raises(UsageError, match="auto, cpu, cuda, mps"):
        resolve_device("gpu")
    present(cuda=False, mps=True)
    assert resolve_device("auto").type == "mps"
    present(cuda=True, mps=True)
    assert resolve_device("auto").type == resolve_device("cuda").type == "cuda"
