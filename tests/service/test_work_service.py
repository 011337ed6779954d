"""Every kind of job through the running service: from the request over HTTP to rows, layers and downloads."""

from __future__ import annotations

import gzip
import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest

from segcal.io.atomic import TEMPORARY_PREFIX
from segcal.manifest import Manifest
from tests.nnunet.folders import CLASS_LABELS, filled, write_case, write_documents
from tests.qa.batches import blob
from tests.service.running import Service, running_service
from tests.service.work_data import calibrator, contents, job_folder, labelled_cases, run
from tests.service.workers import wait_until

WAIT_S = 240.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    calibrator().save(folder / "ts.safetensors")
    watched = folder / "watched"
    write_documents(watched, labels=CLASS_LABELS)
    options = ("--watch", str(watched), "--calibrator", str(folder / "ts.safetensors"), "--settle", "0")
    with running_service(folder, *options) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60) as one:
        yield one


@pytest.fixture(scope="module")
def manifest(service: Service) -> Manifest:
    made = labelled_cases(service.root / "cases", ("a", "bad", "c", "d"))
    made.resolve(made.case("bad").members[1]).write_bytes(b"no archive")
    content = made.model_dump(mode="json", exclude_none=True)
    content["splits"] = [{"calibration": ["a"], "validation": ["c"], "test": ["d"]}]
    return Manifest.from_content(content, made.path).save(made.path)


def finished(client: httpx.Client, job: str) -> dict[str, Any]:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        answer: dict[str, Any] = client.get(f"/v1/jobs/{job}").json()
        if answer["state"] in ("done", "failed", "cancelled"):
            return answer
        time.sleep(0.1)
    raise AssertionError(f"the job has not come to an end: {answer}")


