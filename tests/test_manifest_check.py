"""Every fault a manifest's files can have is found and named; a sound dataset gives no finding."""

from __future__ import annotations

import json
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from segcal.checks.orientation import Orientation, fitting_orientations, orientation_dice
from segcal.checks.turned import Turned, compare_orientations
from segcal.errors import DataError
from segcal.io.members import Member, read_member
from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from segcal.manifest_check import CheckReport, Finding, check_manifest
from segcal.pooling import Pool, Pooled

SHAPE = (6, 8, 10)
CLASSES = ["background", "liver", "lesion"]
AFFINE = np.diag([-1.5, -1.5, 3.0, 1.0])

Array = NDArray[Any]


def truth(shape: tuple[int, ...] = SHAPE) -> Array:
    """A label without any symmetry: a liver in one corner, a lesion at its side."""
    z, y, x = shape
    labels = np.zeros(shape, np.uint8)
    labels[: z // 2, 1 : y // 2 + 1, : x // 2] = 1
    labels[z // 2 - 1 : z // 2 + 1, y // 2 : y // 2 + 2, x // 2 - 1 : x // 2 + 2] = 2
    return labels


def logits_of(labels: Array, seed: int, n_classes: int = 3) -> Array:
    """Logits that decide for the label nearly everywhere, (class, z, y, x) float16."""
    noise = np.random.default_rng(seed).normal(size=(n_classes, *labels.shape))
    return (5 * (np.arange(n_classes)[:, None, None, None] == labels) + noise).astype(np.float16)


def softmax(logits: Array) -> Array:
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=0).astype(np.float64))
    return (powers / powers.sum(axis=0)).astype(np.float32)


class Dataset:
    """Files of a small sound dataset in a folder, with handles to spoil them."""

    def __init__(self, root: Path, *, n_cases: int = 2, n_members: int = 2, kind: str = "logits") -> None:
        self.root, self.kind, self.n_members = root, kind, n_members
        self.ids = [f"case_{i}" for i in range(n_cases)]
        self.content: dict[str, Any] = {"version": 1, "name": "d", "kind": kind, "classes": CLASSES}
        self.content["cases"] = [
            {
                "id": case,
                "members": [f"member_{m}/{case}.npz" for m in range(n_members)],
                "label": f"labels/{case}.nii.gz",
                "image": f"images/{case}_0000.nii.gz",
            }
            for case in self.ids
        ]
        for folder in ("labels", "images", "deployed", *(f"member_{m}" for m in range(n_members))):
            (root / folder).mkdir()
        for i, case in enumerate(self.ids):
            self.label(case, truth())
            self.image(case, np.ones(SHAPE, np.float32))
            for m in range(n_members):
                logits = logits_of(truth(), seed=10 * i + m)
                self.member(case, m, logits if kind == "logits" else softmax(logits))

    def member(self, case: str, m: int, values: Array, **extra: Array) -> Path:
        path = self.root / f"member_{m}" / f"{case}.npz"
        np.savez_compressed(path, **{self.kind: values}, **extra)
        return path

    def members(self, case: str, change: Callable[[Array], Array]) -> None:
        """Change every member of a case."""
        for m in range(self.n_members):
            with np.load(self.root / f"member_{m}" / f"{case}.npz") as file:
                values = file[self.kind]
            self.member(case, m, change(values))

    def label(self, case: str, values: Array, affine: Array = AFFINE) -> None:
        write_nifti(self.root / "labels" / f"{case}.nii.gz", values, affine=affine)

    def image(self, case: str, values: Array, affine: Array = AFFINE) -> None:
        write_nifti(self.root / "images" / f"{case}_0000.nii.gz", values, affine=affine)

    def deployed(self, case: str, values: Array) -> None:
        self.content["cases"][self.ids.index(case)]["deployed"] = f"deployed/{case}.nii.gz"
        write_nifti(self.root / "deployed" / f"{case}.nii.gz", values, affine=AFFINE)

    def manifest(self) -> Manifest:
        path = self.root / "manifest.yaml"
        path.write_text(yaml.safe_dump(self.content))
        return Manifest.load(path)

    def check(self, **options: Any) -> CheckReport:
        return check_manifest(self.manifest(), **options)

    def only(self, code: str) -> Finding:
        """The single finding of the check, which must have this code."""
        report = self.check()
        assert [finding.code for finding in report.findings] == [code]
        return report.findings[0]


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path)


