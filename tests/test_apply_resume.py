"""Runs that stop half-way, for whatever reason, and runs that are taken up again."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segcal import cases
from segcal.apply import ApplyRun, apply_calibrator
from segcal.applying import files as written_files
from segcal.errors import (
    DataError,
    FileFormatError,
    Interrupted,
    MissingFileError,
    OutputError,
    SegcalError,
    UsageError,
)
from segcal.fitted import FittedCalibrator
from segcal.io.members import Member, read_member
from segcal.manifest import Manifest
from tests.apply_data import CPU, random_logits, rotated, temperature, write_image, write_manifest, write_member
from tests.processes import heed_interrupts

REPOSITORY = Path(__file__).resolve().parents[1]
CASES = ("a", "b", "c")
PATIENCE_S = 120


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    cases = {case_id: [random_logits(seed)] for seed, case_id in enumerate(CASES)}
    return write_manifest(tmp_path, cases, affine=rotated())


def apply(manifest: Manifest, out: Path, fitted: FittedCalibrator | None = None, **how: Any) -> ApplyRun:
    return apply_calibrator(fitted or temperature(2.0), manifest, out, device=CPU, **how)


def contents(out: Path) -> dict[str, Any]:
    """All files of a run, run.json without its timings."""
    found: dict[str, Any] = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    record = json.loads(found["run.json"])
    for case in record["cases"].values():
        case.pop("seconds")
    return found | {"run.json": record}


def statuses(out: Path) -> dict[str, str]:
    record = json.loads((out / "run.json").read_text())
    return {case_id: case["status"] for case_id, case in record["cases"].items()}


def written_at(out: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.name != "run.json"}


def test_resuming_a_finished_run_touches_nothing(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    apply(manifest, out)
    before, times = contents(out), written_at(out)
    run = apply(manifest, out, resume=True)

    assert run.skipped == list(CASES)
    assert run.done == list(run.redone) == []
    assert written_at(out) == times
    assert contents(out) == before


def test_resuming_does_not_unpack_finished_cases(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(manifest, tmp_path / "out")

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("a finished case was read again")

    monkeypatch.setattr("segcal.applying.work.load_case", unexpected)
    assert apply(manifest, tmp_path / "out", resume=True).skipped == list(CASES)


def test_resume_does_exactly_the_changed_case_again(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    apply(manifest, out)
    times = written_at(out)
    write_member(tmp_path / "member_0" / "b.npz", random_logits(99))
    run = apply(manifest, out, resume=True)

    assert (run.done, run.redone, run.skipped) == (["b"], {"b": "input files"}, ["a", "c"])
    changed = {name for name, when in written_at(out).items() if when != times[name]}
    assert changed == {"b.npz", "b.nii.gz"}
    fresh = tmp_path / "fresh"
    apply(manifest, fresh)
    assert contents(out) == contents(fresh)


def test_a_member_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(path: Path, **options: Any) -> Member:
        if path.name == "b.npz":
            write_member(path, random_logits(7))
        return read_member(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(cases, "read_member", overtaken)
        apply(manifest, tmp_path / "out")
    assert apply(manifest, tmp_path / "out", resume=True).redone == {"b": "input files"}


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_resume_repairs_files_that_were_lost_or_cut(tmp_path: Path, manifest: Manifest, damage: str) -> None:
    out = tmp_path / "out"
    apply(manifest, out)
    before = contents(out)
    target = out / "b.nii.gz"
    if damage == "missing":
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[:-1])

    run = apply(manifest, out, resume=True)
    assert (run.done, run.redone) == (["b"], {"b": "its files"})
    assert contents(out) == before


def test_resume_notices_that_the_geometry_changed(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    apply(manifest, out, format="nifti")
    write_image(tmp_path / "images" / "c_0000.nii.gz", (4, 5, 6), rotated((1.0, 1.0, 4.0)))

    assert apply(manifest, out, format="nifti", resume=True).done == ["c"]


def test_resume_with_another_calibrator_does_everything_again(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    apply(manifest, out)
    run = apply(manifest, out, temperature(3.0), resume=True)

    assert run.redone == dict.fromkeys(CASES, "calibrator")
    apply(manifest, tmp_path / "fresh", temperature(3.0))
    assert contents(out) == contents(tmp_path / "fresh")


def test_maps_of_two_calibrators_never_stand_in_one_folder(tmp_path: Path, manifest: Manifest) -> None:
    """run.json, the page and QA name one calibrator for all of them."""
    out = tmp_path / "out"
    apply(manifest, out)
    before = contents(out)
    with pytest.raises(UsageError, match=r"2 maps of another calibrator \(ts; a, c\) would stay .*--out"):
        apply(manifest, out, temperature(3.0), resume=True, cases=["b"])
    assert contents(out) == before
    assert apply(manifest, out, resume=True, cases=["b"]).skipped == ["b"]


def test_a_page_goes_when_what_it_shows_changes_and_not_before(tmp_path: Path, manifest: Manifest) -> None:
    page = tmp_path / "out" / "report.html"
    page.parent.mkdir()
    page.write_text("of somebody else")
    apply(manifest, page.parent)
    assert page.is_file()
    apply(manifest, page.parent, resume=True)
    assert page.is_file()
    apply(manifest, page.parent, temperature(3.0), resume=True)
    assert not page.exists()


def test_a_run_that_wrote_nothing_does_not_stand_in_the_way(tmp_path: Path, manifest: Manifest) -> None:
    member = tmp_path / "member_0" / "a.npz"
    whole = member.read_bytes()
    member.write_bytes(whole[:100])
    with pytest.raises(FileFormatError):
        apply(manifest, tmp_path / "out")
    member.write_bytes(whole)
    assert apply(manifest, tmp_path / "out").done == list(CASES)


def test_resume_with_other_settings_says_which(tmp_path: Path, manifest: Manifest) -> None:
    apply(manifest, tmp_path / "out")
    run = apply(manifest, tmp_path / "out", format="nifti", dtype="uint16", resume=True)
    assert run.redone == dict.fromkeys(CASES, "format, dtype")


def test_resume_with_other_settings_leaves_no_file_of_the_old_ones(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    apply(manifest, out, confidence=True)
    apply(manifest, out, format="nifti", dtype="uint16", resume=True)
    apply(manifest, tmp_path / "fresh", format="nifti", dtype="uint16")

    assert contents(out) == contents(tmp_path / "fresh")


def test_a_run_can_be_extended_case_by_case(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    apply(manifest, out, cases=["b"])
    run = apply(manifest, out, cases=["a", "b", "c"], resume=True)

    assert (run.done, run.skipped) == (["a", "c"], ["b"])
    apply(manifest, tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")


def test_without_resume_a_folder_with_a_run_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    apply(manifest, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match=r"already holds a run .*--resume.*--out"):
        apply(manifest, tmp_path / "out", temperature(5.0))
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "command": "evaluate"}'])
def test_a_foreign_or_broken_run_json_is_refused_by_name(tmp_path: Path, manifest: Manifest, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"run\.json: not the record"):
        apply(manifest, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "run.json").read_text() == text


@pytest.mark.parametrize("what", ["folder", "loop"])
def test_a_run_json_that_cannot_be_read_is_said_in_words(tmp_path: Path, manifest: Manifest, what: str) -> None:
    record = tmp_path / "out" / "run.json"
    (record if what == "folder" else record.parent).mkdir(parents=True)
    if what == "loop":
        record.symlink_to(record)
    with pytest.raises(UsageError, match=r"run\.json: cannot be read \(.*\); choose another --out"):
        apply(manifest, tmp_path / "out")


@pytest.mark.parametrize("name", ["{root}/precious", "../precious", "../images/b_0000.nii.gz", "b.npz", "./a.npz"])
def test_a_run_json_that_names_files_no_run_writes_is_refused_and_nothing_is_removed(
    tmp_path: Path, manifest: Manifest, name: str
) -> None:
    (tmp_path / "precious").write_text("x")
    apply(manifest, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    record["cases"]["a"]["outputs"].append({"file": name.format(root=tmp_path), "bytes": 1})
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    with pytest.raises(FileFormatError, match=r"run\.json: .*cases: a lists '.*', which .* never writes .*--out"):
        apply(manifest, tmp_path / "out", temperature(3.0), resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_json_whose_case_is_no_case_id_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    apply(manifest, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    record["cases"]["../a"] = record["cases"]["a"] | {"outputs": [{"file": "../a.npz", "bytes": 1}]}
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))

    with pytest.raises(FileFormatError, match="cannot be a case id"):
        apply(manifest, tmp_path / "out", resume=True)


def break_case(root: Path, case_id: str, how: str) -> type[SegcalError]:
    path = root / "member_0" / f"{case_id}.npz"
    if how == "missing":
        path.unlink()
        return MissingFileError
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:100])
        return FileFormatError
    logits = random_logits(1)
    logits[0, 0, 0, 0] = np.nan
    write_member(path, logits)
    return DataError


@pytest.mark.parametrize("how", ["missing", "truncated", "nan"])
def test_a_broken_case_ends_the_run_with_its_own_error(tmp_path: Path, manifest: Manifest, how: str) -> None:
    expected = break_case(tmp_path, "b", how)
    with pytest.raises(expected, match=r"b\.npz"):
        apply(manifest, tmp_path / "out")

    assert statuses(tmp_path / "out") == {"a": "done", "b": "failed"}
    assert json.loads((tmp_path / "out" / "run.json").read_text())["complete"] is False


@pytest.mark.parametrize("how", ["missing", "truncated", "nan"])
def test_keep_going_does_the_others_and_resume_the_repaired_one(tmp_path: Path, manifest: Manifest, how: str) -> None:
    good = (tmp_path / "member_0" / "b.npz").read_bytes()
    break_case(tmp_path, "b", how)
    out = tmp_path / "out"
    run = apply(manifest, out, keep_going=True)

    assert run.done == ["a", "c"]
    assert list(run.failed) == ["b"]
    assert "b.npz" in run.failed["b"]
    assert statuses(out) == {"a": "done", "b": "failed", "c": "done"}
    assert not [path for path in out.rglob("*") if path.name.startswith("b")]

    (tmp_path / "member_0" / "b.npz").write_bytes(good)
    again = apply(manifest, out, resume=True)
    assert (again.done, again.skipped, again.redone) == (["b"], ["a", "c"], {})
    apply(manifest, tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_run_is_not_complete_while_a_case_of_its_record_is_failed(tmp_path: Path, manifest: Manifest) -> None:
    def complete() -> bool:
        return bool(json.loads((tmp_path / "out" / "run.json").read_text())["complete"])

    good = (tmp_path / "member_0" / "b.npz").read_bytes()
    break_case(tmp_path, "b", "truncated")
    apply(manifest, tmp_path / "out", keep_going=True)
    apply(manifest, tmp_path / "out", cases=["a"], resume=True)
    assert not complete()

    (tmp_path / "member_0" / "b.npz").write_bytes(good)
    apply(manifest, tmp_path / "out", cases=["b"], resume=True)
    assert complete()


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_full_disk_stops_the_run_and_leaves_nothing_half(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, keep_going: bool
) -> None:
    real = written_files.write_nifti
    calls = 0

    def full_from_the_second_on(path: Path, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *arguments, **options)

    monkeypatch.setattr(written_files, "write_nifti", full_from_the_second_on)
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="disk is full"):
        apply(manifest, out, keep_going=keep_going)
    monkeypatch.undo()

    assert calls == 2
    assert statuses(out) == {"a": "done"}
    assert not list(out.rglob(".segcal-*"))
    assert not (out / "b.nii.gz").exists()
    apply(manifest, out, resume=True)
    apply(manifest, tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_failed_redo_does_not_leave_a_record_of_the_old_files(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    apply(manifest, out)
    write_member(tmp_path / "member_0" / "b.npz", random_logits(99))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(written_files, "write_nifti", full)
    with pytest.raises(OutputError):
        apply(manifest, out, resume=True)

    # b.npz is already the new one, b.nii.gz still the old: run.json must not vouch for them.
    assert "b" not in statuses(out)


def test_ctrl_c_between_cases_says_how_to_go_on(tmp_path: Path, manifest: Manifest) -> None:
    def stop(_: str, done: int, __: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"2 of 3 cases are finished .*--resume"):
        apply(manifest, tmp_path / "out", progress=stop)
    assert statuses(tmp_path / "out") == {"a": "done", "b": "done"}


HANGS_IN_CASE_B = """
import sys, time
from pathlib import Path
from segcal.applying import files