def done(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/jobs", json=request)
    assert answer.status_code == 202, answer.text
    job = finished(client, answer.json()["id"])
    assert job["state"] == "done", job["message"]
    return job


def test_an_applied_manifest_has_rows_layers_and_downloads(
    client: httpx.Client, service: Service, manifest: Manifest, tmp_path: Path
) -> None:
    job = done(client, {"kind": "apply", "calibrator": calibrator().sha256, "manifest": str(manifest.path)})

    expected = run(tmp_path, {"kind": "apply", "manifest": str(manifest.path)}, service.root)
    assert job["message"] == expected.message
    ours = {
        name: content
        for name, content in contents(job_folder(service.data, job["id"])).items()
        if name.startswith(("out/", "qa/", "view/"))
    }
    assert ours == contents(job_folder(tmp_path))
    rows = client.get("/v1/cases", params={"sort": "case", "batch": job["batch"]}).json()["cases"]
    assert [(row["case"], row["status"]) for row in rows] == [
        ("a", "ok"), ("bad", "failed"), ("c", "ok"), ("d", "ok"),
    ]  # fmt: skip
    layer = client.get(f"/v1/cases/{rows[0]['key']}/layers/p1.nii.gz")
    assert layer.content == ours["view/0/p1.nii.gz"]
    shown: Any = nib.Nifti1Image.from_bytes(gzip.decompress(layer.content))
    assert shown.shape == (16, 16, 8)
    assert "bad.npz" in rows[1]["error"]


def test_fitted_calibrators_can_be_used_in_the_next_job(client: httpx.Client, manifest: Manifest) -> None:
    fitted = done(client, {"kind": "fit", "manifest": str(manifest.path), "methods": ["ts"], "split": 0})
    (described,) = fitted["result"]["calibrators"]
    listed = {one["sha256"]: one["method"] for one in client.get("/v1/calibrators").json()["calibrators"]}
    assert listed[described["sha256"]] == "ts"

    looked = done(
        client,
        {"kind": "qa", "calibrator": described["sha256"], "manifest": str(manifest.path), "cases": ["c"]},
    )
    assert looked["result"]["n_done"] == 1

    measured = done(
        client,
        {"kind": "evaluate", "calibrators": [described["sha256"]], "manifest": str(manifest.path), "split": 0},
    )
    assert [p["name"] for p in measured["result"]["pipelines"]][-1] == "ts(z)"
    report = client.get(f"/v1/jobs/{measured['id']}/results/report.html")
    assert report.status_code == 200
    assert "<html" in report.text


def test_a_watched_output_and_an_upload_become_cases(client: httpx.Client, service: Service) -> None:
    write_case(service.data.parent / "watched", "night_1", filled(blob(5), None))
    archive = io.BytesIO()
    np.savez_compressed(archive, logits=blob(6))
    answer = client.post(
        "/v1/cases",
        params={"case": "up", "calibrator": calibrator().sha256},
        content=archive.getvalue(),
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.status_code == 202, answer.text
    uploaded = finished(client, answer.json()["id"])
    assert uploaded["state"] == "done", uploaded["message"]

    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        found = client.get("/v1/cases", params={"batch": "watched"}).json()["cases"]
        if found:
            break
        time.sleep(0.2)
    (row,) = found
    assert (row["case"], row["status"]) == ("night_1", "ok")
    assert client.get(f"/v1/cases/{row['key']}/layers/entropy.nii.gz").status_code == 200


def test_a_watched_output_that_failed_is_tried_again_as_its_one_job_and_never_as_another_prediction(
    client: httpx.Client, service: Service
) -> None:
    watched = service.data.parent / "watched"
    write_documents(watched, labels={"background": 0, "liver": 1})
    for name in ("mended", "predicted_again"):
        write_case(watched, name, filled(blob(7), None))
    failed = {name: watched_job(client, name, "failed") for name in ("mended", "predicted_again")}
    write_documents(watched, labels=CLASS_LABELS)
    write_case(watched, "predicted_again", filled(blob(8), None))
    second = watched_job(client, "predicted_again", "done")

    for job in failed.values():
        assert client.post(f"/v1/jobs/{job}/retry").status_code == 202
    mended, stale = (finished(client, job) for job in failed.values())

    assert (mended["state"], mended["attempts"]) == ("done", 1), mended["message"]
    assert stale["state"] == "failed"
    assert "was predicted again" in stale["message"]
    assert watched_jobs(client, "mended") == [failed["mended"]]
    assert watched_jobs(client, "predicted_again") == [second, failed["predicted_again"]]
    rows = {name: client.get("/v1/cases", params={"search": name}).json()["cases"] for name in failed}
    assert [(row["status"], row["job"]) for row in rows["mended"]] == [("ok", failed["mended"])]
    assert sorted((row["status"], row["job"]) for row in rows["predicted_again"]) == [
        ("failed", failed["predicted_again"]),
        ("ok", second),
    ]


def watched_jobs(client: httpx.Client, case: str, **filters: str) -> list[str]:
    """Jobs of a watched output, newest first."""
    found = client.get("/v1/jobs", params={"kind": "case", "batch": "watched", **filters}).json()["jobs"]
    return [job["id"] for job in found if job["request"]["case"] == case]


def watched_job(client: httpx.Client, case: str, state: str) -> str:
    """The one job of a watched output in a state, once there is one."""
    wait_until(lambda: bool(watched_jobs(client, case, state=state)), WAIT_S)
    (job,) = watched_jobs(client, case, state=state)
    return job


def test_a_manifest_that_leads_out_of_the_roots_is_refused_at_once(
    client: httpx.Client, service: Service, tmp_path: Path
) -> None:
    outside = labelled_cases(tmp_path / "elsewhere", ("x",))
    (service.root / "sly").mkdir()
    (service.root / "sly/manifest.yaml").write_text(outside.path.read_text())
    (service.root / "sly/member_0").symlink_to(tmp_path / "elsewhere/member_0")
    request = {"kind": "apply", "calibrator": calibrator().sha256, "manifest": str(service.root / "sly/manifest.yaml")}
    answer = client.post("/v1/jobs", json=request)
    assert answer.status_code in (400, 403, 422), answer.text
    assert "member_0/x.npz" in answer.json()["detail"]


@pytest.mark.slow
def test_a_job_whose_process_was_killed_is_taken_up_again_and_ends_the_same(
    client: httpx.Client, service: Service, tmp_path: Path
) -> None:
    many = labelled_cases(service.root / "many", [f"m{k:02d}" for k in range(12)])
    request = {"kind": "apply", "calibrator": calibrator().sha256, "manifest": str(many.path)}
    job = client.post("/v1/jobs", json=request).json()["id"]
    folder = job_folder(service.data, job)
    until = time.monotonic() + WAIT_S
    while not (folder / "view/1/view.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(_child_of(service.process.pid), signal.SIGKILL)

    ended = finished(client, job)
    assert ended["state"] == "done", ended["message"]
    assert ended["attempts"] == 2
    expected = run(tmp_path, {"kind": "apply", "manifest": str(many.path)}, service.root)
    assert ended["message"] == expected.message
    for name, content in contents(job_folder(tmp_path)).items():
        assert (folder / name).read_bytes() == content, name
    assert not list(folder.rglob(f"{TEMPORARY_PREFIX}*"))


def _child_of(pid: int) -> int:
    """The process that does the jobs, somewhere below the server."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = stat.read_text().split(" (", 1)
        except OSError:
            continue
        below.setdefault(int(rest.rsplit(") ", 1)[1].split()[1]), []).append(int(number))
    found, waiting = [], [pid]
    while waiting:
        for child in below.get(waiting.pop(), []):
            waiting.append(child)
            if b"segcal.service.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    (only,) = found
    return only
