"""Cases over HTTP: listed, filtered, sorted, looked at; batches, trend, status and metrics."""

from __future__ import annotations

import gzip
import io
import json
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segcal.service.errors import StoreError
from segcal.service.model import NewCase
from tests.service.api_data import Api, case_with_layers, finished_job, looked_at


@pytest.fixture
def three(api: Api) -> Api:
    """A batch of three cases: good, flagged, failed."""
    flag = (("low_dsc", "expected Dice is low"),)
    cases = (
        looked_at("good", expected_dsc=0.95, boundary_confidence=0.9),
        looked_at("doubtful", expected_dsc=0.4, n_flags=1, flags=flag, calibrator="b" * 64),
        NewCase("broken", "failed", error="broken.npz is truncated"),
    )
    finished_job(api, cases)
    return api


def names(api: Api, **params: Any) -> list[str]:
    return [case["case"] for case in api.client.get("/v1/cases", params=params).json()["cases"]]


def test_the_worst_cases_come_first(three: Api) -> None:
    assert names(three) == ["broken", "doubtful", "good"]
    assert names(three, descending=True) == ["good", "doubtful", "broken"]


def test_cases_are_filtered_sorted_and_paged(three: Api) -> None:
    day = three.client.get("/v1/cases").json()["cases"][0]["day"]
    assert names(three, flagged=True) == ["doubtful"]
    assert names(three, status="failed") == ["broken"]
    assert names(three, calibrator="b" * 64) == ["doubtful"]
    assert names(three, search="OO") == ["good"]
    assert names(three, search="%") == []
    assert names(three, batch="night", day=day, sort="case") == ["broken", "doubtful", "good"]
    assert names(three, batch="other") == names(three, day="1999-01-01") == []
    assert names(three, sort="expected_dsc", limit=1, offset=1) == ["good"]
    assert three.client.get("/v1/cases", params={"limit": 1}).json()["total"] == 3


@pytest.mark.parametrize(
    "query",
    ["limit=0", "offset=-1", "offset=99999999999999999999", "sort=name", "day=today", "calibrator=x", "search=%00"],
)
def test_filters_out_of_range_are_refused(api: Api, query: str) -> None:
    assert api.client.get(f"/v1/cases?{query}").status_code == 422


def test_a_case_tells_its_flags_numbers_and_files(three: Api) -> None:
    key = three.client.get("/v1/cases", params={"search": "doubtful"}).json()["cases"][0]["key"]
    found = three.client.get(f"/v1/cases/{key}").json()
    assert found["flags"] == [{"code": "low_dsc", "text": "expected Dice is low"}]
    assert (found["expected_dsc"], found["layers"], found["files"]) == (0.4, False, ["out/map.npz"])
    failed = three.client.get("/v1/cases", params={"search": "broken"}).json()["cases"][0]
    assert failed["error"] == "broken.npz is truncated"


@pytest.mark.parametrize(("key", "status"), [("999", 404), ("0", 422), ("x", 422), ("9" * 30, 422), ("-1", 422)])
def test_an_unknown_case_is_not_found_and_what_is_no_number_is_refused(api: Api, key: str, status: int) -> None:
    for rest in ("", "/layers/image.nii.gz", "/slices/image/z/0.png"):
        assert api.client.get(f"/v1/cases/{key}{rest}").status_code == status


