"""Ctrl-C in a terminal, which reaches the command and all of its workers at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("distributed")

import psutil  # which distributed brings

from segcal.apply import apply_calibrator
from segcal.manifest import Manifest
from tests.apply_data import CPU, temperature
from tests.fit_data import write_ensemble
from tests.processes import heed_interrupts
from tests.scale.test_same_bytes import files_below

PATIENCE_S = 120

WRITES_SLOWLY = """
import time
import segcal.applying.files as files

def dask_setup(worker):
    def write_slowly(path, arrays):
        path.write_bytes(b"PK half a map")
        time.sleep(600)

    files.write_npz = write_slowly
"""


def test_it_ends_command_and_workers_with_one_line_and_resume_completes_the_run(tmp_path: Path) -> None:
    manifest, out = write_ensemble(tmp_path, n_cases=40), tmp_path / "out"
    code, said = interrupted_apply(manifest, out, lambda: any(out.glob("*.npz")))

    assert code == 130
    assert "Traceback" not in said
    assert "of 40 cases are finished" in said.splitlines()[-1]
    assert not list(out.rglob(".segcal-*"))
    apply_calibrator(temperature(2.0), manifest, out, device=CPU, resume=True)
    apply_calibrator(temperature(2.0), manifest, tmp_path / "fresh", device=CPU)
    found, fresh = files_below(out), files_below(tmp_path / "fresh")
    del found["run.json"], fresh["run.json"]
    assert found == fresh


@pytest.mark.parametrize("stops", [[signal.SIGINT], [signal.SIGINT] * 3, [signal.SIGTERM]], ids=repr)
def test_maps_that_workers_were_writing_do_not_stay_half_written(tmp_path: Path, stops: list[signal.Signals]) -> None:
    manifest, out, preload = write_ensemble(tmp_path, n_cases=4), tmp_path / "out", tmp_path / "writes_slowly.py"
    preload.write_text(WRITES_SLOWLY)
    preloaded = {"DASK_DISTRIBUTED__WORKER__PRELOAD": f"['{preload}']"}
    code, said = interrupted_apply(manifest, out, lambda: any(out.glob(".segcal-*.npz")), stops, preloaded)

    assert code == 130
    assert "0 of 4 cases are finished" in said.splitlines()[-1]
    assert list(files_below(out)) == ["run.json"]


def interrupted_apply(
    manifest: Manifest,
    out: Path,
    now: Callable[[], bool],
    stops: Sequence[signal.Signals] = (signal.SIGINT,),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int | None, str]:
    """Exit code and words of `apply --workers 2` that is stopped as soon as `now` is true, once or impatiently."""
    calibrator = out.parent / "ts.safetensors"
    temperature(2.0).save(calibrator)
    command = ["apply", str(calibrator), str(manifest.path), "--out", str(out), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from segcal_cli.main import run; run()", *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=in_a_terminal_of_its_own,
    )
    try:
        wait_until(lambda: process.poll() is not None or now())
        assert process.poll() is None
        for stop in stops:
            os.killpg(process.pid, stop)
            time.sleep(0.1)
        _, said = process.communicate(timeout=PATIENCE_S)
        # Python's own tracker of resources ends a moment after the command.
        wait_until(lambda: not processes_of_group(process.pid))
    finally:
        process.kill()
    return process.returncode, said


def in_a_terminal_of_its_own() -> None:
    os.setsid()
    heed_interrupts()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of_group(group: int) -> list[int]:
    """What still runs of it, but for what is already dead and not yet collected."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
