"""What the tests of the API talk to: an app in this process, and things in its store with known content."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from anyio import sleep_forever
from fastapi import FastAPI
from fastapi.testclient import TestClient

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS
from segcal.fitted import FittedCalibrator
from segcal.service.api.app import create_app
from segcal.service.api.context import ApiContext
from segcal.service.calibrator_files import import_calibrator
from segcal.service.model import CalibratorRecord, Job, NewCase, Scope
from segcal.service.requests import CaseRequest, QaRequest
from segcal.service.settings import MIB, Limits, ServiceSettings
from segcal.service.store import Store, open_store
from tests.service.view_data import affine_of, write_view

ADDRESS = "http://127.0.0.1:8421"
LIMITS = Limits(free_disk_bytes=MIB, upload_bytes=8 * MIB, unpacked_bytes=32 * MIB)
BINARY = {"Content-Type": "application/octet-stream"}
CLASSES = ("background", "anterior", "posterior")


@dataclass(frozen=True)
class Api:
    """An app with its client."""

    settings: ServiceSettings
    store: Store
    app: FastAPI
    client: TestClient

    @property
    def context(self) -> ApiContext:
        context = self.app.state.context
        assert isinstance(context, ApiContext)
        return context

    @property
    def uploads(self) -> list[str]:
        """Names in the folder of uploads, which is empty unless one is under way."""
        return sorted(path.name for path in self.context.files.uploads.iterdir())

    @property
    def job_folders(self) -> list[str]:
        folder = self.settings.data / "jobs"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def raw_get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET whose path reaches the app as it is; clients would tidy `..` away."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1:8421")],
            "server": ("127.0.0.1", 8421),
        }
        messages: list[Any] = []
        requests = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (request := next(requests, None)) is None:
                await sleep_forever()  # the client stays until the answer is whole
                raise AssertionError
            return request

        async def send(message: Any) -> None:
            messages.append(message)

        assert self.client.portal is not None
        self.client.portal.call(self.app, scope, receive, send)
        return messages[0]["status"], b"".join(each.get("body", b"") for each in messages[1:])

    def token(self, scope: Scope = "read", *, name: str = "anna", expires: float | None = None) -> dict[str, str]:
        """Headers with a new token."""
        return {"Authorization": f"Bearer {self.store.tokens.create(name, scope, expires)[1]}"}


@contextmanager
def running_api(data: Path, *, limits: Limits = LIMITS, **values: Any) -> Iterator[Api]:
    """An app over a SQLite store below `data`."""
    settings = ServiceSettings(data=data, limits=limits, **values)
    store = open_store(settings.url)
    app = create_app(settings, store)
    try:
        with TestClient(app, base_url=ADDRESS, follow_redirects=False) as client:
            yield Api(settings, store, app, client)
    finally:
        store.close()


def calibrator_bytes(temperature: float = 1.5, classes: tuple[str, ...] = CLASSES) -> bytes:
    """The file of a temperature."""
    info = CalibratorInfo(
        method="ts", classes=classes, pooling="logits", kind="logits", translation_invariant=True, preserves="order"
    )
    return FittedCalibrator(CALIBRATORS["ts"](temperature=temperature), info).content


def add_calibrator(api: Api, temperature: float = 1.5, name: str = "night shift") -> CalibratorRecord:
    """A calibrator in the store."""
    path = api.settings.data / "made.safetensors"
    path.write_bytes(calibrator_bytes(temperature))
    record = import_calibrator(path, name, api.context.files, api.store)
    path.unlink()
    return record


def npz_bytes(**arrays: Any) -> bytes:
    """An .npz; three classes of logits unless told otherwise."""
    buffer = io.BytesIO()
    if not arrays:
        arrays = {"logits": np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)}
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def finished_job(api: Api, cases: tuple[NewCase, ...] = (), batch: str = "night") -> Job:
    """A job that was done, with files of its own."""
    request = QaRequest(calibrator="a" * 64, manifest="/data/manifest.yaml", batch=batch)
    job = api.store.jobs.submit(request, batch=batch, submitted_by="anna", queue_limit=1000)
    while (claim := api.store.jobs.claim("worker", 60.0)) is not None and claim.job.id != job.id:
        pass
    assert claim is not None
    folder = api.context.files.job(job.id)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert api.store.jobs.finish(claim, message="done", result={"n_cases": len(cases)}, cases=cases, calibrators=())
    return api.store.jobs.get(job.id)


def looked_at(case_id: str = "hippocampus_001", **values: Any) -> NewCase:
    """A case that worked, with numbers."""
    case = NewCase(case_id=case_id, status="ok", calibrator="a" * 64, expected_dsc=0.9, files=("out/map.npz",))
    return replace(case, **values)


def case_with_layers(api: Api) -> int:
    """A case to look at; gives its key."""
    job = finished_job(api, (looked_at(view="view/0", n_flags=1, flags=(("low_dsc", "expected Dice is low"),)),))
    write_view(api.context.files.job(job.id) / "view" / "0", affine_of("RAS"))
    return api.store.cases.of_job(job.id)[0].key


def waiting_upload(api: Api) -> CaseRequest:
    """The request of an uploaded case."""
    return CaseRequest(calibrator=add_calibrator(api).sha256, case="c1")


FILES = {
    "out/map.npz": bytes(range(256)) * 4,
    "qa/qa.csv": b"case,flags\nhippocampus_001,0\n",
    "qa/qa.html": b"<!doctype html><title>qa</title><script>1</script>",
    "out/other.html": b"<script>alert(1)</script>",
    "report.html": b"<!doctype html><title>report</title>",
    "in/case.npz": b"what was sent",
    "lock": b"",
    "out/.segcal-12ab-map.npz": b"half",
}
"""What a job left; the last three are nobody's business."""
