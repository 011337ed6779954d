"""Uploads: checked before they are visible, bounded in size and time, and gone without a trace when refused."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segcal.errors import OutputError
from segcal.service.api.case_intake import remove_lost
from segcal.service.api.uploads import remove_stale
from tests.service.api_data import (
    BINARY,
    CLASSES,
    LIMITS,
    Api,
    add_calibrator,
    calibrator_bytes,
    npz_bytes,
    running_api,
)


def upload_calibrator(api: Api, content: Any, name: str = "ours") -> Any:
    return api.client.post("/v1/calibrators", params={"name": name}, content=content, headers=BINARY)


def upload_case(api: Api, content: Any, **params: str) -> Any:
    known = api.store.calibrators.list()
    sha256 = known[0].sha256 if known else add_calibrator(api).sha256
    values = {"case": "c1", "calibrator": sha256, **params}
    return api.client.post("/v1/cases", params=values, content=content, headers=BINARY)


def nothing_is_left(api: Api) -> None:
    """No file, no row."""
    assert api.uploads == []
    assert api.job_folders == []
    assert api.store.jobs.page() == []
    assert api.context.uploads.taken == 0


class TestCalibrators:
    def test_an_uploaded_calibrator_is_known_by_the_hash_of_its_bytes(self, api: Api) -> None:
        answer = upload_calibrator(api, calibrator_bytes())
        assert answer.status_code == 201, answer.text
        found = answer.json()
        assert answer.headers["location"] == f"/v1/calibrators/{found['sha256']}"
        assert (found["name"], found["method"], found["classes"]) == ("ours", "ts", list(CLASSES))
        assert api.client.get(answer.headers["location"]).json()["n_cases"] == 0
        assert api.client.get(f"{answer.headers['location']}/file").content == calibrator_bytes()
        nothing_is_left(api)

    def test_the_same_file_twice_is_one_calibrator_under_its_first_name(self, api: Api) -> None:
        upload_calibrator(api, calibrator_bytes(), name="first")
        again = upload_calibrator(api, calibrator_bytes(), name="second")
        assert again.json()["name"] == "first"
        assert len(api.client.get("/v1/calibrators").json()["calibrators"]) == 1

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"not a calibrator",
            calibrator_bytes()[:-3],
            pickle.dumps({"temperature": 1.5}),
            b"PK\x03\x04" + b"\0" * 100,
            struct.pack("<Q", 1 << 60) + b"{}",
            npz_bytes(),
        ],
    )
    def test_what_is_no_calibrator_is_refused_and_leaves_nothing(self, api: Api, content: bytes) -> None:
        answer = upload_calibrator(api, content)
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
        assert str(api.settings.data) not in answer.text
        assert api.store.calibrators.list() == []
        assert not list(api.settings.data.rglob("*.safetensors"))
        nothing_is_left(api)

    @pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "x" * 201])
    def test_a_name_that_is_none_is_refused(self, api: Api, name: str) -> None:
        assert upload_calibrator(api, calibrator_bytes(), name=name).status_code == 422

    def test_a_retired_calibrator_stays_and_is_left_out_on_request(self, api: Api) -> None:
        record = add_calibrator(api)
        answer = api.client.post(f"/v1/calibrators/{record.sha256}/retire")
        assert answer.json()["retired"] is not None
        assert api.client.post(f"/v1/calibrators/{record.sha256}/retire").json() == answer.json()
        assert len(api.client.get("/v1/calibrators").json()["calibrators"]) == 1
        assert api.client.get("/v1/calibrators", params={"retired": False}).json()["calibrators"] == []
        assert api.client.post(f"/v1/calibrators/{'c' * 64}/retire").status_code == 404


class TestCases:
    def test_an_uploaded_case_becomes_a_job_with_the_file_in_its_folder(self, api: Api) -> None:
        answer = upload_case(api, npz_bytes(), batch="ward 3")
        assert answer.status_code == 202, answer.text
        job = answer.json()
        assert (job["kind"], job["batch"], job["request"]["case"]) == ("case", "ward 3", "c1")
        assert (api.context.files.job(job["id"]) / "in" / "c1.npz").read_bytes() == npz_bytes()
        assert api.uploads == []

    def test_the_same_key_and_file_give_the_same_job_and_keep_one_file(self, api: Api) -> None:
        sha256 = add_calibrator(api).sha256
        params, headers = {"case": "c1", "calibrator": sha256}, {**BINARY, "Idempotency-Key": "k1"}
        first, second = (
            api.client.post("/v1/cases", params=params, content=npz_bytes(), headers=headers) for _ in range(2)
        )
        assert first.json()["id"] == second.json()["id"]
        assert api.job_folders == [first.json()["id"]]
        other = api.client.post(
            "/v1/cases", params=params, content=npz_bytes(probabilities=np.ones((3, 1, 1, 1))), headers=headers
        )
        assert other.status_code == 409
        assert api.job_folders == [first.json()["id"]]
        assert api.uploads == []

    def test_an_upload_sent_again_is_its_job_whatever_would_refuse_a_new_one(self, api: Api) -> None:
        sha256 = add_calibrator(api).sha256
        params, headers = {"case": "c1", "calibrator": sha256}, {**BINARY, "Idempotency-Key": "k1"}
        first = api.client.post("/v1/cases", params=params, content=npz_bytes(), headers=headers).json()
        api.store.calibrators.retire(sha256)
        limits = replace(LIMITS, queued_jobs=1, free_disk_bytes=1 << 60, uploads=0)

        with running_api(api.settings.data, limits=limits) as later:
            again = later.client.post("/v1/cases", params=params, content=npz_bytes(), headers=headers)
            empty = later.client.post("/v1/cases", params=params, content=b"", headers=headers)
            large = later.client.post("/v1/cases", params=params, content=b"x" * (9 << 20), headers=headers)
            other = later.client.post("/v1/cases", params=params, content=npz_bytes() + b"x", headers=headers)

        assert (again.status_code, again.json()) == (202, first)
        assert (empty.status_code, large.status_code, other.status_code) == (422, 413, 409)
        assert api.uploads == []
        assert api.job_folders == [first["id"]]

    @pytest.mark.parametrize(
        ("arrays", "said"),
        [
            ({"data": np.zeros((3, 2, 2, 2))}, "expected an array"),
            ({"logits": np.zeros((3, 2, 2, 2)), "probabilities": np.zeros((3, 2, 2, 2))}, "expected an array"),
            ({"logits": np.zeros((4, 2, 2, 2))}, "4 channels"),
            ({"logits": np.zeros((3, 2, 2))}, "(class, z, y, x)"),
            ({"logits": np.zeros((3, 0, 2, 2))}, "(class, z, y, x)"),
            ({"logits": np.zeros((3, 2, 2, 2), dtype=np.int16)}, "float16"),
            ({"logits": np.array([{"a": 1}], dtype=object)}, "never Python objects"),
            ({"logits": np.zeros((3, 2, 2, 2)), **{f"a{k}": np.zeros(1) for k in range(9)}}, "10 arrays"),
        ],
    )
    def test_an_archive_that_holds_something_else_is_refused_with_the_reason(
        self, api: Api, arrays: dict[str, Any], said: str
    ) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=True, **arrays)
        answer = upload_case(api, buffer.getvalue())
        assert answer.status_code == 422
        assert said in answer.json()["detail"]
        assert str(api.settings.data) not in answer.text
        nothing_is_left(api)

    @pytest.mark.parametrize("cut", [10, 200, -30])
    def test_a_truncated_archive_is_refused(self, api: Api, cut: int) -> None:
        assert upload_case(api, npz_bytes()[:cut]).status_code == 422
        nothing_is_left(api)

    def test_a_flipped_bit_in_the_data_is_found(self, api: Api) -> None:
        content = bytearray(npz_bytes())
        content[len(content) // 2] ^= 1
        assert upload_case(api, bytes(content)).status_code == 422
        nothing_is_left(api)

    def test_a_bomb_that_says_so_is_refused_before_anything_is_inflated(self, api: Api) -> None:
        sides = (3, 64, 512, 512)
        content = npz_bytes(logits=np.broadcast_to(np.float32(0), sides))
        assert len(content) < 1 << 20 < api.settings.limits.unpacked_bytes < 4 * np.prod(sides)
        answer = upload_case(api, content)
        assert answer.status_code == 422
        assert "unpacks to" in answer.json()["detail"]
        nothing_is_left(api)

    def test_a_bomb_that_lies_about_its_size_is_refused(self, api: Api) -> None:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (3, 2, 2, 2)})
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("logits.npy", header.getvalue() + b"\0" * (64 << 20))
        answer = upload_case(api, buffer.getvalue())
        assert answer.status_code == 422
        assert "packed" in answer.json()["detail"]
        nothing_is_left(api)

    @pytest.mark.parametrize("entry", ["../../evil.npy", "/etc/evil.npy", "logits.npy/../x.npy"])
    def test_an_archive_whose_entries_lead_elsewhere_is_refused(self, api: Api, entry: str) -> None:
        plain = npz_bytes()
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(plain)) as source, zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(entry, source.read("logits.npy"))
        assert upload_case(api, buffer.getvalue()).status_code == 422
        nothing_is_left(api)

    @pytest.mark.parametrize("case", ["", "../x", "a/b", ".hidden", "x" * 201, "a\0b", "a\nb"])
    def test_a_name_that_could_lead_elsewhere_is_refused(self, api: Api, case: str) -> None:
        assert upload_case(api, npz_bytes(), case=case).status_code == 422
        nothing_is_left(api)

    def test_an_unknown_or_retired_calibrator_is_refused(self, api: Api) -> None:
        assert upload_case(api, npz_bytes(), calibrator="c" * 64).status_code == 404
        record = add_calibrator(api)
        api.store.calibrators.retire(record.sha256)
        assert upload_case(api, npz_bytes()).status_code == 422
        nothing_is_left(api)

    def test_a_queue_that_filled_up_meanwhile_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("segcal.service.api.cases_routes.check_room", lambda _context: None)
        with running_api(tmp_path / "data", limits=replace(LIMITS, queued_jobs=0)) as api:
            assert upload_case(api, npz_bytes()).status_code == 429
            nothing_is_left(api)


UPLOADS = [("/v1/calibrators", {"name": "x"}), ("/v1/cases", {"case": "c1", "calibrator": ""})]


@pytest.fixture(params=UPLOADS, ids=["calibrators", "cases"])
def target(request: pytest.FixtureRequest, api: Api) -> tuple[str, dict[str, str]]:
    path, params = request.param
    return path, {**params, **({"calibrator": add_calibrator(api).sha256} if "calibrator" in params else {})}


def test_an_upload_of_another_type_is_refused(api: Api, target: tuple[str, dict[str, str]]) -> None:
    path, params = target
    for headers in ({"Content-Type": "application/json"}, {"Content-Type": "multipart/form-data; boundary=x"}, {}):
        answer = api.client.post(path, params=params, content=b"x", headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (415, "urn:segcal:problem:wrong-type")
    nothing_is_left(api)


def test_an_upload_that_says_it_is_too_large_is_refused_before_it_is_read(
    api: Api, target: tuple[str, dict[str, str]]
) -> None:
    path, params = target
    headers = {**BINARY, "Content-Length": str(1 << 40)}
    answer = api.client.post(path, params=params, content=iter([b"x"]), headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:segcal:problem:too-large")
    nothing_is_left(api)


def test_an_upload_that_turns_out_too_large_is_given_up(api: Api, target: tuple[str, dict[str, str]]) -> None:
    path, params = target
    pieces = (bytes(1 << 20) for _ in range(9))
    answer = api.client.post(path, params=params, content=pieces, headers=BINARY)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:segcal:problem:too-large")
    nothing_is_left(api)


def test_no_more_uploads_than_allowed_are_received_at_once(api: Api, target: tuple[str, dict[str, str]]) -> None:
    path, params = target
    api.context.uploads.taken = api.settings.limits.uploads
    answer = api.client.post(path, params=params, content=b"x", headers=BINARY)
    assert (answer.status_code, answer.json()["type"]) == (429, "urn:segcal:problem:busy")
    api.context.uploads.taken = 0
    nothing_is_left(api)


def test_an_upload_is_refused_while_the_disk_is_nearly_full(tmp_path: Path) -> None:
    with running_api(tmp_path / "data", limits=replace(LIMITS, free_disk_bytes=1 << 60)) as api:
        answer = upload_calibrator(api, calibrator_bytes())
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:segcal:problem:intake-paused")
        nothing_is_left(api)


def test_a_disk_that_becomes_full_while_an_upload_arrives_pauses_intake(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("segcal.service.api.uploads._flush", full)
    answer = upload_calibrator(api, calibrator_bytes())
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:segcal:problem:intake-paused")
    nothing_is_left(api)


def test_a_disk_that_cannot_be_written_to_is_no_fault_of_the_upload(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritable(*_: object) -> None:
        raise OutputError("calibrators: cannot be written: the disk is full")

    monkeypatch.setattr("segcal.service.api.calibrators_routes.import_calibrator", unwritable)
    answer = upload_calibrator(api, calibrator_bytes())
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:segcal:problem:intake-paused")
    nothing_is_left(api)


def test_a_large_body_where_no_upload_belongs_is_refused(api: Api) -> None:
    for content in (bytes(5 << 20), (bytes(1 << 20) for _ in range(5))):
        answer = api.client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:segcal:problem:too-large")


@pytest.mark.parametrize("length", ["-1", "abc", "1 2", "²"])
def test_a_length_that_is_no_number_is_refused(api: Api, length: str) -> None:
    headers = {**BINARY, "Content-Length": length.encode()}
    answer = api.client.post("/v1/jobs", content=iter([b"x"]), headers=headers)
    assert answer.status_code == 400


class TestLeftovers:
    """What a killed server leaves is removed by the next start, what other servers are at is not."""

    def test_only_old_uploads_are_removed(self, tmp_path: Path) -> None:
        old, new = tmp_path / "old.npz", tmp_path / "new.npz"
        for path in (old, new):
            path.touch()
        os.utime(old, (1, 1))
        remove_stale(tmp_path, older_than_s=60)
        assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]

    def test_the_folder_of_an_upload_whose_job_never_came_to_be_is_removed(self, api: Api) -> None:
        known = upload_case(api, npz_bytes()).json()["id"]
        lost = "0" * 24
        files = api.context.files
        (files.job(lost) / "in").mkdir(parents=True)
        for job_id in (known, lost):
            note = files.uploads / f"{job_id}.pending"
            note.touch()
            os.utime(note, (1, 1))
        remove_lost(files, api.store, older_than_s=60)
        assert api.job_folders == [known]
        assert api.uploads == []