@pytest.fixture
def probabilities(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path, kind="probabilities")


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_a_sound_dataset_gives_no_finding(tmp_path: Path, kind: str) -> None:
    data = Dataset(tmp_path, kind=kind)
    data.deployed("case_0", truth())
    steps: list[tuple[str, int, int]] = []

    report = data.check(progress=lambda *step: steps.append(step))

    assert report.findings == ()
    assert not report.has_fatal
    assert (report.n_cases, report.n_files) == (2, 9)
    assert steps == [("check", 1, 2), ("check", 2, 2)]
    assert "0 fatal, 0 warning, 0 note" in report.summary()


def test_the_real_ensemble_gives_no_finding(hippocampus: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((hippocampus / "manifest.yaml").read_text())
    content |= {"cases": content["cases"][:12], "splits": []}
    manifest = Manifest.from_content(content, hippocampus / "manifest.yaml")

    assert check_manifest(manifest).findings == ()


# --- files -----------------------------------------------------------------------------------------------------------


def test_broken_files_do_not_stop_the_check_of_the_others(data: Dataset) -> None:
    (data.root / "member_1" / "case_0.npz").write_bytes(b"PK\x03\x04 cut off")
    (data.root / "labels" / "case_0.nii.gz").unlink()
    (data.root / "images" / "case_1_0000.nii.gz").write_bytes(b"no image")
    (data.root / "member_0" / "case_1.npz").unlink()
    (data.root / "labels" / "case_1.nii.gz").write_bytes((data.root / "labels" / "case_1.nii.gz").read_bytes()[:-30])

    report = data.check()

    assert [(f.code, f.severity, f.case, f.file) for f in report.findings] == [
        ("unreadable_file", "fatal", "case_0", "member_1/case_0.npz"),
        ("missing_file", "fatal", "case_0", "labels/case_0.nii.gz"),
        ("missing_file", "fatal", "case_1", "member_0/case_1.npz"),
        ("unreadable_file", "fatal", "case_1", "labels/case_1.nii.gz"),
        ("unreadable_file", "warning", "case_1", "images/case_1_0000.nii.gz"),
    ]
    assert report.has_fatal
    assert report.n_files == 8


def test_an_error_no_reader_foresaw_is_a_finding_too(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise RuntimeError(f"decoder gave up on {path.name}")

    monkeypatch.setattr("segcal.checks.case.read_labels", fail)

    assert [(f.code, f.case) for f in data.check().findings] == [
        ("unreadable_file", "case_0"),
        ("unreadable_file", "case_1"),
    ]


def test_a_member_the_pool_refuses_is_a_finding_too(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Pool, member: Member) -> None:
        raise DataError(f"{member.path}: not to be pooled.")

    monkeypatch.setattr(Pool, "add", refuse)

    findings = data.check().findings

    assert [(f.code, f.file) for f in findings] == [
        ("unpoolable", "member_0/case_0.npz"),
        ("unpoolable", "member_0/case_1.npz"),
    ]
    assert findings[0].message == "not to be pooled."


@pytest.mark.parametrize("kept", [0, 1, 50, 200, 600])
def test_truncation_anywhere_is_a_finding(data: Dataset, kept: int) -> None:
    path = data.root / "member_0" / "case_0.npz"
    path.write_bytes(path.read_bytes()[:kept])

    assert data.only("unreadable_file").file == "member_0/case_0.npz"


def test_the_wrong_kind_is_found_by_its_key(data: Dataset) -> None:
    np.savez_compressed(data.root / "member_0" / "case_0.npz", probabilities=softmax(logits_of(truth(), 0)))

    assert "`probabilities`" in data.only("wrong_kind").message


def test_the_wrong_kind_is_told_once_a_case(data: Dataset) -> None:
    data.content["kind"] = "probabilities"

    findings = data.check().findings

    assert [(f.code, f.case, f.file) for f in findings] == [
        ("wrong_kind", case, f"member_0/{case}.npz") for case in data.ids
    ]
    assert "The same in 1 more member of this case." in findings[0].message


def test_unreadable_members_of_a_case_are_named_one_by_one(data: Dataset) -> None:
    for m in range(2):
        (data.root / f"member_{m}" / "case_0.npz").write_bytes(b"")

    findings = data.check().findings

    assert [f.file for f in findings] == ["member_0/case_0.npz", "member_1/case_0.npz"]


def test_a_label_named_twice_is_found(data: Dataset) -> None:
    data.content["cases"][1]["label"] = "labels/case_0.nii.gz"

    found = {(f.code, f.severity, f.file) for f in data.check().findings}

    assert ("repeated_file", "warning", "labels/case_0.nii.gz") in found


def test_members_that_are_copies_are_found(data: Dataset) -> None:
    copied = (data.root / "member_0" / "case_0.npz").read_bytes()
    (data.root / "member_1" / "case_0.npz").write_bytes(copied)

    assert "member_0/case_0.npz" in data.only("identical_members").message


# --- geometry --------------------------------------------------------------------------------------------------------


def test_members_of_different_shapes_are_found(data: Dataset) -> None:
    data.member("case_0", 1, logits_of(truth((6, 8, 9)), 1))

    assert "(6, 8, 9)" in data.only("member_shape").message


def test_a_wrong_number_of_channels_is_found(data: Dataset) -> None:
    data.content["classes"] = ["background", "liver", "lesion", "vessel"]

    messages = [f.message for f in data.check().findings if f.code == "channels"]

    assert len(messages) == 2
    assert "3 channels" in messages[0]
    assert "names 4" in messages[0]


def test_channels_at_the_end_are_recognised(data: Dataset) -> None:
    data.members("case_0", lambda values: np.moveaxis(values, 0, -1))

    message = next(f.message for f in data.check().findings if f.code == "channels")

    assert "last axis would fit" in message


def test_members_with_different_crops_are_found(data: Dataset) -> None:
    box = np.array([[0, 6], [0, 8], [0, 9]])
    data.member("case_0", 1, logits_of(truth(), 1), crop=box)

    assert data.only("member_crop").severity == "fatal"


def test_reversed_axes_are_told_by_the_shape_and_by_the_dice(data: Dataset) -> None:
    data.members("case_0", lambda values: values.transpose(0, 3, 2, 1).copy())

    by_code = {f.code: f for f in data.check().findings}

    assert by_code["label_shape"].severity == "fatal"
    assert "`axes: cxyz`" in by_code["label_shape"].message
    assert by_code["orientation"].severity == "fatal"
    assert "Set `axes: cxyz`" in by_code["orientation"].message
    assert by_code["image_shape"].severity == "warning"


def test_declared_axes_make_reversed_files_sound(data: Dataset) -> None:
    for case in data.ids:
        data.members(case, lambda values: values.transpose(0, 3, 2, 1).copy())
    data.content["axes"] = "cxyz"

    assert data.check().findings == ()


def test_another_order_of_axes_is_named(data: Dataset) -> None:
    data.members("case_0", lambda values: values.transpose(0, 2, 1, 3).copy())

    by_code = {f.code: f for f in data.check().findings}

    assert "axes z, y, x taken as y, z, x" in by_code["label_shape"].message


def test_another_image_fits_in_no_order(data: Dataset) -> None:
    data.label("case_0", truth((6, 8, 11)))

    by_code = {f.code: f for f in data.check().findings}

    assert "no order of axes fits" in by_code["label_shape"].message
    assert "orientation" not in by_code


HUGE = np.zeros((250, 300, 400), np.uint8)  # 30 MB, and packs to nothing


def peak_bytes(data: Dataset) -> int:
    manifest = data.manifest()
    tracemalloc.start()
    try:
        check_manifest(manifest)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_voxels_of_another_image_are_not_unpacked(data: Dataset) -> None:
    data.label("case_0", HUGE)
    data.deployed("case_0", HUGE)

    assert peak_bytes(data) < 10_000_000
    assert {f.code for f in data.check().findings} == {"label_shape", "deployed_shape"}


def test_counting_label_values_makes_no_copy_of_a_large_volume(data: Dataset) -> None:
    for m in range(2):  # nothing says which shape would be right
        (data.root / f"member_{m}" / "case_0.npz").write_bytes(b"")
    data.label("case_0", HUGE)

    assert peak_bytes(data) < 1.5 * HUGE.nbytes


def test_a_flip_is_found_although_the_shape_fits(data: Dataset) -> None:
    data.members("case_1", lambda values: values[:, :, ::-1, ::-1].copy())

    finding = data.only("orientation")

    assert (finding.case, finding.severity) == ("case_1", "fatal")
    assert "y, x flipped" in finding.message
    assert "as stored: 0." in finding.message


@pytest.mark.parametrize("with_label", [True, False])
def test_one_turned_member_is_found_although_the_mean_of_five_fits(tmp_path: Path, with_label: bool) -> None:
    data = Dataset(tmp_path, n_cases=1, n_members=5)
    if not with_label:
        del data.content["cases"][0]["label"]
    data.member("case_0", 3, logits_of(truth(), seed=3)[:, :, ::-1])
    finding = next(f for f in data.check().findings if f.severity == "fatal")
    assert finding.code == "member_orientation"
    assert finding.file == "member_3/case_0.npz"
    assert "lies otherwise than member_0/case_0.npz: with y flipped the two would agree" in finding.message


def test_a_flip_in_most_cases_is_told_once_for_the_whole_manifest(tmp_path: Path) -> None:
    data = Dataset(tmp_path, n_cases=3)
    for case in data.ids[:2]:
        data.members(case, lambda values: values[:, ::-1].copy())

    whole = [f for f in data.check().findings if f.case is None]

    assert [(f.code, f.severity) for f in whole] == [("orientation", "fatal")]
    assert "2 of 3 cases" in whole[0].message
    assert "z flipped" in whole[0].message


def poor_members(data: Dataset, decision: Array) -> None:
    for m in range(2):
        data.member("case_0", m, logits_of(decision, m) * np.float16(3))


def test_a_gain_that_ends_in_a_poor_dice_is_a_warning(data: Dataset) -> None:
    third = np.where((truth() == 1) & (np.arange(SHAPE[2]) < 2), 1, 0)
    poor_members(data, third[:, ::-1])

    finding = data.only("orientation")

    assert finding.severity == "warning"
    assert "y flipped" in finding.message


def test_a_poor_segmentation_that_meets_the_label_by_chance_is_no_finding(data: Dataset) -> None:
    rubbish = np.zeros(SHAPE, np.uint8)
    rubbish[5, 6, 9] = 1  # lies in the liver when all three axes are flipped, and nowhere as stored
    poor_members(data, rubbish)

    assert data.check().findings == ()


def test_orientation_is_told_from_the_deployed_file_when_there_is_no_label(data: Dataset) -> None:
    for case in data.content["cases"]:
        del case["label"]
    data.deployed("case_0", truth()[::-1].copy())

    codes = [(f.code, f.file) for f in data.check().findings]

    assert ("orientation", "deployed/case_0.nii.gz") in codes


def test_ignored_voxels_do_not_decide_about_orientation(data: Dataset) -> None:
    data.content["ignore_label"] = 9
    for case in data.ids:
        labels = truth()
        labels[3:] = 9
        data.label(case, labels)

    assert [f.code for f in data.check().findings] == []


def test_an_affine_elsewhere_is_found(data: Dataset) -> None:
    data.image("case_0", np.ones(SHAPE, np.float32), AFFINE + np.array([[0, 0, 0, 7], *[[0] * 4] * 3]))

    assert data.only("image_affine").severity == "warning"


def test_nifti_members_are_compared_in_space(data: Dataset) -> None:
    for m in range(2):
        values = logits_of(truth(), m).astype(np.float32)
        write_nifti(data.root / f"member_{m}" / "case_0.nii.gz", values, affine=np.diag([1.5, -1.5, 3.0, 1.0]))
    data.content["cases"][0]["members"] = [f"member_{m}/case_0.nii.gz" for m in range(2)]

    codes = {(f.code, f.severity) for f in data.check().findings}

    assert codes == {("label_affine", "fatal"), ("image_affine", "warning")}


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted(data: Dataset, value: float) -> None:
    spoilt = logits_of(truth(), 0)
    spoilt[1, 2, 3, 4:6] = value
    data.member("case_0", 0, spoilt)

    finding = data.only("non_finite")

    assert finding.severity == "fatal"
    assert ("2 NaN and 0 Inf" if np.isnan(value) else "0 NaN and 2 Inf") in finding.message
    assert ("export float32" in finding.message) == np.isinf(value)


def test_values_outside_the_crop_are_not_looked_at(data: Dataset) -> None:
    spoilt = logits_of(truth(), 0)
    spoilt[:, :, :, 9] = np.nan
    for m in range(2):
        data.member("case_0", m, spoilt + np.float16(m), crop=np.array([[0, 6], [0, 8], [0, 9]]))

    assert data.check().findings == ()


def test_logits_at_the_end_of_float16_are_found(data: Dataset) -> None:
    spoilt = logits_of(truth(), 0)
    spoilt[0, 0, 7, 9] = 65504
    data.member("case_0", 0, spoilt)

    assert "1 voxels are at or beyond 65504" in data.only("saturated").message


def padded(values: Array, fill: list[float]) -> Array:
    """nnU-Net's padding around a box that leaves out the last plane of z and two columns of x."""
    values = values.copy()
    outside = np.ones(values.shape[1:], bool)
    outside[0:5, :, 0:8] = False
    values[:, outside] = np.array(fill, values.dtype)[:, None]
    return values


@pytest.mark.parametrize(
    ("fill", "seen", "read_as"),
    [([1, 0, 0], "(1, 0, ..., 0)", f"{np.e / (np.e + 2):.3f}"), ([0, 0, 0], "all zeros", "0.333")],
)
def test_padding_in_logits_is_named_with_its_share_and_the_remedy(
    data: Dataset, fill: list[float], seen: str, read_as: str
) -> None:
    data.members("case_0", lambda values: padded(values, fill))

    finding = data.only("cropping_fill")

    assert (finding.case, finding.severity) == ("case_0", "fatal")
    share = 1 - 5 * 8 * 8 / (6 * 8 * 10)
    assert f"{share:.1%} of the voxels hold exactly {seen}" in finding.message
    assert read_as in finding.message
    assert "Set `crop`" in finding.message
    assert "[[0, 5], [0, 8], [0, 8]]" in finding.message
    assert "1 more member" in finding.message


def test_padding_does_not_hide_a_flip(data: Dataset) -> None:
    data.members("case_0", lambda values: padded(values[:, :, ::-1], [1, 0, 0]))

    assert [f.code for f in data.check().findings] == ["cropping_fill", "orientation"]


def test_the_remedy_works(data: Dataset) -> None:
    data.members("case_0", lambda values: padded(values, [1, 0, 0]))
    for m in range(2):
        sidecar = data.root / f"member_{m}" / "case_0.json"
        sidecar.write_text(json.dumps({"crop": [[0, 5], [0, 8], [0, 8]]}))

    assert data.check().findings == ()


def test_any_other_constant_is_a_warning(data: Dataset) -> None:
    data.members("case_0", lambda values: padded(values, [7.5, -2, -3]))

    assert data.only("constant_voxels").severity == "warning"


def test_padding_in_probabilities_is_right_and_only_noted(probabilities: Dataset) -> None:
    probabilities.members("case_0", lambda values: padded(values, [1, 0, 0]))

    finding = probabilities.only("saturated")

    assert finding.severity == "note"
    assert "exactly 1 in 33.3% of the voxels" in finding.message
    assert "`crop`" in finding.message


def test_float16_probabilities_of_exactly_1_are_a_warning(probabilities: Dataset) -> None:
    confident = softmax(4 * logits_of(truth(), 0)).astype(np.float16)
    probabilities.member("case_0", 0, confident)

    assert probabilities.only("saturated").severity == "warning"


def test_logits_called_probabilities_are_found(probabilities: Dataset) -> None:
    probabilities.members("case_0", lambda _: logits_of(truth(), 0))
    probabilities.member("case_0", 1, logits_of(truth(), 1))

    finding = probabilities.only("probability_range")

    assert finding.severity == "fatal"
    assert "`kind: logits`" in finding.message


@pytest.mark.parametrize(("factor", "severity"), [(0.9, "fatal"), (0.995, "warning")])
def test_probabilities_that_do_not_sum_to_1_are_found(probabilities: Dataset, factor: float, severity: str) -> None:
    spoilt = softmax(logits_of(truth(), 0))
    spoilt[:, 0] *= np.float32(factor)
    probabilities.member("case_0", 0, spoilt)

    finding = probabilities.only("probability_sum")

    assert finding.severity == severity
    assert "16.67% of the voxels" in finding.message
    assert f"worst sum {factor:g}" in finding.message


# --- labels ----------------------------------------------------------------------------------------------------------


def test_labels_outside_the_classes_are_named(data: Dataset) -> None:
    labels = truth()
    labels[5, 7, 9], labels[5, 7, 8] = 4, 255
    data.label("case_1", labels)

    finding = data.only("label_outside_classes")

    assert finding.severity == "fatal"
    assert "4 (0.21% of the voxels), 255" in finding.message
    assert "0..2" in finding.message


def test_negative_labels_are_outside_the_classes(data: Dataset) -> None:
    labels = truth().astype(np.int16)
    labels[5, 7, 9] = -1
    data.label("case_0", labels)

    assert "-1 (" in data.only("label_outside_classes").message


def test_the_ignore_label_is_allowed_but_not_everywhere(data: Dataset) -> None:
    data.content["ignore_label"] = 255
    labels = truth()
    labels[5, 7] = 255
    data.label("case_0", labels)
    assert data.check().findings == ()

    data.label("case_0", np.full(SHAPE, 255, np.uint8))
    assert data.only("all_ignored").severity == "fatal"


def test_a_class_no_label_shows_is_named_once(data: Dataset) -> None:
    for case in data.ids:
        data.label(case, np.minimum(truth(), 1))

    finding = data.only("class_never_seen")

    assert (finding.case, finding.severity) == (None, "warning")
    assert "'lesion' (2)" in finding.message


def test_a_label_without_foreground_is_noted(data: Dataset) -> None:
    data.label("case_0", np.zeros(SHAPE, np.uint8))

    assert data.only("no_foreground").severity == "note"


def test_fractions_are_no_labels(data: Dataset) -> None:
    data.label("case_0", truth().astype(np.float32) * 0.5)

    assert "whole numbers" in data.only("unreadable_file").message


def test_a_manifest_without_labels_is_noted(data: Dataset) -> None:
    for case in data.content["cases"]:
        del case["label"]

    assert data.only("no_labels").severity == "note"


def test_an_image_that_alone_says_where_a_case_lies_matters(data: Dataset) -> None:
    del data.content["cases"][0]["label"]
    data.image("case_0", np.ones((6, 8, 11), np.float32))

    assert data.only("image_shape").severity == "fatal"


# --- regions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def regions(tmp_path: Path) -> Dataset:
    """A sigmoid model with the overlapping regions {1, 2} and {2}."""
    data = Dataset(tmp_path, kind="probabilities")
    del data.content["classes"]
    data.content["regions"] = [{"name": "liver", "labels": [1, 2]}, {"name": "lesion", "labels": [2]}]
    data.content["regions_class_order"] = [1, 2]
    masks = np.stack([truth() > 0, truth() == 2])
    for i, case in enumerate(data.ids):
        for m in range(2):
            noise = np.random.default_rng(10 * i + m).uniform(0, 0.3, masks.shape)
            data.member(case, m, np.where(masks, 1 - noise, noise).astype(np.float32))
    return data


def test_sound_regions_give_no_finding(regions: Dataset) -> None:
    assert regions.check().findings == ()


def test_a_flipped_region_model_is_found(regions: Dataset) -> None:
    regions.members("case_0", lambda values: values[:, :, ::-1].copy())

    assert "y flipped" in regions.only("orientation").message


def test_values_in_no_region_and_unseen_regions_are_named(regions: Dataset) -> None:
    labels = np.minimum(truth(), 1)
    for case in regions.ids:
        regions.label(case, labels)
    labels = labels.copy()
    labels[5, 7, 9] = 3
    regions.label("case_0", labels)

    codes = {(f.code, f.severity): f.message for f in regions.check().findings}

    assert "3 (0.21%" in codes["label_outside_regions", "fatal"]
    assert "no label shows 'lesion': no such region" in codes["class_never_seen", "warning"]


# --- the report ------------------------------------------------------------------------------------------------------


def test_findings_are_handed_over_as_they_come_and_fit_one_line(data: Dataset) -> None:
    data.label("case_0", np.full(SHAPE, 77, np.uint8))
    seen: list[Finding] = []

    report = data.check(on_finding=seen.append)

    assert tuple(seen) == report.findings
    assert "\n" not in seen[0].line()
    assert seen[0].line().startswith("fatal   case_0 (labels/case_0.nii.gz): the label values 77")
    assert seen[0].line().endswith("[label_outside_classes]")
    assert set(seen[0].as_dict()) == {"code", "severity", "case", "file", "message"}
    assert report.counts() == {"fatal": 1, "warning": 0, "note": 0}


def test_one_member_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Member]] = []

    def tracked(path: Path, **options: Any) -> Member:
        assert not any(reference() for reference in alive), "a member was kept"
        member = read_member(path, **options)
        alive.append(weakref.ref(member))
        return member

    monkeypatch.setattr("segcal.checks.case.read_member", tracked)

    report = Dataset(tmp_path, n_cases=2, n_members=3).check()

    assert report.findings == ()
    assert len(alive) == 6


