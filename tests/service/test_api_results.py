"""Results over HTTP: whole and in ranges, with safe types, and no way to anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from segcal.service.api.downloads import REPORT_POLICY
from segcal.service.requests import FitRequest
from tests.service.api_data import FILES, Api, add_calibrator, calibrator_bytes, finished_job

SHOWN = ["out/map.npz", "out/other.html", "qa/qa.csv", "qa/qa.html", "report.html"]
CONTENT = FILES["out/map.npz"]


@pytest.fixture
def results(api: Api) -> str:
    """Address of the results of a finished job."""
    return f"/v1/jobs/{finished_job(api).id}/results"


def folder_of(api: Api, results: str) -> Path:
    return api.context.files.job(results.split("/")[3])


def test_the_listing_shows_what_the_job_made_and_neither_inputs_nor_unfinished_files(api: Api, results: str) -> None:
    listed = api.client.get(results).json()
    assert [file["path"] for file in listed["files"]] == SHOWN
    assert {file["path"]: file["size"] for file in listed["files"]} == {name: len(FILES[name]) for name in SHOWN}
    assert listed["state"] == "done"


@pytest.mark.parametrize("name", SHOWN)
def test_every_listed_file_is_served_byte_by_byte(api: Api, results: str, name: str) -> None:
    answer = api.client.get(f"{results}/{name}")
    assert answer.status_code == 200
    assert answer.content == FILES[name]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_results_of_a_job_that_is_not_finished_are_not_served(api: Api) -> None:
    job = api.store.jobs.submit(FitRequest(manifest="/m.yaml"), batch="", submitted_by="", queue_limit=9)
    for name in ("", "/out/map.npz"):
        answer = api.client.get(f"/v1/jobs/{job.id}/results{name}")
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:segcal:problem:not-yet")


@pytest.mark.parametrize(
    "name",
    [
        "in/case.npz",
        "lock",
        "out/.segcal-12ab-map.npz",
        "out",
        "out/",
        "none.npz",
        "../../segcal.db",
        "..%2f..%2fsegcal.db",
        "%2e%2e/%2e%2e/segcal.db",
        "out/../../../segcal.db",
        "out/../in/case.npz",
        "out/..%2fin/case.npz",
        "%2fetc/passwd",
        "/etc/passwd",
        "out//etc/passwd",
        "..%5c..%5csegcal.db",
        "out/map.npz%00.csv",
        "%252e%252e/%252e%252e/segcal.db",
        ".",
        "./in/case.npz",
        "a" * 5000,
        "/".join(["a"] * 2000),
    ],
)
def test_no_name_leads_to_anything_else(api: Api, results: str, name: str) -> None:
    status, content = api.raw_get(f"{results}/{name}")
    assert status == 404
    assert b"SQLite" not in content
    assert b"what was sent" not in content


def test_the_raw_path_of_a_result_would_be_served(api: Api, results: str) -> None:
    assert api.raw_get(f"{results}/out%2fmap.npz") == (200, CONTENT)


@pytest.mark.parametrize("target", ["/etc/passwd", "{data}/segcal.db", "{job}/in/case.npz", "{job}/../other"])
def test_a_link_in_the_results_that_leads_elsewhere_is_neither_listed_nor_served(
    api: Api, results: str, target: str
) -> None:
    folder = folder_of(api, results)
    (folder.parent / "other").write_text("of another job")
    (folder / "out" / "link.csv").symlink_to(target.format(data=api.settings.data, job=folder))
    (folder / "out" / "folder").symlink_to(folder / "in")
    assert [file["path"] for file in api.client.get(results).json()["files"]] == SHOWN
    assert api.client.get(f"{results}/out/link.csv").status_code == 404
    assert api.client.get(f"{results}/out/folder/case.npz").status_code == 404


def test_html_is_saved_and_not_shown_unless_it_is_our_report_in_a_sandbox(api: Api, results: str) -> None:
    other = api.client.get(f"{results}/out/other.html")
    assert other.headers["content-type"] == "application/octet-stream"
    assert other.headers["content-disposition"].startswith("attachment")
    for name in ("report.html", "qa/qa.html"):
        answer = api.client.get(f"{results}/{name}")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["content-security-policy"] == REPORT_POLICY
        assert "allow-same-origin" not in REPORT_POLICY


def test_a_name_that_only_looks_like_our_report_is_saved(api: Api, results: str) -> None:
    folder = folder_of(api, results)
    (folder / "out" / "report.html").write_bytes(b"<script>1</script>")
    (folder / "out" / 'a"; x.svg').write_bytes(b"<svg/>")
    for name in ("out/report.html", "out/a%22%3B%20x.svg"):
        answer = api.client.get(f"{results}/{name}")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment; filename*=utf-8''")
        assert '"' not in answer.headers["content-disposition"]


class TestRanges:
    """RFC 9110, on a file of 1024 bytes."""

    @pytest.mark.parametrize(
        ("wanted", "first", "last"),
        [
            ("bytes=0-99", 0, 99),
            ("bytes=100-", 100, 1023),
            ("bytes=-24", 1000, 1023),
            ("bytes=1000-5000", 1000, 1023),
            ("bytes=-5000", 0, 1023),
            ("bytes=0-0", 0, 0),
        ],
    )
    def test_a_range_is_answered_with_its_part(
        self, api: Api, results: str, wanted: str, first: int, last: int
    ) -> None:
        answer = api.client.get(f"{results}/out/map.npz", headers={"Range": wanted})
        assert answer.status_code == 206
        assert answer.headers["content-range"] == f"bytes {first}-{last}/1024"
        assert answer.content == CONTENT[first : last + 1]

    def test_several_ranges_are_answered_in_parts(self, api: Api, results: str) -> None:
        answer = api.client.get(f"{results}/out/map.npz", headers={"Range": "bytes=0-9, 500-509"})
        assert answer.status_code == 206
        boundary = answer.headers["content-type"].partition("boundary=")[2].encode()
        parts = answer.content.split(b"--" + boundary)
        assert [part.partition(b"\r\n\r\n")[2].rstrip(b"\r\n") for part in parts[1:-1]] == [
            CONTENT[0:10].rstrip(b"\r\n"),
            CONTENT[500:510].rstrip(b"\r\n"),
        ]

    @pytest.mark.parametrize("wanted", ["bytes=1024-", "bytes=5000-6000", "bytes=-0", "bytes=0-5, 2000-3000"])
    def test_a_range_behind_the_end_is_416_with_the_size(self, api: Api, results: str, wanted: str) -> None:
        answer = api.client.get(f"{results}/out/map.npz", headers={"Range": wanted})
        assert (answer.status_code, answer.json()["type"]) == (416, "urn:segcal:problem:range")
        assert answer.headers["content-range"] == "bytes */1024"

    @pytest.mark.parametrize(
        "wanted",
        [
            "lines=1-2",
            "bytes=",
            "bytes=a-b",
            "bytes=9-3",
            "bytes",
            "bytes=-",
            "bytes=" + ",".join(["0-1"] * 21),
            "bytes=" + "9" * 5000 + "-",
            "bytes=0-1;2-3",
        ],
    )
    def test_ranges_that_nobody_can_read_are_ignored(self, api: Api, results: str, wanted: str) -> None:
        answer = api.client.get(f"{results}/out/map.npz", headers={"Range": wanted})
        assert (answer.status_code, answer.content) == (200, CONTENT)

    def test_a_range_of_a_file_that_changed_gives_the_whole_new_file(self, api: Api, results: str) -> None:
        address = f"{results}/out/map.npz"
        etag = api.client.get(address).headers["etag"]
        wanted = {"Range": "bytes=0-9", "If-Range": etag}
        assert api.client.get(address, headers=wanted).status_code == 206
        replaced = folder_of(api, results) / "out" / "new"
        replaced.write_bytes(b"n" * 1024)
        replaced.replace(folder_of(api, results) / "out" / "map.npz")
        answer = api.client.get(address, headers=wanted)
        assert (answer.status_code, answer.content) == (200, b"n" * 1024)


def test_what_the_client_has_already_is_not_sent_again(api: Api, results: str) -> None:
    address = f"{results}/qa/qa.csv"
    etag = api.client.get(address).headers["etag"]
    for known in (etag, f'"x", W/{etag}'):
        answer = api.client.get(address, headers={"If-None-Match": known})
        assert (answer.status_code, answer.content) == (304, b"")
    assert api.client.get(address, headers={"If-None-Match": '"x"'}).status_code == 200


def test_the_file_of_a_calibrator_comes_back_as_it_was(api: Api) -> None:
    record = add_calibrator(api, 1.5)
    answer = api.client.get(f"/v1/calibrators/{record.sha256}/file")
    assert answer.content == calibrator_bytes(1.5)
    part = api.client.get(f"/v1/calibrators/{record.sha256}/file", headers={"Range": "bytes=0-7"})
    assert (part.status_code, part.content) == (206, calibrator_bytes(1.5)[:8])
    assert api.client.get(f"/v1/calibrators/{'c' * 64}/file").status_code == 404
