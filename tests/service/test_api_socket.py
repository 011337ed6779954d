"""What only a real connection shows: trickling uploads, clients that leave, raw paths."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from segcal.service.requests import FitRequest
from tests.service.api_data import LIMITS, Api, add_calibrator, case_with_layers, finished_job, npz_bytes, running_api
from tests.service.running import serving

HURRIED = replace(LIMITS, upload_seconds=2.0, idle_seconds=0.7, body_bytes=1 << 16, event_streams=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, str]]:
    """An app with little patience behind a socket."""
    folder = tmp_path_factory.mktemp("socket")
    with running_api(folder, limits=HURRIED) as api, serving(api.app) as url:
        yield api, url


@contextmanager
def connection(url: str) -> Iterator[socket.socket]:
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as opened:
        yield opened


def request_head(method: str, target: str, **headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answer_of(opened: socket.socket) -> tuple[int, bytes]:
    """Status and the rest of an answer, up to the end of the connection or a second of silence."""
    received = b""
    opened.settimeout(5)
    while True:
        try:
            piece = opened.recv(65536)
        except (TimeoutError, ConnectionResetError):
            break
        if not piece:
            break
        received += piece
    return int(received.split(b" ", 2)[1]), received


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.02)
    return False


def upload_head(api: Api, length: int) -> bytes:
    known = api.store.calibrators.list()
    sha256 = known[0].sha256 if known else add_calibrator(api).sha256
    target = f"/v1/cases?case=c1&calibrator={sha256}"
    return request_head("POST", target, Content_Type="application/octet-stream", Content_Length=str(length))


def nothing_is_left(api: Api) -> bool:
    return api.uploads == [] and api.context.uploads.taken == 0 and api.store.jobs.page(kind="case") == []


def test_an_upload_that_trickles_is_given_up_after_its_time(served: tuple[Api, str]) -> None:
    api, url = served
    content = npz_bytes()
    began = time.monotonic()
    with connection(url) as opened:
        opened.sendall(upload_head(api, len(content)))
        for byte in content:  # each one well before the idle limit
            try:
                opened.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
            if time.monotonic() - began > 10:
                break
            opened.settimeout(0.001)
            try:
                if opened.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                pass
            opened.settimeout(20)
        status, received = answer_of(opened)
    assert status == 408
    assert b"urn:segcal:problem:too-slow" in received
    assert HURRIED.upload_seconds <= time.monotonic() - began < 15
    assert eventually(lambda: nothing_is_left(api))


def test_an_upload_that_stops_coming_is_given_up_sooner(served: tuple[Api, str]) -> None:
    api, url = served
    began = time.monotonic()
    with connection(url) as opened:
        opened.sendall(upload_head(api, 10_000) + b"PK")
        assert eventually(lambda: len(api.uploads) == 1)
        status, _ = answer_of(opened)
    assert status == 408
    assert time.monotonic() - began < 10
    assert eventually(lambda: nothing_is_left(api))


def test_an_upload_whose_client_leaves_is_deleted_at_once(served: tuple[Api, str]) -> None:
    api, url = served
    with connection(url) as opened:
        opened.sendall(upload_head(api, 10_000) + b"PK")
        assert eventually(lambda: len(api.uploads) == 1)
    assert eventually(lambda: nothing_is_left(api))


def test_a_request_that_is_no_upload_has_less_time_and_room(served: tuple[Api, str]) -> None:
    _, url = served
    with connection(url) as opened:
        opened.sendall(request_head("POST", "/v1/jobs", Content_Type="application/json", Content_Length="100") + b"{")
        assert answer_of(opened)[0] == 408
    with connection(url) as opened:
        opened.sendall(request_head("POST", "/v1/jobs", Content_Type="application/json", Content_Length="70000"))
        assert answer_of(opened)[0] == 413


def test_a_chunked_body_without_end_is_cut_at_the_limit(served: tuple[Api, str]) -> None:
    _, url = served
    with connection(url) as opened:
        opened.sendall(request_head("POST", "/v1/jobs", Content_Type="application/json", Transfer_Encoding="chunked"))
        try:
            for _ in range(100):
                opened.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
        except OSError:
            pass  # closed by the server: what it said is still there to be read, or the reset says it too
        try:
            status = answer_of(opened)[0]
        except IndexError:
            status = 413
    assert status == 413


def test_a_body_of_an_unclear_length_is_refused_in_the_same_form(served: tuple[Api, str]) -> None:
    _, url = served
    lengths = (b"Content-Length: 4\r\nContent-Length: 5\r\n", b"Content-Length: 4, 5\r\n", b"Content-Length: C\r\n")
    for headers in lengths:
        with connection(url) as opened:
            opened.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n" + headers + b"\r\nabcde")
            status, received = answer_of(opened)
        assert status == 400
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"application/problem+json" in head
        assert b"content-security-policy" in head.lower()
        assert json.loads(body)["type"] == "urn:segcal:problem:bad-request"


def test_an_event_stream_ends_when_its_client_leaves(served: tuple[Api, str]) -> None:
    api, url = served
    job = api.store.jobs.submit(FitRequest(manifest="/m.yaml"), batch="", submitted_by="", queue_limit=9)
    head = request_head("GET", f"/v1/jobs/{job.id}/events")
    with connection(url) as first, connection(url) as second, connection(url) as third:
        for opened in (first, second):
            opened.sendall(head)
            assert b"200 OK" in opened.recv(65536)
        assert eventually(lambda: api.context.streams.taken == 2)
        third.sendall(head)
        assert b"429" in third.recv(65536)
    assert eventually(lambda: api.context.streams.taken == 0)
    api.store.jobs.cancel(job.id)


def test_an_event_stream_tells_of_a_change_while_it_is_open(served: tuple[Api, str]) -> None:
    api, url = served
    job = api.store.jobs.submit(FitRequest(manifest="/m.yaml"), batch="", submitted_by="", queue_limit=9)
    with connection(url) as opened:
        opened.sendall(request_head("GET", f"/v1/jobs/{job.id}/events", Connection="close"))
        assert eventually(lambda: api.context.streams.taken == 1)
        api.store.jobs.cancel(job.id)
        status, received = answer_of(opened)
    assert status == 200
    events = [line for line in received.decode().splitlines() if line.startswith(("event:", "data:"))]
    assert [line for line in events if line.startswith("event:")] == ["event: job", "event: job", "event: end"]
    assert json.loads(events[-1].removeprefix("data: "))["state"] == "cancelled"


@pytest.mark.parametrize(
    "rest",
    ["/../../../segcal.db", "/..%2f..%2f..%2fsegcal.db", "/%2e%2e/%2e%2e/segcal.db", "//etc/passwd", "/in/case.npz"],
)
def test_a_raw_path_leads_nowhere(served: tuple[Api, str], rest: str) -> None:
    api, url = served
    job = finished_job(api)
    with connection(url) as opened:
        opened.sendall(request_head("GET", f"/v1/jobs/{job.id}/results{rest}", Connection="close"))
        status, received = answer_of(opened)
    assert status in (404, 422)
    assert b"SQLite format" not in received
    assert b"root:" not in received
    assert b"what was sent" not in received


@pytest.mark.parametrize("said", [b"", b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_a_connection_on_which_no_request_comes_is_closed(
    served: tuple[Api, str], monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    _, url = served
    monkeypatch.setattr("segcal.service.api.connections.ImpatientProtocol.head_seconds", 0.3)
    began = time.monotonic()
    with connection(url) as opened:
        opened.sendall(said)
        while time.monotonic() - began < 10:
            try:
                opened.sendall(said[:1])  # trickles, where it began to speak
                opened.settimeout(0.05)
                if opened.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() - began < 5


def test_a_connection_over_which_requests_come_stays_open(
    served: tuple[Api, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = served
    monkeypatch.setattr("segcal.service.api.connections.ImpatientProtocol.head_seconds", 0.3)
    with connection(url) as opened:
        for _ in range(8):
            opened.sendall(request_head("GET", "/v1/health"))
            received = b""
            while b"alive" not in received:
                piece = opened.recv(65536)
                assert piece, "it was closed"
                received += piece
            time.sleep(0.1)


def test_headers_without_end_are_refused(served: tuple[Api, str]) -> None:
    _, url = served
    with connection(url) as opened:
        opened.sendall(b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 100_000)
        assert answer_of(opened)[0] in (400, 431)


def test_a_client_that_stops_reading_a_download_holds_up_nobody_else(served: tuple[Api, str], tmp_path: Path) -> None:
    api, url = served
    job = finished_job(api)
    (api.context.files.job(job.id) / "out" / "large.npz").write_bytes(bytes(32 << 20))
    with connection(url) as stalled, connection(url) as other:
        stalled.sendall(request_head("GET", f"/v1/jobs/{job.id}/results/out/large.npz"))
        stalled.recv(1000)
        other.sendall(request_head("GET", "/v1/jobs/counts", Connection="close"))
        assert answer_of(other)[0] == 200


@pytest.mark.parametrize("wanted", [None, "bytes=2-9", "bytes=0-3, 8-9", "bytes=999999-"])
def test_a_head_of_a_download_has_the_headers_of_its_get_and_no_body(
    served: tuple[Api, str], wanted: str | None
) -> None:
    api, url = served
    key = case_with_layers(api)
    job_id = api.store.cases.get(key).job_id
    addresses = [
        f"/v1/jobs/{job_id}/results/report.html",
        f"/v1/jobs/{job_id}/results/none.csv",
        f"/v1/cases/{key}/layers/image.nii.gz",
        f"/v1/calibrators/{add_calibrator(api).sha256}/file",
    ]
    headers = {} if wanted is None else {"Range": wanted}
    with httpx.Client(base_url=url) as client:
        for address in addresses:
            head, get = (client.request(method, address, headers=headers) for method in ("HEAD", "GET"))
            assert head.status_code == get.status_code, address
            assert head.content == b""
            told = [_stable(each) for each in (head, get)]
            assert told[0] == told[1]


def _stable(answer: httpx.Response) -> dict[str, str]:
    """Headers without what differs from one answer to the next."""
    kept = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    return {name: re.sub("boundary=.*", "", value) for name, value in kept.items()}
