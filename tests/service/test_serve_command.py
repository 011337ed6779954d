"""`segcal serve` and `segcal token` as users run them."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from segcal.service.api.service import run_service
from segcal.service.requests import FitRequest
from segcal.service.settings import ServiceSettings
from segcal.service.store import open_store
from segcal_cli.main import app
from segcal_cli.serve import size_of
from tests.service.api_data import BINARY, Api, calibrator_bytes, npz_bytes
from tests.service.running import Service, running_service


def wait_for(client: httpx.Client, job_id: str, seconds: float = 90.0) -> dict[str, Any]:
    """The job once it is finished."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()
        if job["state"] in ("done", "failed", "cancelled"):
            return job
        time.sleep(0.1)
    raise AssertionError(f"not finished: {job}")


def children_of(pid: int) -> set[int]:
    """All processes below a process."""
    found, new = set(), {pid}
    while new:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", ",".join(map(str, new))], capture_output=True, text=True, check=False
        )
        new = {int(each) for each in listed.stdout.split()} - found
        found |= new
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_uploaded_case_is_calibrated_looked_at_and_shown(service: Service, client: httpx.Client) -> None:
    uploaded = client.post("/v1/calibrators", params={"name": "ours"}, content=calibrator_bytes(), headers=BINARY)
    sha256 = uploaded.json()["sha256"]
    params = {"case": "c1", "calibrator": sha256, "batch": "first day"}
    submitted = client.post("/v1/cases", params=params, content=npz_bytes(), headers=BINARY)
    assert submitted.status_code == 202, submitted.text
    job = wait_for(client, submitted.json()["id"])
    assert job["state"] == "done", job["message"]
    found = client.get("/v1/cases", params={"batch": "first day"}).json()["cases"]
    assert [(each["case"], each["status"], each["calibrator"]) for each in found] == [("c1", "ok", sha256)]
    files = client.get(f"/v1/jobs/{job['id']}/results").json()["files"]
    assert any(file["path"].endswith(".npz") for file in files)
    for file in files:
        assert len(client.get(f"/v1/jobs/{job['id']}/results/{file['path']}").content) == file["size"]
    picture = client.get(f"/v1/cases/{found[0]['key']}/slices/segmentation/z/0.png")
    assert picture.content.startswith(b"\x89PNG")
    assert client.get("/v1/ready").json() == {"ready": True, "reasons": []}
    assert client.get(f"/v1/calibrators/{sha256}").json()["n_cases"] == 1


def test_what_it_logs_is_a_json_object_a_line(service: Service, client: httpx.Client) -> None:
    client.get("/v1/jobs", params={"batch": "somebody's name"})

    def routes() -> set[str]:
        lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
        return {line["route"] for line in lines if line["message"] == "request"}

    until = time.monotonic() + 10
    while "/v1/jobs" not in routes() and time.monotonic() < until:  # written after the answer is out
        time.sleep(0.05)
    assert "/v1/jobs" in routes()
    assert "somebody" not in service.log.read_text()


def test_sigterm_ends_everything_cleanly_also_with_an_open_event_stream(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        with service.client() as client:
            until = time.monotonic() + 60
            while not client.get("/v1/ready").json()["ready"] and time.monotonic() < until:
                time.sleep(0.1)
        below = children_of(service.process.pid)
        assert below
        sent = f"GET /v1/jobs/{_waiting_job(service)}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        host, port = service.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as stream:
            stream.sendall(sent.encode())
            assert b"200 OK" in stream.recv(65536)
            began = time.monotonic()
            assert service.end() == 0
        assert time.monotonic() - began < 30
        assert not [pid for pid in below if alive(pid)]


def _waiting_job(service: Service) -> str:
    """A job that no worker takes: one put beside the queue's head would race with the worker, a held one does not."""
    store = open_store(ServiceSettings(data=service.data).url)
    try:
        manifest = str(service.root / "none.yaml")
        job = store.jobs.submit(FitRequest(manifest=manifest), batch="", submitted_by="", queue_limit=9)
        claim = store.jobs.claim("held by the test", 600.0)
        assert claim is None or claim.job.id == job.id
        return job.id
    finally:
        store.close()


def test_a_killed_server_leaves_jobs_and_data_to_the_next_start(tmp_path: Path) -> None:
    with running_service(tmp_path, workers=0) as service:
        with service.client() as client:
            sha256 = client.post(
                "/v1/calibrators", params={"name": "x"}, content=calibrator_bytes(), headers=BINARY
            ).json()["sha256"]
            params = {"case": "c1", "calibrator": sha256}
            job = client.post("/v1/cases", params=params, content=npz_bytes(), headers=BINARY).json()
        service.end(signal.SIGKILL)
    with running_service(tmp_path, workers=0) as service, service.client() as client:
        assert client.get(f"/v1/jobs/{job['id']}").json() == job
        assert client.get("/v1/calibrators").json()["calibrators"][0]["sha256"] == sha256
        assert "no worker" in client.get("/v1/ready").json()["reasons"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--watch", "."], "belong together"),
        (["--calibrator", "none.safetensors"], "belong together"),
        (["--watch", ".", "--calibrator", "none.safetensors"], "no such file"),
        (["--root", "/no/such/folder"], "no such folder"),
        (["--upload-limit", "lots"], "expected a size"),
        (["--host", "203.0.113.7"], "cannot listen"),
        (["--store", "nonsense"], "no address"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr("segcal.service.api.log.log_to", lambda: None)
    result = CliRunner().invoke(app, ["serve", "--data", str(tmp_path / "data"), "--port", "0", *arguments])
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_port_in_use_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segcal.service.api.log.log_to", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--data", str(tmp_path / "data"), "--port", port])
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in result.output
    assert not (tmp_path / "data" / "segcal.db").exists()


@pytest.mark.parametrize("has_token", [False, True])
def test_a_server_that_nobody_has_a_token_for_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_token: bool
) -> None:
    settings = ServiceSettings(data=tmp_path, port=0, require_tokens=True)
    if has_token:
        store = open_store(settings.url)
        store.tokens.create("anna", "read")
        store.close()
    monkeypatch.setattr("segcal.service.api.service.run_app", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("segcal.service"), "propagate", True)
    run_service(settings, 0, None, lambda _address: None)
    assert ("segcal token create" in caplog.text) is not has_token


