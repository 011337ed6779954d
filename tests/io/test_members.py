"""Member files: order of axes, declared kind, crop boxes, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from segcal.errors import FileFormatError, MissingFileError, UsageError
from segcal.io.archive import write_npz
from segcal.io.members import member_fingerprint, read_member, read_member_header
from segcal.io.nifti import write_nifti

FLOATS = st.sampled_from([np.float16, np.float32, np.float64])
VALUES = hnp.arrays(FLOATS, hnp.array_shapes(min_dims=4, max_dims=4, min_side=1, max_side=6))


@pytest.fixture
def logits() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float16)


def saved(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


@given(values=VALUES, axes=st.sampled_from(["czyx", "cxyz"]), kind=st.sampled_from(["logits", "probabilities"]))
def test_a_member_comes_back_as_class_z_y_x(
    tmp_path_factory: pytest.TempPathFactory, values: np.ndarray[Any, Any], axes: str, kind: Any
) -> None:
    stored = values if axes == "czyx" else values.transpose(0, 3, 2, 1)
    path = saved(tmp_path_factory.mktemp("m") / "case.npz", **{kind: stored})

    member = read_member(path, kind=kind, axes=axes)

    np.testing.assert_array_equal(member.values, values)
    assert member.values.dtype == values.dtype
    assert member.values.flags.c_contiguous
    assert (member.kind, member.crop, member.grid, member.path) == (kind, None, None, path)
    header = read_member_header(path, kind=kind, axes=axes)
    assert (header.shape, header.dtype, header.kind) == (values.shape, values.dtype, kind)


def test_2d_arrays_get_a_z_axis(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((3, 5, 6)).astype(np.float32)
    path = saved(tmp_path / "case.npz", probabilities=values)
    member = read_member(path, kind="probabilities", axes="cyx")
    np.testing.assert_array_equal(member.values, values[:, np.newaxis])
    assert read_member_header(path, kind="probabilities", axes="cyx").shape == (3, 1, 5, 6)


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_nifti_is_x_y_z_class_on_disk(tmp_path: Path, logits: np.ndarray[Any, Any], ending: str) -> None:
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    values = logits.astype(np.float32)
    nib.save(nib.Nifti1Image(values.transpose(3, 2, 1, 0), affine), tmp_path / f"case{ending}")

    member = read_member(tmp_path / f"case{ending}", kind="logits", axes="cxyz")

    np.testing.assert_array_equal(member.values, values)
    assert member.values.flags.c_contiguous
    assert member.grid is not None
    assert member.grid.shape == (4, 5, 6)
    np.testing.assert_array_equal(member.grid.affine, affine)


def test_scaled_nifti_integers_become_probabilities_and_know_their_step(tmp_path: Path) -> None:
    probabilities = np.random.default_rng(0).dirichlet([1, 1, 1], size=(4, 5, 6)).transpose(3, 0, 1, 2)
    path = tmp_path / "case.nii.gz"
    write_nifti(path, probabilities.astype(np.float32), affine=np.eye(4), scale=1 / 65535)
    member = read_member(path, kind="probabilities")
    np.testing.assert_allclose(member.values, probabilities, atol=1e-5)
    assert member.step == pytest.approx(1 / 65535)
    assert read_member_header(path, kind="probabilities").dtype == np.uint16


def test_integers_without_a_scale_are_refused(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    write_nifti(tmp_path / "case.nii", np.zeros((3, 4, 5, 6), dtype=np.int16), affine=np.eye(4))
    saved(tmp_path / "case.npz", logits=np.zeros((3, 4, 5, 6), dtype=np.int32))
    for name in ("case.nii", "case.npz"):
        with pytest.raises(FileFormatError, match=rf"{name}.*dtype int.*expected float16"):
            read_member(tmp_path / name, kind="logits")


@pytest.mark.parametrize(("kind", "key"), [("logits", "probabilities"), ("probabilities", "logits")])
def test_a_key_that_contradicts_the_declared_kind_is_refused(
    tmp_path: Path, logits: np.ndarray[Any, Any], kind: Any, key: str
) -> None:
    path = saved(tmp_path / "case.npz", **{key: logits})
    with pytest.raises(FileFormatError, match=f"`{key}` but the manifest declares `kind: {kind}`"):
        read_member(path, kind=kind)


def test_a_file_of_nnunet_version_1_is_explained(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = saved(tmp_path / "case.npz", softmax=logits)
    with pytest.raises(FileFormatError, match=r"softmax.*nnU-Net v1.*cropped.*not supported"):
        read_member(path, kind="probabilities")


def test_an_unknown_key_is_named(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = saved(tmp_path / "case.npz", arr_0=logits)
    with pytest.raises(FileFormatError, match=r"holds `arr_0`, expected the key `logits`"):
        read_member(path, kind="logits")


def test_other_arrays_in_the_file_are_left_alone(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = saved(tmp_path / "case.npz", logits=logits, note=np.array({"a": 1}, dtype=object))
    np.testing.assert_array_equal(read_member(path, kind="logits").values, logits)


@pytest.mark.parametrize(
    ("shape", "axes", "says"),
    [
        ((4, 5, 6), "czyx", r"3 axes \(4, 5, 6\), expected 4 .*axes: cyx"),
        ((3, 4, 5, 6), "cyx", r"4 axes .*expected 3"),
        ((1, 3, 4, 5, 6), "czyx", "5 axes"),
        ((3, 0, 5, 6), "czyx", "empty"),
    ],
)
def test_a_wrong_number_of_axes_is_refused(tmp_path: Path, shape: tuple[int, ...], axes: str, says: str) -> None:
    path = saved(tmp_path / "case.npz", logits=np.zeros(shape, dtype=np.float32))
    with pytest.raises(FileFormatError, match=says):
        read_member(path, kind="logits", axes=axes)


def test_a_3d_nifti_is_refused(tmp_path: Path) -> None:
    write_nifti(tmp_path / "case.nii.gz", np.zeros((4, 5, 6), dtype=np.float32), affine=np.eye(4))
    with pytest.raises(FileFormatError, match="3 axes"):
        read_member(tmp_path / "case.nii.gz", kind="logits")


def test_unknown_axes_endings_and_missing_files(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = saved(tmp_path / "case.npz", logits=logits)
    with pytest.raises(UsageError, match="czyx, cxyz, cyx"):
        read_member(path, kind="logits", axes="zyxc")
    with pytest.raises(FileFormatError, match=r"\.npz, \.nii or \.nii\.gz, not '\.pkl'"):
        read_member(tmp_path / "case.pkl", kind="logits")
    with pytest.raises(MissingFileError, match="nowhere"):
        read_member(tmp_path / "nowhere.npz", kind="logits")


def test_the_limit_holds_for_both_formats(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = saved(tmp_path / "case.npz", logits=logits)
    write_nifti(tmp_path / "case.nii", logits.astype(np.float32), affine=np.eye(4))
    for file, size in ((path, logits.nbytes), (tmp_path / "case.nii", 2 * logits.nbytes)):
        with pytest.raises(FileFormatError, match="limit"):
            read_member(file, kind="logits", limit_bytes=size - 1)
        assert read_member(file, kind="logits", limit_bytes=size).values.shape == logits.shape


BOX = ((1, 3), (0, 5), (2, 6))


def test_the_crop_is_taken_from_the_file_or_from_the_json_beside_it(
    tmp_path: Path, logits: np.ndarray[Any, Any]
) -> None:
    inside = saved(tmp_path / "inside.npz", logits=logits, crop=np.array(BOX))
    beside = saved(tmp_path / "beside.npz", logits=logits)
    (tmp_path / "beside.json").write_text(json.dumps({"crop": BOX, "fold": 0}))
    volume = tmp_path / "volume.nii.gz"
    write_nifti(volume, logits.astype(np.float32), affine=np.eye(4))
    (tmp_path / "volume.json").write_text(json.dumps({"crop": BOX}))
    for path in (inside, beside, volume):
        assert read_member(path, kind="logits").crop == BOX
        assert read_member_header(path, kind="logits").crop == BOX


def test_the_crop_follows_the_axes_of_the_array(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = saved(tmp_path / "a.npz", logits=logits.transpose(0, 3, 2, 1), crop=np.array(BOX[::-1]))
    assert read_member(path, kind="logits", axes="cxyz").crop == BOX
    flat = saved(tmp_path / "b.npz", logits=logits[:, 0], crop=np.array(BOX[1:]))
    assert read_member(flat, kind="logits", axes="cyx").crop == ((0, 1), (0, 5), (2, 6))


@pytest.mark.parametrize(
    "crop",
    [
        [[0, 5], [0, 5], [0, 6]],
        [[-1, 3], [0, 5], [0, 6]],
        [[2, 2], [0, 5], [0, 6]],
        [[0, 4], [0, 5]],
        [[0, 4], [0, 5], [0, 6], [0, 1]],
        [0, 4, 0, 5, 0, 6],
        [[0.5, 4], [0, 5], [0, 6]],
        [[0, 4, 1], [0, 5, 1], [0, 6, 1]],
        [],
        7,
    ],
)
def test_a_crop_that_is_no_box_in_the_array_is_refused(tmp_path: Path, logits: np.ndarray[Any, Any], crop: Any) -> None:
    inside = saved(tmp_path / "inside.npz", logits=logits, crop=np.array(crop))
    beside = saved(tmp_path / "beside.npz", logits=logits)
    (tmp_path / "beside.json").write_text(json.dumps({"crop": crop}))
    for path in (inside, beside):
        with pytest.raises(FileFormatError, match=rf"{path.name}.*crop"):
            read_member(path, kind="logits")


def test_two_different_crops_are_refused(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = saved(tmp_path / "a.npz", logits=logits, crop=np.array(BOX))
    (tmp_path / "a.json").write_text(json.dumps({"crop": [[0, 4], [0, 5], [0, 6]]}))
    with pytest.raises(FileFormatError, match="differ"):
        read_member(path, kind="logits")
    (tmp_path / "a.json").write_text(json.dumps({"crop": BOX}))
    assert read_member(path, kind="logits").crop == BOX


def test_the_crop_of_the_manifest_holds_where_the_file_says_none(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    silent = saved(tmp_path / "silent.npz", logits=logits)
    volume = tmp_path / "volume.nii.gz"
    write_nifti(volume, logits.astype(np.float32), affine=np.eye(4))
    speaking = saved(tmp_path / "speaking.npz", logits=logits, crop=np.array(BOX))
    for path in (silent, volume, speaking):
        assert read_member(path, kind="logits", crop=BOX).crop == BOX
    with pytest.raises(FileFormatError, match=r"its own crop .* and the manifest's .* differ"):
        read_member(speaking, kind="logits", crop=[[0, 4], [0, 5], [0, 6]])
    with pytest.raises(FileFormatError, match=r"silent\.npz: crop"):
        read_member(silent, kind="logits", crop=[[0, 40], [0, 5], [0, 6]])
    assert member_fingerprint(silent, BOX) != member_fingerprint(silent)


def test_a_sidecar_that_is_no_json_is_named_and_one_without_a_crop_is_fine(
    tmp_path: Path, logits: np.ndarray[Any, Any]
) -> None:
    path = saved(tmp_path / "a.npz", logits=logits)
    for broken in ("{", "[" * 100_000):
        (tmp_path / "a.json").write_text(broken)
        with pytest.raises(FileFormatError, match=r"a\.json"):
            read_member(path, kind="logits")
    for harmless in ("{}", "[1, 2]"):
        (tmp_path / "a.json").write_text(harmless)
        assert read_member(path, kind="logits").crop is None


def test_fingerprints_follow_values_and_crop(tmp_path: Path, logits: np.ndarray[Any, Any]) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, {"logits": logits})
    plain = member_fingerprint(path)
    assert member_fingerprint(path) == plain
    (tmp_path / "a.json").write_text(json.dumps({"crop": BOX}))
    assert member_fingerprint(path) != plain
    (tmp_path / "a.json").write_text(json.dumps({"fold": 3}))
    assert member_fingerprint(path) == plain
    write_npz(path, {"logits": logits + 1})
    assert member_fingerprint(path) != plain


def test_reordering_the_axes_needs_no_second_volume(tmp_path: Path) -> None:
    stored = np.random.default_rng(1).normal(size=(8, 60, 60, 40)).astype(np.float32)
    write_npz(tmp_path / "a.npz", {"logits": stored})
    tracemalloc.start()
    try:
        member = read_member(tmp_path / "a.npz", kind="logits", axes="cxyz")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(member.values, stored.transpose(0, 3, 2, 1))
    assert peak < 1.5 * stored.nbytes


def test_real_members_are_read_by_many_threads_as_numpy_reads_them(hippocampus: Path) -> None:
    paths = sorted((hippocampus / "member_0").glob("*.npz"))[:8]
    with ThreadPoolExecutor(8) as executor:
        members = list(executor.map(lambda path: read_member(path, kind="logits"), paths))
    for path, member in zip(paths, members, strict=True):
        with np.load(path) as loaded:
            np.testing.assert_array_equal(member.values, loaded["logits"])
