"""A worker whose Dask scheduler is absent, appears, is killed in the middle of a job and appears again."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("distributed")

from segcal.service.child import AWAY
from segcal.service.files import ServiceFiles
from segcal.service.requests import ApplyRequest
from segcal.service.store import open_store
from segcal.service.worker import Worker
from tests.scale.dask_processes import dask_process
from tests.service.real_results import store_calibrator
from tests.service.work_data import calibrator, labelled_cases
from tests.service.workers import finished, settings_of, wait_until

IMPATIENT_CHILD = (
    sys.executable,
    "-c",
    "from segcal.scale import cluster, dask_cases\nfrom segcal.service import child\n"
    "cluster.CONNECT_S, dask_cases.CALL_S, child.AWAY_S = 0.5, 1.0, 0.2\nchild.main()",
)
"""The real child with short timings."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def dask_cluster(port: int, folder: Path) -> Iterator[None]:
    """A scheduler and one worker of Dask."""
    worker = (f"tcp://127.0.0.1:{port}", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory")
    with ExitStack() as stack:
        stack.enter_context(
            dask_process("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        )
        stack.enter_context(dask_process("dask_worker", *worker, str(folder)))
        yield


def test_a_job_waits_for_its_scheduler_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """One attempt is allowed, so that a single one that counted would fail the job."""
    port, url = free_port(), f"sqlite:///{tmp_path / 'segcal.db'}"
    manifest = labelled_cases(tmp_path / "root", [f"case_{n:02d}" for n in range(12)])
    settings = settings_of(tmp_path / "data", url, attempts=1)
    settings = replace(settings, roots=(tmp_path / "root",), scheduler=f"tcp://127.0.0.1:{port}")
    store = open_store(url)
    request = ApplyRequest(
        calibrator=store_calibrator(calibrator(), settings.data), manifest=str(manifest.path), qa=False
    )
    job_id = store.jobs.submit(request, batch="b", submitted_by="", queue_limit=9).id
    out = ServiceFiles(settings.data).job(job_id) / "out"

    def is_waiting() -> bool:
        return store.jobs.get(job_id).progress.stage == AWAY

    stop = threading.Event()
    thread = threading.Thread(target=Worker(settings, store, child_command=IMPATIENT_CHILD).run, args=(stop,))
    thread.start()
    try:
        wait_until(is_waiting)
        with dask_cluster(port, tmp_path):
            wait_until(lambda: bool(list(out.glob("case_*.npz"))), 120)
        n_before = len(list(out.glob("case_*.npz")))
        wait_until(is_waiting)
        with dask_cluster(port, tmp_path):
            job = finished(store, job_id, 120)
    finally:
        stop.set()
        thread.join(60)
        store.close()

    assert n_before < 12  # it was killed in the middle
    assert (job.state, job.attempts, job.result["n_done"]) == ("done", 1, 12), job.message
    assert not thread.is_alive()