# --- orientation -----------------------------------------------------------------------------------------------------


def test_a_cube_has_48_orientations_and_a_slice_has_8_or_4() -> None:
    assert len(set(fitting_orientations((5, 5, 5), (5, 5, 5)))) == 48
    assert len(fitting_orientations((1, 7, 7), (1, 7, 7))) == 8
    assert len(fitting_orientations((1, 6, 7), (1, 6, 7))) == 4
    assert fitting_orientations((3, 4, 5), (3, 4, 6)) == []


def test_dice_of_every_orientation_equals_the_one_of_the_turned_array() -> None:
    rng = np.random.default_rng(0)
    predicted, true = rng.random((4, 5, 5)) < 0.3, rng.random((5, 4, 5)) < 0.4
    valid = rng.random((5, 4, 5)) < 0.8
    orientations = fitting_orientations(predicted.shape, true.shape)
    assert len(orientations) == 16

    dice = orientation_dice([(predicted, true & valid)], valid, orientations)

    for orientation, value in zip(orientations, dice, strict=True):
        turned = predicted.transpose(orientation.order)
        turned = np.flip(turned, [axis for axis in range(3) if orientation.flipped[axis]]) & valid
        expected = 2 * (turned & true).sum() / (turned.sum() + (true & valid).sum())
        assert value == pytest.approx(expected, abs=1e-12)