def test_numbers_that_json_cannot_say_are_null(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_job(api, (looked_at("odd"),))
    record = api.store.cases.page()[0]
    odd = NewCase("odd", "ok", expected_dsc=nan, numbers={"a": [inf, 1.0], "b": {"c": -inf}})
    changed = type(record)(record.key, record.job_id, record.batch, record.day, record.created, odd)
    monkeypatch.setattr(api.store.cases, "get", lambda _key: changed)
    answer = api.client.get(f"/v1/cases/{record.key}")
    found = json.loads(answer.content, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert found["expected_dsc"] is None
    assert found["numbers"] == {"a": [None, 1.0], "b": {"c": None}}


class TestLayers:
    def test_a_layer_is_the_file_that_the_job_wrote_also_in_ranges(self, api: Api) -> None:
        key = case_with_layers(api)
        answer = api.client.get(f"/v1/cases/{key}/layers/segmentation.nii.gz")
        assert answer.headers["content-type"] == "application/gzip"
        assert gzip.decompress(answer.content)[344:347] == b"n+1"
        part = api.client.get(f"/v1/cases/{key}/layers/segmentation.nii.gz", headers={"Range": "bytes=0-1"})
        assert (part.status_code, part.content) == (206, b"\x1f\x8b")

    def test_a_slice_is_a_picture_that_changes_with_layer_slice_and_window(self, api: Api) -> None:
        key = case_with_layers(api)
        addresses = ("image/z/0.png", "image/z/1.png", "p1/z/0.png", "image/y/0.png", "image/z/0.png?low=0&high=10")
        pictures = []
        for address in addresses:
            answer = api.client.get(f"/v1/cases/{key}/slices/{address}")
            assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png"), answer.text
            pictures.append(np.asarray(Image.open(io.BytesIO(answer.content))).tobytes())
        assert len(set(pictures)) == len(addresses)

    @pytest.mark.parametrize(
        ("rest", "status"),
        [
            ("layers/none.nii.gz", 404),
            ("layers/..%2fview.nii.gz", 404),
            ("layers/view.json", 404),
            ("slices/none/z/0.png", 404),
            ("slices/image/z/99.png", 404),
            ("slices/image/w/0.png", 422),
            ("slices/image/z/-1.png", 422),
            ("slices/image/z/0.png?low=5&high=1", 422),
            ("slices/image/z/0.png?low=nan", 422),
            ("slices/image/z/0.png?threshold=2", 422),
            ("slices/image/z/0.png?size=100000", 422),
        ],
    )
    def test_what_is_not_there_is_not_found_and_what_does_not_fit_is_refused(
        self, api: Api, rest: str, status: int
    ) -> None:
        assert api.client.get(f"/v1/cases/{case_with_layers(api)}/{rest}").status_code == status

    @pytest.mark.parametrize("file", ["../../in/case.npz", "../../../../segcal.db", "/etc/passwd", "link.nii.gz"])
    def test_a_description_that_leads_elsewhere_is_not_followed(self, api: Api, file: str) -> None:
        key = case_with_layers(api)
        folder = api.context.files.job(api.store.cases.get(key).job_id) / "view" / "0"
        (folder / "link.nii.gz").symlink_to("/etc/passwd")
        described = json.loads((folder / "view.json").read_text())
        described["layers"][0]["file"] = file
        (folder / "view.json").write_text(json.dumps(described))
        answer = api.client.get(f"/v1/cases/{key}/layers/{described['layers'][0]['name']}.nii.gz")
        assert answer.status_code == 404

    @pytest.mark.parametrize("view", ["../other", "/etc", "in"])
    def test_a_record_that_leads_elsewhere_is_not_followed(self, api: Api, view: str) -> None:
        job = finished_job(api, (looked_at(view=view),))
        key = api.store.cases.of_job(job.id)[0].key
        folder = api.context.files.job(job.id)
        for place in (folder.parent / "other", folder / "in"):
            place.mkdir(exist_ok=True)
            (place / "view.json").write_text("{}")
        for rest in ("layers/image.nii.gz", "slices/image/z/0.png"):
            assert api.client.get(f"/v1/cases/{key}/{rest}").status_code == 404

    def test_a_case_without_layers_says_so(self, three: Api) -> None:
        answer = three.client.get(f"/v1/cases/{three.store.cases.page()[0].key}/layers/image.nii.gz")
        assert answer.status_code == 404
        assert "no layers" in answer.json()["detail"]


def test_batches_by_day_count_their_cases(three: Api) -> None:
    batches = three.client.get("/v1/batches").json()["batches"]
    assert [(each["batch"], each["n_cases"], each["n_flagged"], each["n_failed"]) for each in batches] == [
        ("night", 3, 1, 1)
    ]
    assert batches[0]["mean_expected_dsc"] == pytest.approx((0.95 + 0.4) / 2)


def test_the_trend_holds_what_worked_oldest_first(three: Api) -> None:
    points = three.client.get("/v1/trend").json()["points"]
    assert [(point["case"], point["n_flags"]) for point in points] == [("good", 0), ("doubtful", 1)]
    limited = three.client.get("/v1/trend", params={"limit": 1, "batch": "night"}).json()["points"]
    assert [point["case"] for point in limited] == ["doubtful"]
    assert three.client.get("/v1/trend", params={"calibrator": "c" * 64}).json()["points"] == []


class TestStatus:
    def test_it_is_ready_when_the_store_answers_the_disk_has_room_and_a_worker_was_heard_of(self, api: Api) -> None:
        assert api.client.get("/v1/ready").status_code == 503
        api.store.workers.beat("worker")
        answer = api.client.get("/v1/ready")
        assert (answer.status_code, answer.json()) == (200, {"ready": True, "reasons": []})

    def test_a_store_that_does_not_answer_is_503_everywhere_but_health(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gone(*_: object, **__: object) -> None:
            raise StoreError("the store (postgresql at db) does not answer")

        monkeypatch.setattr(api.store, "ping", gone)
        monkeypatch.setattr(api.store.jobs, "page", gone)
        monkeypatch.setattr(api.store.tokens, "check", gone)
        assert api.client.get("/v1/health").status_code == 200
        ready = api.client.get("/v1/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["the store does not answer"])
        for headers in ({}, {"Authorization": "Bearer segcal_x"}):
            answer = api.client.get("/v1/jobs", headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:segcal:problem:store")
            assert int(answer.headers["retry-after"]) > 0

    def test_metrics_count_requests_by_template_and_never_by_id(self, three: Api) -> None:
        for number in range(5):
            three.client.get(f"/v1/jobs/{number:024x}")
            three.client.get(f"/nothing/{number}")
            three.client.request(f"ODD{number}", "/v1/jobs")
        text = three.client.get("/v1/metrics").text
        assert 'segcal_requests_total{method="GET",route="/v1/jobs/{job_id}",status="404"} 5.0' in text
        assert 'segcal_requests_total{method="GET",route="(none)",status="404"} 5.0' in text
        assert "ODD" not in text
        assert 'segcal_jobs{state="done"} 1.0' in text
        assert "segcal_cases 3.0" in text
        assert "segcal_queue_age_seconds 0.0" in text
        assert "segcal_intake_paused 0.0" in text
        assert "segcal_disk_free_bytes" in text

    def test_the_openapi_file_is_served_and_no_page_loads_it_from_elsewhere(self, api: Api) -> None:
        assert api.client.get("/v1/openapi.json").json() == api.app.openapi()
        for address in ("/docs", "/redoc", "/openapi.json"):
            assert api.client.get(address).status_code == 404

    def test_a_method_that_is_none_of_the_address_is_405_with_those_that_are(self, api: Api) -> None:
        answer = api.client.delete("/v1/jobs/counts")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
        assert answer.json()["type"] == "urn:segcal:problem:method-not-allowed"


def test_every_answer_of_the_openapi_file_is_described_with_a_type(api: Api) -> None:
    for path, found in api.app.openapi()["paths"].items():
        for method, operation in found.items():
            assert operation["summary"], f"{method} {path}"
            for status, answer in operation["responses"].items():
                assert answer["description"]
                problem = "application/problem+json" in answer.get("content", {})
                assert problem == (int(status) >= 400 and (path, status) != ("/v1/ready", "503")), f"{path} {status}"


def test_every_operation_has_a_short_name_of_its_own(api: Api) -> None:
    names = [each["operationId"] for found in api.app.openapi()["paths"].values() for each in found.values()]
    assert len(set(names)) == len(names)
    assert {"jobs_submit", "cases_upload", "calibrators_upload"} <= set(names)


def test_nothing_of_the_data_folder_is_readable_by_others(tmp_path: Path) -> None:
    from segcal.service.api.uploads import _new_file

    with _new_file(tmp_path / "uploads" / "x") as file:
        file.write(b"x")
    assert (tmp_path / "uploads" / "x").stat().st_mode & 0o077 == 0
