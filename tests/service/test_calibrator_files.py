"""Calibrators taken into the data folder: checked, under their hash, whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from segcal.errors import FileFormatError, MissingFileError
from segcal.fitted import load_calibrator
from segcal.service.calibrator_files import import_calibrator
from segcal.service.files import ServiceFiles
from segcal.service.store import Store, open_store
from tests.apply_data import temperature


@pytest.fixture
def files(tmp_path: Path) -> ServiceFiles:
    return ServiceFiles(tmp_path / "data")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'segcal.db'}")
    yield opened
    opened.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    temperature(2.0).save(tmp_path / "cal.safetensors")
    return tmp_path / "cal.safetensors"


def test_a_calibrator_is_kept_under_its_hash_with_what_it_says_of_itself(
    path: Path, files: ServiceFiles, store: Store
) -> None:
    record = import_calibrator(path, "night", files, store)

    kept = files.calibrator(record.sha256)
    assert kept.read_bytes() == path.read_bytes()
    assert load_calibrator(kept).sha256 == record.sha256
    assert (record.name, record.method, record.pooling) == ("night", "ts", "logits")
    assert record.classes == load_calibrator(path).info.classes
    assert record.info["method"] == "ts"
    assert store.calibrators.get(record.sha256) == record


def test_the_same_file_again_changes_nothing(path: Path, files: ServiceFiles, store: Store) -> None:
    first = import_calibrator(path, "night", files, store)

    assert import_calibrator(path, "day", files, store) == first
    assert len(store.calibrators.list()) == 1


def test_what_is_no_calibrator_leaves_nothing_behind(path: Path, files: ServiceFiles, store: Store) -> None:
    path.write_bytes(path.read_bytes()[:-5])

    with pytest.raises(FileFormatError, match="truncated"):
        import_calibrator(path, "", files, store)
    with pytest.raises(MissingFileError):
        import_calibrator(path.with_name("absent"), "", files, store)

    assert store.calibrators.list() == []
    assert not files.calibrators.exists() or not list(files.calibrators.iterdir())


def test_what_a_killed_process_left_is_cleared_away_and_what_another_writes_is_not(
    path: Path, files: ServiceFiles, store: Store
) -> None:
    files.calibrators.mkdir(parents=True)
    old, new = files.calibrators / ".segcal-1-old", files.calibrators / ".segcal-2-new"
    for leftover in (old, new):
        leftover.touch()
    os.utime(old, (time.time() - 7200, time.time() - 7200))

    import_calibrator(path, "", files, store)

    assert not old.exists()
    assert new.exists()
