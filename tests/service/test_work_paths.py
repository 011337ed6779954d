"""A job reads what lies below the roots and nothing else, whatever a manifest, a link or an image's header says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import yaml

from segcal.manifest import Manifest
from segcal.service.errors import RefusedPathError
from segcal.service.roots import Roots
from segcal.service.work.paths import check_folder, check_manifest, load_manifest
from segcal.service.work.pointers import check_image, check_self_contained
from tests.service.work_data import labelled_cases, run


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return labelled_cases(tmp_path / "root", ("a", "b"))


def changed(manifest: Manifest, **case: Any) -> Manifest:
    """The manifest with other paths in its second case."""
    content = manifest.model_dump(mode="json", exclude_none=True)
    content["cases"][1] |= case
    manifest.path.write_text(yaml.safe_dump(content))
    return Manifest.load(manifest.path)


def test_files_below_the_roots_pass(manifest: Manifest) -> None:
    check_manifest(manifest, Roots.of((manifest.root,)))
    assert load_manifest(manifest.path, Roots.of((manifest.root,))).sha256 == manifest.sha256


@pytest.mark.parametrize("key", ["members", "label", "image", "deployed"])
@pytest.mark.parametrize("through_link", [False, True])
def test_a_file_outside_is_refused_by_the_name_the_manifest_has_for_it(
    manifest: Manifest, tmp_path: Path, key: str, through_link: bool
) -> None:
    secret = tmp_path / "secret.nii.gz"
    secret.write_bytes(b"secret")
    relative = "../secret.nii.gz"
    if through_link:
        (manifest.root / "innocent.nii.gz").symlink_to(secret)
        relative = "innocent.nii.gz"
    value = [relative, manifest.case("b").members[1]] if key == "members" else relative
    wrong = changed(manifest, **{key: value})

    with pytest.raises(RefusedPathError, match=rf"case 'b', .*'{relative}': not below a folder") as refused:
        check_manifest(wrong, Roots.of((manifest.root,)))
    assert str(tmp_path) not in str(refused.value)
    with pytest.raises(RefusedPathError):
        run(tmp_path / "data", {"kind": "apply", "manifest": str(wrong.path)}, manifest.root)


def test_a_linked_folder_is_followed_too(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (manifest.root / "linked").symlink_to(tmp_path / "elsewhere")
    wrong = changed(manifest, image="linked/b.nii.gz")
    with pytest.raises(RefusedPathError, match=r"linked/b\.nii\.gz"):
        check_manifest(wrong, Roots.of((manifest.root,)))
    check_manifest(wrong, Roots.of((manifest.root, tmp_path / "elsewhere")))


def test_the_manifest_itself_has_to_lie_below_a_root(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(RefusedPathError, match="not below a folder"):
        load_manifest(manifest.path, Roots.of((tmp_path / "other",)))
    with pytest.raises(RefusedPathError, match="not below a folder"):
        load_manifest(manifest.path, Roots.of(()))


def test_messages_name_files_as_the_manifest_does_and_not_where_links_lead(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(manifest.root)
    manifest.resolve(manifest.case("b").members[0]).write_bytes(b"no archive")
    given = {"kind": "apply", "manifest": str(tmp_path / "short/manifest.yaml")}
    outcome = run(tmp_path / "data", given, manifest.root)
    assert outcome.cases[1].error.startswith("member_0/b.npz: ")
    assert str(manifest.root) not in str(outcome.to_json())


def test_a_folder_out_of_which_a_link_leads_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "root/predictions"
    (folder / "deeper").mkdir(parents=True)
    roots = Roots.of((tmp_path / "root",))
    assert check_folder(folder, roots) == folder
    (folder / "deeper/case.npz").symlink_to("/etc/hostname")
    with pytest.raises(RefusedPathError, match=r"case\.npz"):
        check_folder(folder, roots)


@pytest.mark.parametrize("through_link", [False, True])
def test_a_pipe_is_refused_because_its_reader_would_wait_for_ever(
    manifest: Manifest, tmp_path: Path, through_link: bool
) -> None:
    os.mkfifo(manifest.root / "pipe.mha")
    name = "pipe.mha"
    if through_link:
        (manifest.root / "link.mha").symlink_to("pipe.mha")
        name = "link.mha"
    roots = Roots.of((manifest.root,))
    with pytest.raises(RefusedPathError, match=f"image '{name}': neither a file nor a folder"):
        check_manifest(changed(manifest, image=name), roots)
    with pytest.raises(RefusedPathError, match="neither a file nor a folder"):
        check_folder(manifest.root, roots)
    with pytest.raises(RefusedPathError, match="neither a file nor a folder"):
        load_manifest(manifest.root / name, roots)


def test_whether_a_file_outside_exists_is_not_told(manifest: Manifest) -> None:
    said = set()
    for name in ("passwd", "nothing-of-this-name", "shadow"):
        with pytest.raises(RefusedPathError) as refused:
            check_manifest(changed(manifest, image=f"../../../../../../../../etc/{name}"), Roots.of((manifest.root,)))
        said.add(str(refused.value).replace(name, ""))
    assert len(said) == 1


def test_links_are_followed_once_a_folder_and_not_once_a_file(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = manifest.model_dump(mode="json", exclude_none=True)
    members = [[f"member_{m}/c{k}.npz" for m in range(2)] for k in range(1000)]
    content["cases"] = [{**content["cases"][0], "id": f"c{k}", "members": files} for k, files in enumerate(members)]
    asked: list[str | Path] = []
    allow = Roots.allow
    monkeypatch.setattr(Roots, "allow", lambda self, path: asked.append(path) or allow(self, path))
    check_manifest(Manifest.from_content(content, manifest.path), Roots.of((manifest.root,)))
    assert len(asked) == 4  # member_0, member_1, labels, images


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a.mha", b"NDims = 2\nElementDataFile = /etc/passwd\n"),
        ("a.mha", b"NDims = 2\nComment = ElementDataFile = LOCAL\nElementDataFile: /etc/passwd\n"),
        ("a.mha", b"NDims = 2\n" + b"Comment = x\n" * 100_000 + b"ElementDataFile = /etc/passwd\n"),
        ("a.nrrd", b"NRRD0004\ntype: uchar\ndata file: /etc/passwd\n\n"),
        ("a.nrrd", b"NRRD0004\r\ntype: uchar\r\ndatafile: /etc/passwd\r\n\r\n"),
        ("a.nrrd", b"NRRD0004\n" + b"# x\n" * 300_000 + b"data file: /etc/passwd\n\n"),
        ("a.mhd", b"ElementDataFile = a.raw\n"),
        ("a.hdr", b""),
    ],
)
def test_an_image_whose_voxels_lie_in_another_file_is_refused(tmp_path: Path, name: str, header: bytes) -> None:
    (tmp_path / name).write_bytes(header)
    with pytest.raises(RefusedPathError, match="another file"):
        check_self_contained(tmp_path / name, name)


@pytest.mark.parametrize("name", ["a.mha", "a.nrrd"])
def test_images_that_simpleitk_writes_into_one_file_pass(tmp_path: Path, name: str) -> None:
    image = sitk.GetImageFromArray(np.zeros((3, 4, 5), dtype=np.int16))
    for compressed in (False, True):
        sitk.WriteImage(image, str(tmp_path / name), compressed)
        check_image(tmp_path / name, name)


def test_an_unknown_format_is_refused_because_its_reader_goes_by_the_content(tmp_path: Path) -> None:
    with pytest.raises(RefusedPathError, match="not an image format"):
        check_image(tmp_path / "a.vtk", "a.vtk")


def test_a_manifest_with_a_pointing_header_fails_the_job(manifest: Manifest, tmp_path: Path) -> None:
    (manifest.root / "b.mha").write_bytes(b"NDims = 2\nElementDataFile = /etc/passwd\n")
    wrong = changed(manifest, image="b.mha")
    with pytest.raises(RefusedPathError, match=r"case 'b', image 'b\.mha': its header names another file"):
        run(tmp_path / "data", {"kind": "qa", "manifest": str(wrong.path)}, manifest.root)


def test_a_link_with_another_ending_than_its_file_is_judged_by_both(manifest: Manifest, tmp_path: Path) -> None:
    """A reader goes by the name it is given: here by that of the link."""
    (manifest.root / "plain.nii.gz").write_bytes(b"NDims = 2\nElementDataFile = /etc/passwd\n")
    (manifest.root / "b.mha").symlink_to(manifest.root / "plain.nii.gz")
    wrong = changed(manifest, image="b.mha")
    with pytest.raises(RefusedPathError, match="its header names another file"):
        run(tmp_path / "data", {"kind": "qa", "manifest": str(wrong.path)}, manifest.root)
    with pytest.raises(RefusedPathError, match="its header names another file"):
        check_folder(manifest.root, Roots.of((manifest.root,)))
