"""Jobs over HTTP: submitted once, listed in pages, followed, cancelled, refused with a reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segcal.service.model import JobProgress
from tests.service.api_data import CLASSES, LIMITS, Api, add_calibrator, finished_job, running_api, waiting_upload

UNKNOWN = "0" * 24


def write_manifest(folder: Path, *members: str, **values: str) -> str:
    """A manifest of one case; gives its path."""
    path = folder / "manifest.yaml"
    case = {"id": "c1", "members": list(members), **values}
    content = {"version": 1, "name": "night", "kind": "logits", "classes": list(CLASSES), "cases": [case]}
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def body(api: Api) -> dict[str, Any]:
    """A request that is accepted."""
    manifest = write_manifest(api.settings.roots[0], "c1.npz")
    return {"kind": "qa", "calibrator": add_calibrator(api).sha256, "manifest": manifest}


def test_a_submitted_job_waits_under_the_address_it_was_given(api: Api, body: dict[str, Any]) -> None:
    answer = api.client.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["state"], job["kind"], job["batch"]) == ("queued", "qa", "night")
    assert job["request"]["manifest"] == body["manifest"]
    assert job["created"].endswith("Z")
    assert api.client.get(answer.headers["location"]).json() == job


def test_the_name_of_a_folder_becomes_its_batch_and_a_given_batch_wins(api: Api) -> None:
    folder = api.settings.roots[0] / "tuesday"
    folder.mkdir()
    wanted = {"kind": "apply", "calibrator": add_calibrator(api).sha256, "folder": str(folder)}
    assert api.client.post("/v1/jobs", json=wanted).json()["batch"] == "tuesday"
    assert api.client.post("/v1/jobs", json={**wanted, "batch": "ward 3"}).json()["batch"] == "ward 3"


def test_the_same_idempotency_key_gives_the_same_job_and_another_request_with_it_is_refused(
    api: Api, body: dict[str, Any]
) -> None:
    headers = {"Idempotency-Key": "tuesday-1"}
    first = api.client.post("/v1/jobs", json=body, headers=headers).json()
    assert api.client.post("/v1/jobs", json=body, headers=headers).json()["id"] == first["id"]
    assert api.client.post("/v1/jobs", json=body).json()["id"] != first["id"]
    other = api.client.post("/v1/jobs", json={**body, "batch": "other"}, headers=headers)
    assert (other.status_code, other.json()["type"]) == (409, "urn:segcal:problem:key-used")


@pytest.mark.parametrize("change", ["no room", "full disk", "no manifest", "retired calibrator"])
def test_a_submission_sent_again_is_its_job_whatever_would_refuse_a_new_one(
    api: Api, body: dict[str, Any], change: str
) -> None:
    headers = {"Idempotency-Key": "tuesday-1"}
    first = api.client.post("/v1/jobs", json=body, headers=headers).json()
    limits = api.settings.limits
    if change == "no room":
        limits = replace(limits, queued_jobs=1)
    elif change == "full disk":
        limits = replace(limits, free_disk_bytes=1 << 60)
    elif change == "no manifest":
        Path(body["manifest"]).unlink()
    else:
        api.store.calibrators.retire(body["calibrator"])

    with running_api(api.settings.data, limits=limits, roots=api.settings.roots) as later:
        assert later.client.post("/v1/jobs", json=body).status_code in (422, 429, 503)
        again = later.client.post("/v1/jobs", json=body, headers=headers)
        other = later.client.post("/v1/jobs", json={**body, "batch": "other"}, headers=headers)

    assert (again.status_code, again.json()) == (202, first)
    assert again.headers["location"] == f"/v1/jobs/{first['id']}"
    assert (other.status_code, other.json()["type"]) == (409, "urn:segcal:problem:key-used")


def test_a_key_belongs_to_a_token_and_not_to_its_name(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    body = {"kind": "fit", "manifest": write_manifest(root, "c1.npz")}
    with running_api(tmp_path / "data", roots=(root,), require_tokens=True) as api:

        def submitted(token: dict[str, str]) -> str:
            answer = api.client.post("/v1/jobs", json=body, headers={**token, "Idempotency-Key": "k"})
            return str(answer.json()["id"])

        first = api.token("submit", name="anna")
        job = submitted(first)
        assert submitted(first) == job
        api.store.tokens.revoke(api.store.tokens.list()[0].id)
        assert submitted(api.token("submit", name="anna")) != job


@pytest.mark.parametrize("key", ["", "with space", "x" * 201, "ü"])
def test_an_idempotency_key_that_is_none_is_refused(api: Api, body: dict[str, Any], key: str) -> None:
    headers = {"Idempotency-Key": key.encode()}
    assert api.client.post("/v1/jobs", json=body, headers=headers).status_code == 422


def test_pages_of_jobs_hold_every_job_once_while_new_ones_arrive(api: Api, body: dict[str, Any]) -> None:
    ids = [api.client.post("/v1/jobs", json=body).json()["id"] for _ in range(7)]
    seen: list[str] = []
    following: str | None = ""
    while following is not None:
        page = api.client.get("/v1/jobs", params={"limit": 3, **({"before": following} if following else {})}).json()
        seen += [job["id"] for job in page["jobs"]]
        following = page["next"]
        api.client.post("/v1/jobs", json=body)
    assert seen == sorted(ids, reverse=True)


def test_jobs_are_filtered_by_state_kind_and_batch(api: Api, body: dict[str, Any]) -> None:
    first = api.client.post("/v1/jobs", json=body).json()["id"]
    second = api.client.post("/v1/jobs", json={**body, "batch": "other"}).json()["id"]
    api.client.post(f"/v1/jobs/{first}/cancel")

    def ids(**filters: str) -> list[str]:
        return [job["id"] for job in api.client.get("/v1/jobs", params=filters).json()["jobs"]]

    assert ids(state="cancelled") == [first]
    assert ids(state="queued") == ids(batch="other") == [second]
    assert ids(kind="qa") == [second, first]
    assert ids(kind="fit") == []
    counts = api.client.get("/v1/jobs/counts").json()
    assert counts == {"queued": 1, "running": 0, "done": 0, "failed": 0, "cancelled": 1}


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "limit=x", "before=zz", "state=lost", "kind=case%00", "batch=a%00b"]
)
def test_filters_out_of_range_are_refused_by_name(api: Api, query: str) -> None:
    answer = api.client.get(f"/v1/jobs?{query}")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"][0]["where"] == f"query.{query.partition('=')[0]}"


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_is_asked_to_stop(api: Api, body: dict[str, Any]) -> None:
    first, second = (api.client.post("/v1/jobs", json=body).json()["id"] for _ in range(2))
    claim = api.store.jobs.claim("worker", 60.0)
    assert claim is not None
    assert claim.job.id == first
    running = api.client.post(f"/v1/jobs/{first}/cancel").json()
    assert (running["state"], running["cancel_requested"]) == ("running", True)
    assert api.client.post(f"/v1/jobs/{second}/cancel").json()["state"] == "cancelled"
    assert api.client.post(f"/v1/jobs/{second}/cancel").json()["state"] == "cancelled"


def test_a_failed_job_is_tried_again_as_the_same_job_and_no_other_is(api: Api, body: dict[str, Any]) -> None:
    job_id = api.client.post("/v1/jobs", json=body).json()["id"]
    address = f"/v1/jobs/{job_id}/retry"
    answer = api.client.post(address)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:segcal:problem:not-yet")
    for attempt in range(2):
        claim = api.store.jobs.claim("worker", 60.0)
        assert claim is not None
        api.store.jobs.fail(claim, f"poison {attempt}")
        answer = api.client.post(address)
        assert answer.status_code == 202, answer.text
        assert (answer.json()["id"], answer.json()["state"], answer.json()["attempts"]) == (job_id, "queued", 0)
    api.client.post(f"/v1/jobs/{job_id}/cancel")
    assert api.client.post(address).status_code == 202
    assert [job["id"] for job in api.client.get("/v1/jobs").json()["jobs"]] == [job_id]
    assert api.client.post(f"/v1/jobs/{UNKNOWN}/retry").status_code == 404


def test_trying_again_needs_room_a_free_disk_a_calibrator_and_the_scope_to_submit(tmp_path: Path) -> None:
    with running_api(tmp_path / "data", limits=replace(LIMITS, queued_jobs=1), require_tokens=True) as api:
        request = waiting_upload(api)
        failed = api.store.jobs.submit(request, batch="", submitted_by="anna", queue_limit=9)
        api.store.jobs.cancel(failed.id)
        api.store.jobs.submit(request, batch="", submitted_by="anna", queue_limit=9)
        address, submitter = f"/v1/jobs/{failed.id}/retry", api.token("submit")

        assert api.client.post(address, headers=api.token("read")).status_code == 403
        assert api.client.post(address, headers=submitter).json()["type"] == "urn:segcal:problem:queue-full"
        assert api.store.jobs.claim("worker", 60.0) is not None
        api.store.calibrators.retire(request.calibrator)
        refused = api.client.post(address, headers=submitter)
        assert (refused.status_code, "retired" in refused.json()["detail"]) == (422, True)
    with running_api(tmp_path / "data", limits=replace(LIMITS, free_disk_bytes=1 << 60)) as api:
        assert api.client.post(address).json()["type"] == "urn:segcal:problem:intake-paused"
        assert api.store.jobs.get(failed.id).state == "cancelled"


@pytest.mark.parametrize("address", ["", "/results", "/results/out/map.npz", "/events"])
def test_an_unknown_job_is_not_found(api: Api, address: str) -> None:
    answer = api.client.get(f"/v1/jobs/{UNKNOWN}{address}")
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:segcal:problem:not-found")


def test_a_full_queue_answers_429_and_says_when_to_come_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with running_api(tmp_path / "data", limits=replace(LIMITS, queued_jobs=1), roots=(root,)) as api:
        wanted = {"kind": "fit", "manifest": write_manifest(root, "c1.npz")}
        assert api.client.post("/v1/jobs", json=wanted).status_code == 202
        answer = api.client.post("/v1/jobs", json=wanted)
    assert (answer.status_code, answer.json()["type"]) == (429, "urn:segcal:problem:queue-full")
    assert int(answer.headers["retry-after"]) > 0


def test_a_nearly_full_disk_pauses_intake_and_reading_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with running_api(tmp_path / "data", limits=replace(LIMITS, free_disk_bytes=1 << 60), roots=(root,)) as api:
        answer = api.client.post("/v1/jobs", json={"kind": "fit", "manifest": write_manifest(root, "c1.npz")})
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:segcal:problem:intake-paused")
        assert int(answer.headers["retry-after"]) > 0
        assert "--min-free-disk" in answer.json()["detail"]
        ready = api.client.get("/v1/ready")
        assert ready.status_code == 503
        assert any("disk" in reason for reason in ready.json()["reasons"])
        assert api.client.get("/v1/jobs").json()["jobs"] == []


def test_a_retired_or_unknown_calibrator_is_refused_at_once(api: Api, body: dict[str, Any]) -> None:
    assert api.client.post("/v1/jobs", json={**body, "calibrator": "b" * 64}).status_code == 404
    api.store.calibrators.retire(body["calibrator"])
    answer = api.client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert "retired" in answer.json()["detail"]


class TestPaths:
    """What a job names has to lie below the roots, wherever links and dots lead."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        return folder

    def refused(self, api: Api, **wanted: object) -> None:
        answer = api.client.post("/v1/jobs", json={"kind": "fit", **wanted})
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:segcal:problem:forbidden"), answer.text
        assert api.store.jobs.page() == []

    @pytest.mark.parametrize("path", ["{root}/../outside/manifest.yaml", "/etc/passwd", "{outside}/manifest.yaml"])
    def test_a_manifest_elsewhere_is_refused_whether_it_exists_or_not(self, api: Api, outside: Path, path: str) -> None:
        wanted = path.format(root=api.settings.roots[0], outside=outside)
        self.refused(api, manifest=wanted)
        write_manifest(outside, "c1.npz")
        self.refused(api, manifest=wanted)

    def test_a_link_out_of_a_root_is_refused(self, api: Api, outside: Path) -> None:
        write_manifest(outside, "c1.npz")
        link = api.settings.roots[0] / "link"
        link.symlink_to(outside)
        self.refused(api, manifest=str(link / "manifest.yaml"))
        self.refused(api, kind="apply", calibrator=add_calibrator(api).sha256, folder=str(link))

    @pytest.mark.parametrize("key", ["members", "label", "image", "deployed"])
    def test_a_manifest_that_names_a_file_elsewhere_is_refused(self, api: Api, outside: Path, key: str) -> None:
        root = api.settings.roots[0]
        leaked = "../outside/secret.nii.gz"
        path = write_manifest(root, leaked) if key == "members" else write_manifest(root, "c1.npz", **{key: leaked})
        self.refused(api, manifest=path)

    def test_a_member_that_is_a_link_to_elsewhere_is_refused(self, api: Api, outside: Path) -> None:
        root = api.settings.roots[0]
        (root / "c1.npz").symlink_to(outside / "secret.npz")
        self.refused(api, manifest=write_manifest(root, "c1.npz"))

    def test_a_sibling_whose_name_begins_like_a_root_is_refused(self, api: Api) -> None:
        sibling = Path(f"{api.settings.roots[0]}-private")
        sibling.mkdir()
        self.refused(api, manifest=write_manifest(sibling, "c1.npz"))

    def test_no_root_means_no_path(self, tmp_path: Path) -> None:
        with running_api(tmp_path / "data") as api:
            self.refused(api, manifest=write_manifest(tmp_path, "c1.npz"))

    def test_a_pipe_does_not_keep_the_service_waiting(self, api: Api) -> None:
        pipe = api.settings.roots[0] / "manifest.yaml"
        os.mkfifo(pipe)
        answer = api.client.post("/v1/jobs", json={"kind": "fit", "manifest": str(pipe)})
        assert answer.status_code == 422

    def test_a_missing_manifest_below_a_root_is_named(self, api: Api) -> None:
        path = api.settings.roots[0] / "none.yaml"
        answer = api.client.post("/v1/jobs", json={"kind": "fit", "manifest": str(path)})
        assert answer.status_code == 422
        assert "none.yaml" in answer.json()["detail"]

    @pytest.mark.parametrize("path", ["manifest.yaml", "", "/a\0b", "~/x", 7, None])
    def test_what_is_no_absolute_path_is_refused(self, api: Api, path: object) -> None:
        assert api.client.post("/v1/jobs", json={"kind": "fit", "manifest": path}).status_code == 422


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"kind": "case", "calibrator": "' + b"a" * 64 + b'", "case": "c1", "source": "/etc"}',
        b'{"kind": "fit"}',
        b'{"kind": "fit", "manifest": "/m.yaml", "trials": 1e400}',
        b'{"kind": "fit", "manifest": "/m.yaml", "batch": "\\ud800"}',
        b'{"kind": "fit", "manifest": "/m.yaml", "extra": 1}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_body_that_is_no_request_is_refused_without_repeating_it(api: Api, content: bytes) -> None:
    answer = api.client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(answer.content) < 5000


