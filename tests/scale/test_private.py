"""What other users of the machine can do with the processes of `--workers`, and what they learn: nothing."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

pytest.importorskip("distributed")

import psutil  # which distributed brings
from distributed import Security
from distributed.comm.core import connect

from segcal.apply import apply_calibrator
from segcal.errors import UsageError
from segcal.manifest import Manifest
from segcal.scale import DaskCases, open_cluster
from tests.apply_data import temperature
from tests.fit_data import write_ensemble
from tests.scale.faulty import Held, wait_for, with_fault

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for temporary files, where somebody else was before us and left the door open."""
    folder = tmp_path_factory.mktemp("tmp")
    (folder / "dask-scratch-space").mkdir(mode=0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


@pytest.fixture(scope="module")
def workers(temporary: Path) -> Iterator[DaskCases]:
    with open_cluster(workers=2, wait_s=60) as cases:
        yield cases
    assert [str(path.relative_to(temporary)) for path in temporary.rglob("*")] == ["dask-scratch-space"]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_ensemble(tmp_path_factory.mktemp("data"), n_cases=3)


def listening() -> set[int]:
    """Ports of this process and the processes it started."""
    here = psutil.Process()
    ports = set()
    for process in (here, *here.children(recursive=True)):
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                assert each.laddr.ip == "127.0.0.1"
                ports.add(each.laddr.port)
    return ports


def let_in(ports: Iterable[int], security: Security | None, patience_s: float = 3.0) -> set[int]:
    """Of the ports, those where somebody who speaks Dask lets us in."""
    protocol, arguments = "tcp", {}
    if security is not None:
        protocol, arguments = "tls", security.get_connection_args("client")

    async def greet(port: int) -> bool:
        address = f"{protocol}://127.0.0.1:{port}"
        try:
            comm = await asyncio.wait_for(connect(address, timeout=patience_s, **arguments), patience_s)
        except OSError:  # a TimeoutError is one
            return False
        await comm.close()
        return True

    async def greet_all() -> list[bool]:
        return await asyncio.gather(*map(greet, ports))

    return {port for port, answered in zip(ports, asyncio.run(greet_all()), strict=True) if answered}


def test_only_who_holds_the_certificate_of_the_run_is_let_in(workers: DaskCases) -> None:
    workers.client.wait_for_workers(2, timeout=60)
    scheduler: Any = workers.client.cluster.scheduler
    nannies = [worker.nanny for worker in scheduler.workers.values()]
    ours = {int(address.rsplit(":", 1)[1]) for address in [scheduler.address, *scheduler.workers, *nannies]}
    assert len(ours) == 5
    ports = listening()  # also those of the dashboard
    assert ours < ports
    assert let_in(ours, workers.client.security, patience_s=60) == ours
    assert let_in(ports, None) == set()
    assert let_in(ports, Security.temporary()) == set()


def test_nothing_is_imported_from_a_folder_that_others_may_write_to(workers: DaskCases, temporary: Path) -> None:
    """Dask puts the folder for its temporary files first in the search path of modules."""
    paths = {*sys.path, *(path for found in workers.client.run(lambda: sys.path).values() for path in found)}
    below = [Path(path) for path in paths if Path(path).is_relative_to(temporary)]
    assert below
    for path in below:
        private = temporary / path.relative_to(temporary).parts[0]
        assert private.stat().st_mode & 0o077 == 0


def test_a_killed_worker_is_replaced_by_one_that_is_let_in(
    workers: DaskCases, manifest: Manifest, tmp_path: Path
) -> None:
    before = set(workers.client.run(os.getpid).values())
    faulty = with_fault(workers, "case_01", "kill", tmp_path / "killed")
    run = apply_calibrator(temperature(2.0), manifest, tmp_path / "out", device=CPU, case_map=faulty)
    assert (len(run.done), run.failed) == (3, {})
    workers.client.wait_for_workers(2, timeout=60)
    assert len(set(workers.client.run(os.getpid).values()) - before) == 1


def test_the_key_is_no_argument_and_no_variable_of_a_process(workers: DaskCases) -> None:
    for process in psutil.Process().children(recursive=True):
        assert "PRIVATE" not in " ".join([*process.cmdline(), *process.environ().values()])


def test_the_dashboard_does_not_name_cases(workers: DaskCases, tmp_path: Path) -> None:
    """It has no password, and in some clinics a case is named after its patient; what was raised names the case."""
    workers.client.wait_for_workers(2, timeout=60)
    scheduler: Any = workers.client.cluster.scheduler
    # The failed case is still there to be shown while the results wait for one before it.
    held = Held(str, failing="case_02", held="case_01", folder=tmp_path)
    with ThreadPoolExecutor(1) as executor:
        outcomes = executor.submit(lambda: list(workers(held, ["case_01", "case_02"])))
        try:
            wait_for(held.under_way)
            while (failed := finished(scheduler)) is None:
                assert not outcomes.done()
                time.sleep(0.05)
            pages = ["info/main/workers.html", "info/main/exceptions.html", "metrics"]
            pages += [f"info/{kind}/{quote(failed, safe='')}.html" for kind in ("task", "call-stack")]
            for worker in scheduler.workers:
                pages += [f"info/{kind}/{quote(worker, safe='')}.html" for kind in ("worker", "logs", "call-stacks")]
            base = workers.client.dashboard_link.removesuffix("status")
            for page in pages:
                with urllib.request.urlopen(base + page, timeout=30) as answer:
                    assert not re.search("case_0|noise", answer.read().decode()), page
        finally:
            held.let_go.touch()
        assert [str(outcome.error or outcome.value) for outcome in outcomes.result()] == [
            "case_01",
            "case_02: nothing but noise",
        ]


def finished(scheduler: Any) -> str | None:
    """The case that is over, well or not."""
    over = [key for key, task in list(scheduler.tasks.items()) if "-case-" in key and task.state in ("memory", "erred")]
    return over[0] if over else None


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"cryptography.*pip install .*'\.\[dask\]'"), open_cluster(workers=1):
        pass