real, reached = files.write_npz, Path(sys.argv.pop(1))

def write_half_and_hang(path, arrays):
    real(path, arrays)
    if path.name.endswith("b.npz"):
        path.write_bytes(path.read_bytes()[:200])
        reached.touch()
        time.sleep(600)

files.write_npz = write_half_and_hang
from segcal_cli.main import run
run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_no_partial_file_and_resume_completes_it(
    tmp_path: Path, manifest: Manifest, number: signal.Signals
) -> None:
    fitted, out, reached = temperature(2.0), tmp_path / "out", tmp_path / "reached"
    fitted.save(tmp_path / "ts.safetensors")
    command = [sys.executable, "-c", HANGS_IN_CASE_B, str(reached), "apply", str(tmp_path / "ts.safetensors")]
    command += [str(manifest.path), "--out", str(out), "--device", "cpu"]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=heed_interrupts,
    )
    try:
        wait_for(reached, process)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()

    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "1 of 3 cases are finished" in complaint
        assert not list(out.rglob(".segcal-*"))
    assert statuses(out) == {"a": "done"}
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {"a.npz", "a.nii.gz", "run.json"}
    apply(manifest, out, fitted, resume=True)
    apply(manifest, tmp_path / "fresh", fitted)
    assert contents(out) == contents(tmp_path / "fresh")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert process.poll() is None, f"the run ended before it was stopped: {process.communicate()[1]}"
        assert time.monotonic() < deadline, "the run never came to its second case"
        time.sleep(0.02)
