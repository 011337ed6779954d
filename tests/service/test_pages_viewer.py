"""Bringing NiiVue in: only the pinned release, whole or not at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from segcal.errors import FileFormatError, UsageError
from segcal.service.web import build_viewer
from segcal.service.web.static import FOLDER, VOLUME_VIEWER


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_npm: str, command: str, *_rest: str, folder: Path) -> None:
        assert command == "pack", "nothing is installed from an archive that was not checked"
        (folder / "niivue-niivue-0.69.0.tgz").write_bytes(b"something else")

    monkeypatch.setattr(build_viewer.shutil, "which", lambda _name: "/usr/bin/npm")
    monkeypatch.setattr(build_viewer, "_run", run)
    with pytest.raises(FileFormatError, match="not the pinned release"):
        build_viewer.build_viewer(tmp_path / "niivue")
    assert not (tmp_path / "niivue").exists()


def test_without_npm_the_message_says_that_slices_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_viewer.shutil, "which", lambda _name: None)
    with pytest.raises(UsageError, match="the pages show slices then"):
        build_viewer.build_viewer(tmp_path)


def test_a_failing_npm_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="npm -c failed: no registry"):
        build_viewer._run("/bin/sh", "-c", "echo no registry >&2; exit 1", folder=tmp_path)


def test_what_was_built_in_is_one_module_that_loads_nothing_else_and_comes_with_licences() -> None:
    module = FOLDER / VOLUME_VIEWER
    if not module.is_file():
        pytest.skip("NiiVue is not built in; `make viewer` does it")
    text = module.read_text(encoding="utf-8")
    assert not re.search(r"^\s*import\s[^;]*from\s+[\"']", text, re.MULTILINE)
    assert "sourceMappingURL" not in text[-300:]
    licences = (module.parent / build_viewer.LICENCES).read_text(encoding="utf-8")
    for name in ("@niivue/niivue 0.69.0", "BSD 2-Clause", "gl-matrix", "fflate", "nifti-reader-js"):
        assert name in licences