class OnGpu(torch.Tensor):
    """A tensor of this machine that refuses what tensors of another device refuse."""

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def to(self, *where: Any, **how: Any) -> torch.Tensor:
        moved = super().to(*where, **how)
        return moved.as_subclass(torch.Tensor) if "cpu" in where else moved


@pytest.mark.parametrize("kind", ["data", "regions"])
def test_orientations_are_compared_wherever_members_are_pooled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("segcal.device.LOOP_DEVICES", frozenset())  # compiled loops are for the host alone
    manifest = request.getfixturevalue(kind).manifest()
    flipped = torch.from_numpy(logits_of(truth()[:, ::-1], seed=0)).float()
    logits = flipped if kind == "data" else torch.stack([flipped[1:].amax(0) - flipped[0], flipped[2] - flipped[1]])

    def turned(logits: torch.Tensor) -> Turned | None:
        return compare_orientations(manifest, Pooled(logits, None, 0), truth(), case="case_0", file="label")

    found = turned(logits)
    assert found is not None
    assert found.best == Orientation(flipped=(False, True, False))
    assert turned(logits.as_subclass(OnGpu)) == found


def test_values_no_class_has_do_not_become_one_where_they_are_compared(data: Dataset) -> None:
    logits = torch.from_numpy(logits_of(truth(), seed=0)).float()
    labels = truth().astype(np.int32)[:, ::-1] + 2**16  # in 16 bits, the flipped truth
    as_they_lie = truth() > 0
    labels[as_they_lie] = truth()[as_they_lie]

    found = compare_orientations(data.manifest(), Pooled(logits, None, 0), labels, case="case_0", file="label")

    assert found is not None
    assert found.best.is_identity


