"""`segcal serve --watch`, killed with SIGKILL while outputs appear: every output is calibrated and looked at once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from segcal.service.store import Store
from tests.nnunet.folders import CLASS_LABELS, filled, write_case, write_documents
from tests.qa.batches import blob
from tests.service.running import running_service
from tests.service.work_data import calibrator
from tests.service.workers import is_running, wait_until

NAMES = [f"night_{number}" for number in range(9)]


@pytest.mark.slow
def test_every_watched_output_is_done_once_however_often_the_server_is_killed(
    tmp_path: Path, store: Store, store_url: str
) -> None:
    watched = tmp_path / "watched"
    write_documents(watched, labels=CLASS_LABELS)
    calibrator().save(tmp_path / "ts.safetensors")
    options = ["--watch", str(watched), "--calibrator", str(tmp_path / "ts.safetensors"), "--settle", "0.5"]
    for part in (NAMES[:3], NAMES[3:6], NAMES[6:]):
        for name in part:
            write_case(watched, name, filled(blob(NAMES.index(name)), None))
        with running_service(tmp_path, *options, "--store", store_url) as service:
            wait_until(lambda: store.jobs.counts()["running"] == 1, 120)
            workers = [int(worker.name.split(":")[1]) for worker in store.workers.alive()]
            service.process.kill()
            service.process.wait()
        # The worker hears of it, ends its child and gives its job back.
        for pid in workers:
            wait_until(partial(ended, pid))

    with running_service(tmp_path, *options, "--store", store_url):
        wait_until(lambda: store.jobs.counts()["done"] == len(NAMES), 240)

    assert Counter(record.case.case_id for record in store.cases.page(batch="watched")) == Counter(NAMES)
    assert all(record.case.status == "ok" for record in store.cases.page())
    assert store.jobs.counts() == {"queued": 0, "running": 0, "done": len(NAMES), "failed": 0, "cancelled": 0}
    assert not list((tmp_path / "data").rglob(".segcal-*"))


def ended(pid: int) -> bool:
    """Whether a process is gone."""
    return not is_running(pid)
