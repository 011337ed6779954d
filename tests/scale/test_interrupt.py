"""Ctrl-C in a terminal, which reaches the command and all of its workers at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("distributed")

import psutil  # which distributed brings

from segcal.apply import apply_calibrator
from tests.apply_data import CPU, temperature
from tests.fit_data import write_ensemble
from tests.processes import heed_interrupts
from tests.scale.test_same_bytes import files_below

PATIENCE_S = 120


def in_a_terminal_of_its_own() -> None:
    os.setsid()
    heed_interrupts()


def test_it_ends_command_and_workers_with_one_line_and_resume_completes_the_run(tmp_path: Path) -> None:
    fitted, manifest, out = temperature(2.0), write_ensemble(tmp_path, n_cases=40), tmp_path / "out"
    fitted.save(tmp_path / "ts.safetensors")
    command = ["apply", str(tmp_path / "ts.safetensors"), str(manifest.path), "--out", str(out), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from segcal_cli.main import run; run()", *command],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=in_a_terminal_of_its_own,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not list(out.glob("*.npz")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
        deadline = time.monotonic() + 10  # Python's own tracker of resources ends a moment after us
        while (left := processes_of_group(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []
    finally:
        process.kill()

    assert process.returncode == 130
    assert "Traceback" not in said
    assert "of 40 cases are finished" in said.splitlines()[-1]
    assert not list(out.rglob(".segcal-*"))
    apply_calibrator(fitted, manifest, out, device=CPU, resume=True)
    apply_calibrator(fitted, manifest, tmp_path / "fresh", device=CPU)
    found, fresh = files_below(out), files_below(tmp_path / "fresh")
    del found["run.json"], fresh["run.json"]
    assert found == fresh


def processes_of_group(group: int) -> list[int]:
    """What still runs of it, but for what is already dead and not yet collected."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
