"""Who may do what: every route behind the gate, names and origins checked, nothing secret in the log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from segcal.service.api.auth import COOKIE
from segcal.service.api.doorway import CONTENT_SECURITY_POLICY, SECURITY_HEADERS
from segcal.service.api.gate import OPEN_PATHS
from segcal.service.api.hosts import from_other_site, host_name
from segcal.service.api.log import JsonLines
from segcal.service.api.login_routes import local_path
from segcal.service.settings import ServiceSettings, is_loopback
from tests.service.api_data import (
    ADDRESS,
    BINARY,
    Api,
    add_calibrator,
    case_with_layers,
    finished_job,
    npz_bytes,
    running_api,
)

SAMPLES = {
    "job_id": "0" * 24,
    "sha256": "a" * 64,
    "key": "1",
    "name": "image",
    "axis": "z",
    "index": "0",
    "path": "out/map.npz",
}
METHODS = {"get", "post", "put", "delete", "patch"}
UNKNOWN_TOKEN = "Bearer segcal_000000000000_" + "0" * 64
EVERYWHERE = (None, UNKNOWN_TOKEN, "evil.example")
"""What is tried on every route; the other ways to be wrong are tried on one."""

ADMIN_ONLY = {("post", "/v1/calibrators/{sha256}/retire")}


def operations(api: Api) -> list[tuple[str, str, str]]:
    """Method, template and an address of every operation of the OpenAPI file, and of every page."""
    described = {
        (method, path) for path, found in api.app.openapi()["paths"].items() for method in found if method in METHODS
    }
    assert len(described) > 15
    pages = {("get", "/"), ("get", "/jobs"), ("get", "/calibrators"), ("get", "/v1/openapi.json"), ("post", "/logout")}
    return [(method, path, path.format(**SAMPLES)) for method, path in sorted(described | pages)]


def closed(api: Api) -> list[tuple[str, str, str]]:
    return [each for each in operations(api) if each[1] not in OPEN_PATHS]


class TestTokens:
    @pytest.mark.parametrize(
        "header",
        [
            None,
            "Bearer ",
            "Bearer x",
            UNKNOWN_TOKEN,
            "Basic YTpi",
            "segcal",
            "Bearer " + "x" * 5000,
            "Bearer segcal_\xe4",
        ],
    )
    def test_without_a_valid_token_every_route_is_closed(self, guarded: Api, header: str | None) -> None:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        for method, _, address in closed(guarded) if header in EVERYWHERE else [("get", "", "/v1/jobs")]:
            answer = guarded.client.request(method, address, headers=headers)
            assert answer.status_code == 401, f"{method} {address}"
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["type"] == "urn:segcal:problem:not-signed-in"

    def test_routes_that_do_not_exist_are_closed_too(self, guarded: Api) -> None:
        for address in ("/v1/nothing", "/docs", "/redoc", "/openapi.json", "/v1/health/", "/v1/../v1/jobs"):
            assert guarded.client.get(address).status_code == 401

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/health%3F",
            "/v1/health%23x",
            "/login%3Fnext",
            "/v1/health%2f..%2fjobs",
            "/static/../v1/jobs",
            "//v1/health",
        ],
    )
    def test_a_path_that_only_looks_open_is_not(self, guarded: Api, path: str) -> None:
        status, content = guarded.raw_get(path)
        assert status in (401, 404)
        assert b"alive" not in content
        if not path.startswith("/static/"):
            assert status == 401

    def test_expired_and_revoked_tokens_open_nothing(self, guarded: Api) -> None:
        expired = guarded.token("admin", expires=1.0)
        revoked = guarded.token("admin")
        guarded.store.tokens.revoke(revoked["Authorization"].split("_")[1])
        for method, _, address in closed(guarded):
            for headers in (expired, revoked):
                assert guarded.client.request(method, address, headers=headers).status_code == 401, address

    def test_a_wrong_secret_of_a_known_token_opens_nothing(self, guarded: Api) -> None:
        text = guarded.token("admin")["Authorization"]
        wrong = text[:-1] + ("0" if text[-1] != "0" else "1")
        assert guarded.client.get("/v1/jobs", headers={"Authorization": wrong}).status_code == 401

    def test_a_reader_changes_nothing_on_any_route(self, guarded: Api) -> None:
        headers = guarded.token("read")
        for method, path, address in closed(guarded):
            if path == "/logout":
                continue
            status = guarded.client.request(method, address, headers=headers).status_code
            assert (status == 403) == (method != "get"), f"{method} {path}: {status}"
            assert status != 401

    def test_a_submitter_does_everything_but_what_is_for_admins(self, guarded: Api) -> None:
        submitter, admin = guarded.token("submit"), guarded.token("admin")
        for method, path, address in closed(guarded):
            status = guarded.client.request(method, address, headers=submitter).status_code
            assert (status == 403) == ((method, path) in ADMIN_ONLY), f"{method} {path}: {status}"
            assert guarded.client.request(method, address, headers=admin).status_code not in (401, 403)

    def test_the_name_of_the_token_stands_beside_the_job(self, guarded: Api) -> None:
        params = {"case": "c1", "calibrator": add_calibrator(guarded).sha256}
        headers = {**BINARY, **guarded.token("submit", name="Dr. Ä")}
        answer = guarded.client.post("/v1/cases", params=params, content=npz_bytes(), headers=headers)
        assert answer.json()["submitted_by"] == "Dr. Ä"

    def test_health_and_readiness_need_no_token_and_say_little(self, guarded: Api) -> None:
        assert guarded.client.get("/v1/health").json() == {"status": "alive"}
        answer = guarded.client.get("/v1/ready")
        assert answer.json() == {"ready": False, "reasons": ["no worker was heard of in the last minute"]}

    def test_on_loopback_a_wrong_token_is_refused_and_none_is_needed(self, api: Api) -> None:
        assert api.client.get("/v1/jobs").status_code == 200
        assert api.client.get("/v1/jobs", headers={"Authorization": "Bearer x"}).status_code == 401
        assert api.client.get("/v1/jobs", headers={"Cookie": f"{COOKIE}=left-over"}).status_code == 200

    def test_on_loopback_a_token_still_says_what_its_owner_may(self, api: Api) -> None:
        answer = api.client.post(f"/v1/calibrators/{'a' * 64}/retire", headers=api.token("submit"))
        assert answer.status_code == 403

    @pytest.mark.parametrize(
        ("values", "required"),
        [
            ({}, False),
            ({"host": "localhost"}, False),
            ({"host": "127.0.0.9"}, False),
            ({"host": "::1"}, False),
            ({"host": "0.0.0.0"}, True),
            ({"host": "::"}, True),
            ({"host": "192.168.1.5"}, True),
            ({"host": "node"}, True),
            ({"host": "localhost.evil.org"}, True),
            ({"host_names": ("segcal.hospital.org",)}, True),
            ({"require_tokens": True}, True),
        ],
    )
    def test_tokens_are_required_as_soon_as_others_can_reach_the_server(
        self, tmp_path: Path, values: dict[str, Any], required: bool
    ) -> None:
        assert ServiceSettings(data=tmp_path, **values).tokens_required is required
        with running_api(tmp_path, **values) as api:
            assert (api.client.get("/v1/jobs").status_code == 401) is required

    def test_the_openapi_file_says_whether_tokens_are_required(self, api: Api, tmp_path: Path) -> None:
        security = api.app.openapi()["paths"]["/v1/jobs"]["get"]["security"]
        assert {} in security
        with running_api(tmp_path / "other", require_tokens=True) as guarded:
            described = guarded.app.openapi()["paths"]
        assert described["/v1/jobs"]["get"]["security"] == [{"token": []}, {"cookie": []}]
        assert described["/v1/health"]["get"]["security"] == []


class TestHosts:
    @pytest.mark.parametrize(
        "host",
        [
            "evil.example",
            "evil.example:8421",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "127.0.0.1@evil.example",
            "evil.example#127.0.0.1",
            "",
            "[::1",
            "0.0.0.0:8421",
            "10.0.0.1",
            "local host",
            "127.0.0.1, evil.example",
        ],
    )
    def test_a_foreign_name_is_refused_on_every_route(self, api: Api, host: str) -> None:
        for method, _, address in operations(api) if host in EVERYWHERE else [("get", "", "/v1/jobs")]:
            answer = api.client.request(method, address, headers={"Host": host})
            assert answer.status_code == 421, address
            assert answer.json()["type"] == "urn:segcal:problem:wrong-host"

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:99", "LOCALHOST:8421", "localhost.", "[::1]:8421"])
    def test_names_of_this_machine_are_known(self, api: Api, host: str) -> None:
        assert api.client.get("/v1/jobs", headers={"Host": host}).status_code == 200

    def test_configured_names_and_the_address_itself_are_known(self, tmp_path: Path) -> None:
        with running_api(tmp_path, host="192.168.1.5", host_names=("segcal.hospital.org",)) as api:
            headers = api.token()
            for host, status in (("192.168.1.5:8421", 200), ("Segcal.Hospital.org", 200), ("192.168.1.6", 421)):
                assert api.client.get("/v1/jobs", headers={**headers, "Host": host}).status_code == status

    def test_two_host_headers_are_refused(self, api: Api) -> None:
        headers = [("Host", "127.0.0.1"), ("Host", "evil.example")]
        assert api.client.get("/v1/jobs", headers=headers).status_code == 421

    def test_what_a_proxy_says_gives_no_access(self, guarded: Api) -> None:
        forged = {
            "X-Forwarded-For": "127.0.0.1",
            "X-Forwarded-Host": "127.0.0.1",
            "X-Forwarded-Proto": "https",
            "X-Forwarded-User": "admin",
            "X-Real-IP": "127.0.0.1",
            "Forwarded": "for=127.0.0.1;host=127.0.0.1",
            "X-Original-URL": "/v1/health",
            "X-HTTP-Method-Override": "GET",
        }
        for method, _, address in closed(guarded):
            assert guarded.client.request(method, address, headers=forged).status_code == 401
        forged_host = {**forged, "Host": "evil.example"}
        assert guarded.client.get("/v1/health", headers=forged_host).status_code == 421

    @pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
    def test_a_server_that_trusts_its_machine_does_not_answer_for_a_proxy(self, api: Api, header: str) -> None:
        answer = api.client.get("/v1/jobs", headers={header: "for=1.2.3.4"})
        assert answer.status_code == 403
        assert "--host-name" in answer.json()["detail"]

    @pytest.mark.parametrize(
        ("text", "name"), [("a:80", "a"), ("[::1]:80", "::1"), ("A.b", "a.b"), ("a:b", None), ("a/b", None), ("", None)]
    )
    def test_the_name_in_a_host_header(self, text: str, name: str | None) -> None:
        assert host_name(text) == name

    @pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.1", "localhost.localdomain", "::ffff:127.0.0.1"])
    def test_other_ways_to_write_this_machine_do_not_count(self, host: str) -> None:
        assert not is_loopback(host) or host == "::ffff:127.0.0.1"


class TestOrigins:
    CROSS = (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://127.0.0.1:8421.evil.example"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "ftp://127.0.0.1:8421"},
        {"Origin": "127.0.0.1:8421"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": ADDRESS, "Sec-Fetch-Site": "cross-site"},
    )

    @pytest.mark.parametrize("headers", CROSS)
    def test_a_page_of_another_site_changes_nothing(self, api: Api, headers: dict[str, str]) -> None:
        for method, _, address in operations(api):
            if method != "get":
                answer = api.client.request(method, address, headers=headers)
                assert answer.status_code == 403, address

    def test_our_own_page_and_programs_may(self, api: Api) -> None:
        job = finished_job(api)
        for headers in ({}, {"Origin": ADDRESS}, {"Origin": ADDRESS, "Sec-Fetch-Site": "same-origin"}):
            assert api.client.post(f"/v1/jobs/{job.id}/cancel", headers=headers).status_code == 200

    @pytest.mark.parametrize(
        ("host", "origin", "same"),
        [
            ("segcal.org", "https://segcal.org", True),
            ("segcal.org:443", "https://segcal.org", True),
            ("Segcal.org:8443", "https://segcal.org:8443", True),
            ("segcal.org", "https://segcal.org:8443", False),
            ("segcal.org:443", "http://segcal.org", False),
            ("segcal.org", "https://www.segcal.org", False),
            ("segcal.org", "https://segcal.org.evil.example", False),
            ("segcal.org", "https://segcal.org@evil.example", False),
        ],
    )
    def test_a_proxy_may_write_the_port_that_browsers_leave_out(self, host: str, origin: str, same: bool) -> None:
        assert from_other_site(Headers({"host": host, "origin": origin})) is not same

    def test_with_a_cookie_the_browser_has_to_say_that_it_is_our_page(self, guarded: Api) -> None:
        job = finished_job(guarded)
        cookie = {"Cookie": f"{COOKIE}={guarded.token('submit')['Authorization'].split()[1]}"}
        address = f"/v1/jobs/{job.id}/cancel"
        assert guarded.client.post(address, headers=cookie).status_code == 403
        assert guarded.client.post(address, headers={**cookie, "Origin": "http://evil.example"}).status_code == 403
        assert guarded.client.post(address, headers={**cookie, "Origin": ADDRESS}).status_code == 200
        assert guarded.client.get("/v1/jobs", headers=cookie).status_code == 200

    def test_no_site_is_told_that_it_may_read(self, api: Api) -> None:
        asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        for answer in (api.client.get("/v1/jobs", headers=asked), api.client.options("/v1/jobs", headers=asked)):
            assert not [name for name in answer.headers if name.startswith("access-control")]


class TestLogin:
    def sign_in(self, api: Api, token: str, **values: str) -> Any:
        origin = values.pop("origin", ADDRESS)
        return api.client.post("/login", data={"token": token, **values}, headers={"Origin": origin})

    def test_a_page_sends_a_browser_to_the_login_and_a_program_a_401(self, guarded: Api) -> None:
        answer = guarded.client.get("/jobs", headers={"Accept": "text/html"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/jobs")
        assert guarded.client.get("/v1/jobs", headers={"Accept": "text/html"}).status_code == 401
        assert guarded.client.get("/login").status_code == 200

    def test_a_valid_token_sets_a_cookie_that_scripts_and_other_sites_cannot_use(self, guarded: Api) -> None:
        token = guarded.token("submit")["Authorization"].split()[1]
        answer = self.sign_in(guarded, token, next="/jobs")
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}={token};")
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert guarded.client.get("/v1/jobs").status_code == 200  # the client keeps cookies as a browser does
        out = guarded.client.post("/logout", headers={"Origin": ADDRESS})
        assert (out.status_code, out.headers["clear-site-data"]) == (303, '"cache"')
        assert guarded.client.get("/v1/jobs").status_code == 401

    def test_behind_tls_the_cookie_is_for_tls_only(self, tmp_path: Path) -> None:
        with running_api(tmp_path, host_names=("segcal.hospital.org",)) as api:
            token = api.token()["Authorization"].split()[1]
            headers = {"Host": "segcal.hospital.org", "Origin": "https://segcal.hospital.org"}
            answer = api.client.post("/login", data={"token": token}, headers=headers)
        assert "Secure" in answer.headers["set-cookie"].split("; ")

    @pytest.mark.parametrize("token", ["", "x", "segcal_000000000000_" + "0" * 64, "<script>", "ä", "\0"])
    def test_a_wrong_token_gets_the_form_again_and_no_cookie(self, guarded: Api, token: str) -> None:
        answer = self.sign_in(guarded, token)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert "<form" in answer.text
        assert "<script>" not in answer.text

    def test_another_site_cannot_sign_somebody_in(self, guarded: Api) -> None:
        token = guarded.token()["Authorization"].split()[1]
        assert self.sign_in(guarded, token, origin="http://evil.example").status_code == 403

    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("/jobs?state=done", "/jobs?state=done"),
            ("//evil.example", "/"),
            ("/\\evil.example", "/"),
            ("https://evil.example", "/"),
            ("javascript:alert(1)", "/"),
            ("/a\r\nSet-Cookie: x=y", "/"),
            ('/"><script>', "/%22%3E%3Cscript%3E"),
            ("", "/"),
            ("/" + "a" * 2000, "/"),
        ],
    )
    def test_after_signing_in_nobody_is_sent_elsewhere(self, guarded: Api, text: str, path: str) -> None:
        assert local_path(text) == path
        token = guarded.token()["Authorization"].split()[1]
        assert self.sign_in(guarded, token, next=text).headers["location"] == path

    def test_a_form_that_is_far_too_long_is_refused_before_it_is_read(self, guarded: Api) -> None:
        # Nobody has signed in yet, so a thousand connections of strangers must not hold a body of megabytes each.
        def pieces() -> Iterator[bytes]:
            yield from [b"x" * 1000] * 100

        assert self.sign_in(guarded, "x" * 10_000).status_code == 413
        headers = {"Origin": ADDRESS, "Content-Type": "application/x-www-form-urlencoded"}
        assert guarded.client.post("/login", content=pieces(), headers=headers).status_code == 413


class TestHeaders:
    def test_every_answer_carries_the_security_headers(self, guarded: Api) -> None:
        for headers in ({}, guarded.token("admin"), {"Host": "evil.example"}):
            for method, _, address in operations(guarded):
                answer = guarded.client.request(method, address, headers=headers)
                for name in SECURITY_HEADERS:
                    assert name in answer.headers, f"{name} of {method} {address}"
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert "server" not in answer.headers

    def test_the_policy_lets_nothing_run_but_our_own_files(self, api: Api) -> None:
        policy = dict(part.strip().split(" ", 1) for part in CONTENT_SECURITY_POLICY.split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in CONTENT_SECURITY_POLICY
        assert api.client.get("/v1/jobs").headers["content-security-policy"] == CONTENT_SECURITY_POLICY

    def test_an_error_of_the_service_tells_the_user_a_number_and_the_log_the_rest(
        self, api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("the password is 1234")

        monkeypatch.setattr(api.store.jobs, "page", broken)
        with caplog.at_level(logging.INFO, logger="segcal.service"):
            answer = api.client.get("/v1/jobs")
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:segcal:problem:internal")
        assert "1234" not in answer.text
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        number = re.search(r"under ([0-9a-f]{8})", answer.json()["detail"])
        assert number is not None
        logged = [JsonLines().format(record) for record in caplog.records]
        assert any(number[1] in line and "1234" in line for line in logged)


class TestLog:
    @pytest.fixture
    def lines(self, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
        """What the log holds, filled as lines are asked for."""
        with caplog.at_level(logging.DEBUG):
            yield _Lines(caplog)

    def test_no_token_query_body_or_address_gets_into_the_log(self, guarded: Api, lines: list[str]) -> None:
        token = guarded.token("admin", name="anna")["Authorization"].split()[1]
        key = case_with_layers(guarded)
        for headers in ({"Authorization": f"Bearer {token}"}, {"Cookie": f"{COOKIE}={token}"}):
            for method, _, address in operations(guarded):
                guarded.client.request(
                    method, f"{address}?token={token}&search=secret-name", headers=headers, content=b"secret-body"
                )
            guarded.client.get(f"/v1/cases/{key}", headers=headers)
            guarded.client.get("/v1/jobs/secret-path", headers=headers)
            guarded.client.get("/secret-path", headers=headers)
        guarded.client.post("/login", data={"token": token}, headers={"Origin": ADDRESS})
        text = "\n".join(lines)
        secret = token.split("_")[2]
        for word in (secret, secret[:20], "secret-name", "secret-body", "secret-path"):
            assert word not in text

    def test_a_request_is_one_json_line_with_route_status_time_and_name(self, guarded: Api, lines: list[str]) -> None:
        guarded.client.get(f"/v1/jobs/{'0' * 24}", headers=guarded.token("read", name="anna"))
        found = [json.loads(line) for line in lines if '"request"' in line]
        assert len(found) == 1
        line = found[0]
        assert (line["method"], line["route"], line["status"], line["by"]) == ("GET", "/v1/jobs/{job_id}", 404, "anna")
        assert line["ms"] >= 0

    def test_a_name_with_line_breaks_forges_no_line(self, guarded: Api, lines: list[str]) -> None:
        guarded.client.get("/v1/jobs", headers=guarded.token("read", name='x"}\n{"message": "forged"}'))
        assert all("\n" not in line for line in lines)


class _Lines(list[str]):
    """The log so far, as it would be written."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__()
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        ours = (record for record in self._caplog.records if record.name.startswith(("segcal", "uvicorn")))
        return (JsonLines().format(record) for record in ours)
