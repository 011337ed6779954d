"""Files appear whole or not at all, whatever stops the writer."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from segcal.errors import MissingFileError, OutputError
from segcal.io.atomic import atomic_write, check_folder, remove_unfinished, write_text_atomic

PROJECT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_appears_only_when_the_block_has_ended(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "case.nii.gz"
    with atomic_write(target) as temporary:
        temporary.write_bytes(b"content")
        assert not target.exists()
        assert temporary.parent == target.parent
        assert temporary.name.endswith("case.nii.gz")
    assert target.read_bytes() == b"content"
    assert names(target.parent) == ["case.nii.gz"]


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_stops_the_block_the_old_file_stays_and_nothing_is_left_behind(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def stopped() -> None:
        with atomic_write(target) as temporary:
            temporary.write_text("half of the n")
            raise stop

    with pytest.raises(stop):
        stopped()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_an_interruption_while_flushing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomic(tmp_path / "a.txt", "text")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only")]
)
def test_a_full_disk_is_an_output_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def full(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    target = tmp_path / "a.txt"
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=rf"a\.txt.*{says}"):
        write_text_atomic(target, "new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a file size limit")
def test_a_write_the_system_really_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import resource, sys, numpy as np
from pathlib import Path
from segcal.errors import OutputError
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
values = np.random.default_rng(0).normal(size=100_000)
try:
    with atomic_write(Path(sys.argv[1]) / "a.npz") as temporary:
        write_npz(temporary, {"logits": values})
except OutputError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=PROJECT)
    assert done.stdout.startswith("refused:"), done.stderr
    assert "a.npz" in done.stdout
    assert names(tmp_path) == []


def test_a_folder_that_is_a_file_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"):
        write_text_atomic(tmp_path / "file" / "a.txt", "text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="folder of that name"):
        write_text_atomic(tmp_path / "folder", "text")
    assert names(tmp_path) == ["file", "folder"]


def test_an_input_the_block_cannot_read_is_not_called_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, atomic_write(tmp_path / "a.txt"):
        (tmp_path / "input.txt").read_text()
    assert not isinstance(caught.value, OutputError)
    with pytest.raises(MissingFileError), atomic_write(tmp_path / "a.txt"):
        raise MissingFileError("input.npz: no such file.")
    assert names(tmp_path) == []


def test_content_reaches_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.txt"
    seen: list[tuple[bool, bool]] = []
    real = os.fsync

    def watched(handle: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(handle).st_mode), target.exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", watched)
    write_text_atomic(target, "text")
    assert seen == [(False, False), (True, True)]  # the file, then its folder after the rename


def test_files_get_the_permissions_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text_atomic(tmp_path / "a.txt", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_text_is_utf_8_with_plain_line_feeds(tmp_path: Path) -> None:
    write_text_atomic(tmp_path / "a.txt", "λ = 1\nµ = 2\n")
    assert (tmp_path / "a.txt").read_bytes() == "λ = 1\nµ = 2\n".encode()


def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder(tmp_path / "new" / "folder")
    assert names(tmp_path) == []  # only looked at
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/sub: cannot be a folder, .*file is a file"):
        check_folder(tmp_path / "file" / "sub")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(OutputError, match=r"new: .* is read-only or not yours"):
        check_folder(tmp_path / "new")


def test_what_a_killed_process_left_is_removed_from_the_folders_of_the_run(tmp_path: Path) -> None:
    for name in ("a.npz", "sub/b.npz", "sub/deep/c.npz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"whole")
        (tmp_path / name).with_name(f".segcal-0123456789ab-{Path(name).name}").write_bytes(b"half")
    remove_unfinished(tmp_path, ["sub", "not made yet"])
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.npz", "b.npz", "c.npz"]
    remove_unfinished(tmp_path / "gone")


def test_another_run_in_a_subfolder_goes_on_writing(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "another" / "a.txt") as temporary:
        remove_unfinished(tmp_path, ["maps"])
        temporary.write_text("whole")
    assert (tmp_path / "another" / "a.txt").read_text() == "whole"


def test_only_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".segcal-cache").mkdir()
    (tmp_path / "kept.txt").write_text("x")
    (tmp_path / ".segcal-link").symlink_to(tmp_path / "kept.txt")
    remove_unfinished(tmp_path)
    assert names(tmp_path) == [".segcal-cache", ".segcal-link", "kept.txt"]