def test_the_kind_that_only_the_service_makes_cannot_be_submitted(api: Api) -> None:
    wanted = {"kind": "case", "calibrator": add_calibrator(api).sha256, "case": "c1", "source": "/etc"}
    assert api.client.post("/v1/jobs", json=wanted).status_code == 422
    assert api.store.jobs.page() == []


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of server-sent events."""
    blocks = [block.splitlines() for block in text.strip().split("\n\n") if not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_events_of_a_finished_job_are_its_state_and_the_end(api: Api) -> None:
    job = finished_job(api)
    answer = api.client.get(f"/v1/jobs/{job.id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [(name, data["state"]) for name, data in events_of(answer.text)] == [("job", "done"), ("end", "done")]
    assert api.context.streams.taken == 0


def test_events_follow_a_job_to_its_end(api: Api, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.client.post("/v1/jobs", json=body).json()["id"]
    claim = api.store.jobs.claim("worker", 60.0)
    assert claim is not None
    steps = iter(
        [
            lambda: api.store.jobs.renew(claim, 60.0, JobProgress("apply", 1, 2)),
            lambda: None,
            lambda: api.store.jobs.renew(claim, 60.0, JobProgress("apply", 2, 2)),
            lambda: api.store.jobs.fail(claim, "poison"),
        ]
    )

    async def step(_seconds: float) -> None:
        next(steps)()

    monkeypatch.setattr("segcal.service.api.events.sleep", step)
    found = events_of(api.client.get(f"/v1/jobs/{job_id}/events").text)
    assert [(name, data["state"], data["progress"]["done"]) for name, data in found] == [
        ("job", "running", 0),
        ("job", "running", 1),
        ("job", "running", 2),
        ("job", "failed", 2),
        ("end", "failed", 2),
    ]


def test_events_end_when_the_server_is_to_end(api: Api, body: dict[str, Any]) -> None:
    job_id = api.client.post("/v1/jobs", json=body).json()["id"]
    api.context.stopping.set()
    found = events_of(api.client.get(f"/v1/jobs/{job_id}/events").text)
    assert [name for name, _ in found] == ["job"]


def test_no_more_event_streams_than_allowed_are_open_at_once(api: Api) -> None:
    job = finished_job(api)
    api.context.streams.taken = api.settings.limits.event_streams
    answer = api.client.get(f"/v1/jobs/{job.id}/events")
    assert (answer.status_code, answer.json()["type"]) == (429, "urn:segcal:problem:busy")
    assert int(answer.headers["retry-after"]) > 0
    assert api.context.streams.taken == api.settings.limits.event_streams
