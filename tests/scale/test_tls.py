"""A cluster that speaks TLS, made as docs/scaling.md says: certificates by openssl, the same variables everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("distributed")

from tests.fit_data import write_ensemble
from tests.processes import heed_interrupts

DOCS = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"

SEGCAL = "from segcal_cli.main import run; run()"

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def documented(folder: Path) -> dict[str, str]:
    """The variables of the recipe in the documentation, with the files in `folder`."""
    settings = dict(re.findall(r"(DASK_DISTRIBUTED__COMM__\w+)=(\S+)", DOCS.read_text()))
    assert len(settings) == 8
    return {name: value if value == "True" else str(folder / value) for name, value in settings.items()}


def make_certificate(folder: Path) -> None:
    command = next(line for line in DOCS.read_text().splitlines() if line.startswith("openssl req"))
    folder.mkdir()
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    assert (folder / "key.pem").stat().st_mode & 0o077 == 0


@contextmanager
def dask(command: str, *arguments: str, settings: Mapping[str, str]) -> Iterator[None]:
    started = subprocess.Popen(
        [sys.executable, "-m", "dask", command, *arguments],
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_interrupts,
    )
    try:
        yield
    finally:
        started.terminate()
        started.wait(60)


def fit(manifest: Path, out: Path, *options: str, settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SEGCAL, "fit", str(manifest), "--method", "ts", "--out", str(out), *options],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_the_documented_recipe_gives_the_same_calibrator_and_lets_nobody_else_in(tmp_path: Path) -> None:
    write_ensemble(tmp_path, n_cases=4)
    make_certificate(tmp_path / "tls")
    make_certificate(tmp_path / "foreign")
    settings = documented(tmp_path / "tls")
    at = tmp_path / "scheduler.json"
    with ExitStack() as cluster:
        place = ("--host", "tls://127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(at))
        cluster.enter_context(dask("scheduler", *place, settings=settings))
        until = time.monotonic() + 60
        while not at.is_file() and time.monotonic() < until:
            time.sleep(0.1)
        address = re.findall(r"tls://127\.0\.0\.1:\d+", at.read_text())[0]
        cluster.enter_context(dask("worker", address, "--nthreads", "1", "--no-dashboard", settings=settings))
        manifest = tmp_path / "manifest.yaml"
        found = fit(manifest, tmp_path / "tls.safetensors", "--scheduler", address, settings=settings)
        assert found.returncode == 0, found.stderr
        alone = fit(manifest, tmp_path / "alone.safetensors", settings={})
        assert alone.returncode == 0, alone.stderr
        assert (tmp_path / "tls.safetensors").read_bytes() == (tmp_path / "alone.safetensors").read_bytes()
        short = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s"}
        foreign = documented(tmp_path / "foreign") | short
        refused = fit(manifest, tmp_path / "no.safetensors", "--scheduler", address, settings=foreign)
        assert refused.returncode != 0
        assert address in refused.stderr
        plain = address.replace("tls://", "tcp://")
        refused = fit(manifest, tmp_path / "no.safetensors", "--scheduler", plain, settings=short)
        assert refused.returncode != 0
        assert not (tmp_path / "no.safetensors").exists()