def test_large_structures_are_sampled_close_to_the_truth() -> None:
    rng = np.random.default_rng(1)
    predicted = rng.random((40, 64, 64)) < 0.7
    true = np.where(rng.random(predicted.shape) < 0.8, predicted, rng.random(predicted.shape) < 0.5)
    orientations = [Orientation(), Orientation(flipped=(True, False, False))]

    dice = orientation_dice([(predicted, true)], None, orientations)

    for turned, value in zip((predicted, predicted[::-1]), dice, strict=True):
        assert value == pytest.approx(2 * (turned & true).sum() / (turned.sum() + true.sum()), abs=0.01)


def test_channels_nobody_predicted_or_labelled_do_not_count() -> None:
    full, empty = np.ones((2, 2, 2), bool), np.zeros((2, 2, 2), bool)

    assert orientation_dice([(full, full), (empty, empty)], None, [Orientation()]).tolist() == [1.0]
    assert orientation_dice([(full, full), (full, empty)], None, [Orientation()]).tolist() == [0.5]
    assert orientation_dice([(empty, empty)], None, [Orientation()]).tolist() == [0.0]


def test_probabilities_called_logits_are_found(data: Dataset) -> None:
    data.members("case_0", lambda values: softmax(values).astype(np.float16))

    finding = data.only("logits_range")

    assert finding.severity == "fatal"
    assert "`kind: probabilities`" in finding.message


def test_a_path_with_backslashes_is_told_to_use_slashes(data: Dataset) -> None:
    data.content["cases"][0]["label"] = "labels\\case_0.nii.gz"

    assert "written with / on every system" in data.only("missing_file").message