@pytest.mark.parametrize(("mode", "warned"), [(None, False), (0o700, False), (0o750, False), (0o755, True)])
def test_a_data_folder_that_everybody_may_look_into_is_told_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: int | None,
    warned: bool,
) -> None:
    data = tmp_path / "data"
    if mode is not None:
        data.mkdir()
        data.chmod(mode)
    monkeypatch.setattr("segcal.service.api.service.run_app", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("segcal.service"), "propagate", True)
    run_service(ServiceSettings(data=data, port=0), 0, None, lambda _address: None)
    assert ("every user of this machine may look into" in caplog.text) is warned


def test_json_tells_the_address_in_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segcal.service.api.log.log_to", lambda: None)
    monkeypatch.setattr("segcal.service.api.service.run_app", lambda _app, _listening, started: started())
    options = ["--data", str(tmp_path), "--port", "0", "--workers", "0", "--json"]
    values = json.loads(CliRunner().invoke(app, ["serve", *options]).stdout)
    assert values["address"].startswith("http://127.0.0.1:")
    assert values["tokens_required"] is False


@pytest.mark.parametrize(
    ("text", "size"), [("2G", 2 << 30), ("512m", 512 << 20), ("10", 10), ("1KiB", 1024), (" 3tb ", 3 << 40)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert size_of(text, "--upload-limit") == size


class TestTokens:
    def run(self, api: Api, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["token", *arguments, "--data", str(api.settings.data)])

    def create(self, api: Api, *arguments: str) -> str:
        result = self.run(api, "create", *arguments)
        assert result.exit_code == 0, result.output
        return str(result.stdout.split()[0])

    def test_a_created_token_works_until_it_is_revoked(self, guarded: Api) -> None:
        text = self.create(guarded, "anna", "--scope", "submit")
        headers = {"Authorization": f"Bearer {text}"}
        assert guarded.client.get("/v1/jobs", headers=headers).status_code == 200
        assert guarded.client.post(f"/v1/calibrators/{'a' * 64}/retire", headers=headers).status_code == 403
        token_id = text.split("_")[1]
        assert self.run(guarded, "revoke", token_id).exit_code == 0
        assert guarded.client.get("/v1/jobs", headers=headers).status_code == 401

    def test_a_token_is_printed_once_and_kept_as_a_hash(self, guarded: Api) -> None:
        text = self.create(guarded, "anna")
        listed = self.run(guarded, "list", "--json").stdout
        record = json.loads(listed)["tokens"][0]
        assert (record["name"], record["scope"], record["revoked"]) == ("anna", "read", None)
        secret = text.split("_")[2]
        assert secret not in listed
        assert "anna" in self.run(guarded, "list").stdout
        for path in guarded.settings.data.iterdir():
            assert not path.is_file() or secret.encode() not in path.read_bytes()

    def test_a_token_for_some_days_expires(self, guarded: Api) -> None:
        text = self.create(guarded, "anna", "--days", "0")
        assert guarded.client.get("/v1/jobs", headers={"Authorization": f"Bearer {text}"}).status_code == 401
        assert "expired" in self.run(guarded, "list").stdout

    def test_json_holds_the_token_and_when_it_ends(self, guarded: Api) -> None:
        made = json.loads(self.run(guarded, "create", "anna", "--days", "2", "--json").stdout)
        assert made["token"].startswith(f"segcal_{made['id']}_")
        assert made["expires"] - made["created"] == pytest.approx(2 * 86400, abs=60)

    @pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 201])
    def test_a_name_that_would_spoil_the_log_is_refused(self, guarded: Api, name: str) -> None:
        assert self.run(guarded, "create", name).exit_code == 2
        assert guarded.store.tokens.list() == []

    @pytest.mark.parametrize("days", ["inf", "nan", "1e9", "36501", "-1"])
    def test_a_token_lasts_no_longer_than_a_date_can_say(self, guarded: Api, days: str) -> None:
        assert self.run(guarded, "create", "anna", "--days", days).exit_code == 2
        assert guarded.store.tokens.list() == []
        self.create(guarded, "anna", "--days", "36500")
        assert self.run(guarded, "list").exit_code == 0

    @pytest.mark.parametrize("arguments", [["list"], ["revoke", "000000000000"]])
    def test_looking_into_a_folder_that_is_none_of_a_service_makes_nothing(
        self, tmp_path: Path, arguments: list[str]
    ) -> None:
        for data in (tmp_path, tmp_path / "mistyped"):
            result = CliRunner().invoke(app, ["token", *arguments, "--data", str(data)])
            assert (result.exit_code, "no service keeps its store there" in result.output) == (2, True)
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_token_cannot_be_revoked(self, guarded: Api) -> None:
        result = self.run(guarded, "revoke", "000000000000")
        assert result.exit_code == 1
        assert "segcal token list" in result.output


def test_a_server_loads_no_torch_until_it_is_needed() -> None:
    script = (
        "import sys, segcal.service.api.service\nprint([name for name in ('torch', 'optuna') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
