"""The pages, without a browser: what they say, where they lead, what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from segcal.service.model import JobProgress, NewCase
from segcal.service.requests import CaseRequest, FitRequest, QaRequest
from segcal.service.web import static
from tests.service.api_data import Api, add_calibrator, case_with_layers, finished_job, looked_at, running_api
from tests.service.view_data import affine_of, write_view

EVIL = "<script>alert('x')</script>"
PAGES = ("/", "/cases", "/jobs", "/calibrators", "/calibrators/compare")
OWN_SITE = {"Origin": "http://127.0.0.1:8421"}


class Links(HTMLParser):
    """Every address a page leads to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def body(api: Api, path: str, status: int = 200) -> str:
    answer = api.client.get(path)
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.text


def words(text: str) -> str:
    """What a reader sees, roughly."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())


def case_order(text: str) -> list[str]:
    """Names of the cases in a table, top to bottom."""
    return re.findall(r'<th scope="row"><a href="/cases/\d+">([^<]+)</a>', text)


def submit(api: Api, batch: str = "night") -> str:
    request = QaRequest(calibrator="a" * 64, manifest="/data/manifest.yaml")
    return api.store.jobs.submit(request, batch=batch, submitted_by="anna", queue_limit=1000).id


@pytest.fixture
def filled(api: Api) -> Api:
    """Two calibrators, a case with layers, one that failed, flagged and plain ones, jobs in every state."""
    used = add_calibrator(api, 1.5, "of spring").sha256
    add_calibrator(api, 2.0, "of winter")
    case_with_layers(api)
    flag = ("low_expected_dsc", "expected DSC 0.700 < 0.8")
    finished_job(
        api,
        (
            looked_at("b_flagged", calibrator=used, n_flags=1, flags=(flag,), expected_dsc=0.7, z_free_energy=-5.0),
            looked_at("a_plain", calibrator=used, expected_dsc=0.85, disagreement=0.02, boundary_confidence=0.95),
            looked_at("c_twice", calibrator=used, n_flags=2, flags=(flag, flag), expected_dsc=0.75, disagreement=0.2),
            NewCase(EVIL, "failed", used, error=f"{EVIL}: truncated"),
        ),
        batch="ward & <i>7</i>",
    )
    submit(api)
    claim = api.store.jobs.claim("worker", 60.0)
    assert claim is not None
    api.store.jobs.fail(claim, f"all cases failed: {EVIL}")
    submit(api)
    claim = api.store.jobs.claim("worker", 60.0)
    assert claim is not None
    api.store.jobs.renew(claim, 60.0, JobProgress("layers", 3, 8))
    submit(api)
    api.store.jobs.cancel(submit(api))
    return api


@pytest.mark.parametrize("path", PAGES)
def test_an_empty_service_says_what_to_do_next(api: Api, path: str) -> None:
    text = words(body(api, path))
    if path in ("/", "/calibrators"):
        assert "http://127.0.0.1:8421/v1/calibrators?name=cms_ap" in text
        assert "Bearer" not in text
    else:
        assert any(hint in text for hint in ("the overview says how to begin", "how to add one"))


def test_with_tokens_the_examples_name_one(guarded: Api) -> None:
    text = words(guarded.client.get("/", headers=guarded.token()).text)
    assert 'curl -H "Authorization: Bearer $SEGCAL_TOKEN"' in text


def test_every_link_and_every_picture_of_every_page_exists(filled: Api) -> None:
    """A crawl from the overview; downloads and slices included."""
    waiting, seen = ["/"], set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = filled.client.get(path)
        assert answer.status_code == 200, f"{path}: {answer.status_code}"
        if answer.headers["content-type"].startswith("text/html") and not path.startswith("/v1/"):
            for link in Links(answer.text).found:
                target = urlsplit(link)
                assert not target.netloc, f"{path} leads away to {link}"
                if target.path and target.scheme != "data":
                    waiting.append(f"{target.path}?{target.query}" if target.query else target.path)
    kinds = {re.sub(r"[0-9a-f]{24,64}|\d+", "N", urlsplit(path).path) for path in seen}
    assert {"/cases/N", "/jobs/N", "/calibrators/N", "/vN/cases/N/slices/pN/z/N.png"} <= kinds
    assert {"/vN/jobs/N/results/out/map.npz", "/vN/cases/N/layers/image.nii.gz", "/static/viewer.js"} <= kinds


def test_nothing_a_name_or_message_says_becomes_markup(filled: Api) -> None:
    failed = filled.store.cases.page(status="failed")[0]
    jobs = [f"/jobs/{job.id}" for job in filled.store.jobs.page()]
    for path in (*PAGES, *jobs, f"/cases/{failed.key}", "/cases?search=%3Cscript%3E&batch=%22%3E%3Cb%3E"):
        text = body(filled, path)
        assert "<script>" not in text, path
        assert "<i>7" not in text, path
        assert '"><b>' not in text, path
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;: truncated" in body(filled, f"/cases/{failed.key}")


def test_pages_have_no_script_or_style_of_their_own_which_the_policy_would_refuse(filled: Api) -> None:
    key = filled.store.cases.page(search="hippocampus")[0].key
    job = filled.store.jobs.page(state="running")[0].id
    for path in (*PAGES, f"/cases/{key}", f"/jobs/{job}", "/login", "/cases/99999"):
        text = filled.client.get(path).text
        assert not re.search(r"<script(?![^>]* src=\"/static/)", text), path
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text), path


def test_the_overview_shows_the_worst_first_with_the_reason_and_leaves_good_cases_out(filled: Api) -> None:
    text = body(filled, "/")
    first = text[: text.index('id="trend"')]
    assert case_order(first)[1:] == ["c_twice", "b_flagged", "hippocampus_001"]
    assert case_order(first)[0] == EVIL.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")
    assert "a_plain" not in first
    assert "expected DSC 0.700 < 0.8" in words(first)


def test_the_overview_draws_the_limits_it_names(filled: Api) -> None:
    text = body(filled, "/")
    said = words(text)
    for limit in ("lowest expected DSC 80 %", "lowest boundary confidence 92 %", "limit |z| 3.5"):
        assert limit in said
    assert "1 of the last 1 case beyond the limit" in said  # the z-score of b_flagged
    assert text.count('class="limit"') >= 4


def test_the_overview_counts_batches_and_filters_them(filled: Api) -> None:
    said = words(body(filled, "/"))
    day = filled.store.cases.days()[0].day
    assert f"{day} ward & <i>7</i> 4 2 1 76.7" in said
    only = body(filled, "/?batch=night")
    assert case_order(only[: only.index('id="trend"')]) == ["hippocampus_001"]
    used = next(each.sha256 for each in filled.store.calibrators.list() if each.name == "of spring")
    assert "hippocampus_001" not in body(filled, f"/?calibrator={used}")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sort=case&look=flagged", ["b_flagged", "c_twice", "hippocampus_001"]),
        ("sort=case&descending=1&look=flagged", ["hippocampus_001", "c_twice", "b_flagged"]),
        ("sort=expected_dsc&look=flagged", ["b_flagged", "c_twice", "hippocampus_001"]),
        ("sort=disagreement&descending=1&search=_", ["c_twice", "a_plain"]),
        ("look=not_flagged", ["a_plain"]),
        ("search=TWICE", ["c_twice"]),
        ("batch=night", ["hippocampus_001"]),
        ("day=2001-01-01", []),
    ],
)
def test_the_list_sorts_filters_and_searches(filled: Api, query: str, expected: list[str]) -> None:
    assert case_order(body(filled, f"/cases?{query}"))[: len(expected)] == expected
    if "sort" not in query:
        assert len(case_order(body(filled, f"/cases?{query}"))) == len(expected)


def test_a_heading_sorts_the_worst_on_top_and_turns_when_followed_again(filled: Api) -> None:
    def heading(text: str, title: str) -> tuple[str | None, str]:
        found = re.search(rf'<th scope="col"([^>]*)><a href="([^"]+)">{re.escape(title)}', text)
        assert found
        order = re.search(r'aria-sort="(\w+)"', found[1])
        return (order[1] if order else None), unescape(found[2])

    order, href = heading(body(filled, "/cases"), "outlyingness")
    assert order is None
    text = body(filled, href)
    assert case_order(text)[0] == "b_flagged"
    order, href = heading(text, "outlyingness")
    assert order == "descending"
    assert heading(body(filled, href), "outlyingness")[0] == "ascending"
    assert heading(body(filled, "/cases"), "flags")[0] == "descending"
    assert heading(body(filled, "/cases?sort=newest"), "day")[0] == "descending"


def test_a_long_list_comes_in_pages_that_keep_the_choice(api: Api) -> None:
    finished_job(api, tuple(looked_at(f"case_{k:03d}") for k in range(120)))
    seen: list[str] = []
    path: str | None = "/cases?sort=case&search=case"
    while path:
        text = body(api, path)
        seen += case_order(text)
        found = re.search(r'<a href="([^"]+)" rel="next"', text)
        path = unescape(found[1]) if found else None
    assert seen == [f"case_{k:03d}" for k in range(120)]
    assert "51 to 100 of 120 cases" in words(body(api, "/cases?start=50"))


def test_a_case_tells_its_flags_numbers_and_limits(api: Api) -> None:
    numbers = {
        "expected_dsc:anterior": 0.81,
        "volume_voxels:anterior": 1000.0,
        "expected_volume_voxels:anterior": 1100.0,
        "volume_ml:anterior": 2.0,
        "expected_volume_ml:anterior": 2.2,
        "member_dice:anterior": 0.9,
        "member_volume_low:anterior": 900.0,
        "member_volume_high:anterior": 1300.0,
        "undefined": {"z:free_energy_std": "the calibration cases do not differ in it"},
    }
    case = looked_at(
        n_flags=1,
        flags=(("unsure_boundary", "confidence near the boundary 0.900 < 0.92"),),
        boundary_confidence=0.9,
        z_free_energy=-1.25,
        numbers=numbers,
    )
    key = api.store.cases.of_job(finished_job(api, (case,)).id)[0].key
    text = words(body(api, f"/cases/{key}"))
    assert "1 reason to look at it confidence near the boundary 0.900 < 0.92" in text
    assert "confidence near the boundary 90.0 % (flagged) below 92 %" in text
    assert "expected DSC 90.0 % below 80 %" in text
    assert "z against the calibration cases −1.2 |z| above 3.5" in text
    assert "not defined: the calibration cases do not differ in it" in text
    assert "anterior 81.0 2.000 ml 2.200 ml 1.800 ml to 2.600 ml 90.0" in text
    assert "There are no layers to look at." in text


def test_the_viewer_shows_what_its_address_says(filled: Api) -> None:
    key = filled.store.cases.page(search="hippocampus")[0].key
    text = body(filled, f"/cases/{key}?layer=p1&axis=y&index=3&low=10&high=90&threshold=0.25&opacity=0.5")
    expected = f"/v1/cases/{key}/slices/p1/y/3.png?low=10&high=90&threshold=0.25&opacity=0.5"
    assert f'id="slice" src="{expected.replace("&", "&amp;")}"' in text
    said = words(text)
    assert "probability of anterior, coronal slice 4 of 5" in said
    assert "Radiological convention: right side of the patient at the left edge, head at the top." in said
    # Without a script the neighbours are links, and changing the plane to one with fewer slices still works.
    neighbours = f"/cases/{key}?layer=p1&axis=y&index=2&low=10&high=90&threshold=0.25&opacity=0.5"
    assert f'href="{neighbours.replace("&", "&amp;")}" id="slice-before"' in text
    assert "axial slice 3 of 4" in words(body(filled, f"/cases/{key}?axis=z&index=5"))


def test_a_form_with_empty_fields_shows_the_usual_window(filled: Api) -> None:
    """Browsers send every field of a form, also those that were left empty."""
    key = filled.store.cases.page(search="hippocampus")[0].key
    text = body(filled, f"/cases/{key}?layer=p1&axis=z&index=1&low=&high=&threshold=0.05&opacity=0.7")
    assert f'id="slice" src="/v1/cases/{key}/slices/p1/z/1.png?threshold=0.05"' in text


def test_the_viewer_refuses_what_cannot_be_shown(filled: Api) -> None:
    key = filled.store.cases.page(search="hippocampus")[0].key
    assert "no layer 'p9' of this case" in words(body(filled, f"/cases/{key}?layer=p9", 404))
    assert "the window has to rise" in words(body(filled, f"/cases/{key}?low=5&high=4", 422))
    assert "threshold" in words(body(filled, f"/cases/{key}?threshold=2", 422))
    body(filled, f"/cases/{key}?axis=w", 422)
    for path, status in (("z/4", 404), ("z/999999", 404), ("w/0", 422)):
        assert filled.client.get(f"/v1/cases/{key}/slices/p1/{path}.png").status_code == status


def test_without_geometry_the_page_says_that_slices_lie_as_the_array_does(api: Api) -> None:
    job = finished_job(api, (looked_at(view="view/0"),))
    write_view(api.context.files.job(job.id) / "view" / "0", affine_of("RAS"), geometry=False)
    text = words(body(api, f"/cases/{api.store.cases.of_job(job.id)[0].key}"))
    assert "The geometry is unknown: shown as the array lies." in text
    assert "Radiological" not in text


def test_a_case_whose_layers_are_gone_keeps_its_page(filled: Api) -> None:
    record = filled.store.cases.page(search="hippocampus")[0]
    assert record.case.view
    (filled.context.files.job(record.job_id) / record.case.view / "view.json").unlink()
    text = words(body(filled, f"/cases/{record.key}"))
    assert "They cannot be shown: the layers of this case are not there" in text
    assert "expected DSC 90.0 %" in text


def test_cases_lead_to_their_neighbours_worst_first(filled: Api) -> None:
    key = {record.case.case_id: record.key for record in filled.store.cases.page()}
    text = body(filled, f"/cases/{key['b_flagged']}")
    assert f'<a href="/cases/{key["c_twice"]}" rel="prev"' in text
    assert f'<a href="/cases/{key["a_plain"]}" rel="next"' in text
    assert "3 of 4, worst first" in words(text)


def test_reliability_is_drawn_where_there_are_labels(api: Api) -> None:
    table = np.zeros((3, 15))
    table[:, 10] = 1000, 700, 600
    reliability = {"before": table.tolist(), "after": (table * [[1], [1], [7 / 6]]).tolist()}
    job = finished_job(api, (looked_at("labelled", reliability=reliability), looked_at("bare")))
    with_label, without = (f"/cases/{record.key}" for record in api.store.cases.of_job(job.id))
    text = words(body(api, with_label))
    assert "before (ECE 10.00 %)" in text
    assert "after (ECE 0.00 %)" in text
    assert "Reliability" not in words(body(api, without))


def test_jobs_are_listed_by_state_with_counts_and_progress(filled: Api) -> None:
    text = body(filled, "/jobs")
    said = words(text)
    for count in ("waiting 1", "running 1", "done 2", "failed 1", "cancelled 1"):
        assert count in said
    assert "layers 3 of 8" in said
    assert re.search(r'<progress max="8" value="3"', text)
    only = words(body(filled, "/jobs?state=failed"))
    assert "all cases failed" in only
    assert "layers 3 of 8" not in only


def test_older_jobs_are_a_link_away(api: Api) -> None:
    ids = [submit(api, f"batch {k}") for k in range(120)][::-1]
    seen: list[str] = []
    path: str | None = "/jobs?state=queued"
    while path:
        text = body(api, path)
        seen += re.findall(r'data-job="([0-9a-f]+)"', text)
        found = re.search(r'<a href="([^"]+)" rel="next"', text)
        path = unescape(found[1]) if found else None
    assert seen == ids


def test_a_job_shows_its_cases_files_and_report(filled: Api) -> None:
    job = filled.store.jobs.page(state="done")[0]
    text = body(filled, f"/jobs/{job.id}")
    assert "Open the report" in text
    assert "Open the QA page" in text
    for name in ("out/map.npz", "qa/qa.csv"):
        assert f'href="/v1/jobs/{job.id}/results/{name}"' in text
    assert "case.npz" not in text  # what was uploaded is nobody's business
    assert "b_flagged" in text


def test_an_evaluation_shows_what_it_measured_and_notes(api: Api) -> None:
    job_id = submit(api)
    claim = api.store.jobs.claim("worker", 60.0)
    assert claim is not None
    pipelines = [{"name": "cms_ap(z)", "nll": 0.0371, "ece": 0.0039, "dsc": 0.85, "flip": 0.0, "ace": None}]
    result = {"pipelines": pipelines, "notes": ["2 cases have no `label`"]}
    assert api.store.jobs.finish(claim, message="measured", result=result)
    text = words(body(api, f"/jobs/{job_id}"))
    assert "cms_ap(z) 0.0371 0.0039 — — 85.00 % 0.00 %" in text
    assert "2 cases have no label" in text


def test_a_job_is_cancelled_from_its_page(filled: Api) -> None:
    job = filled.store.jobs.page(state="queued")[0]
    assert "Cancel this job" in body(filled, f"/jobs/{job.id}")
    answer = filled.client.post(f"/jobs/{job.id}/cancel", headers=OWN_SITE)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job.id}")
    assert filled.store.jobs.get(job.id).state == "cancelled"
    assert "Cancel this job" not in body(filled, f"/jobs/{job.id}")


def test_a_failed_case_is_tried_again_from_its_page_and_from_that_of_its_job(api: Api) -> None:
    request = CaseRequest(calibrator=add_calibrator(api).sha256, case="c1")
    job_id = api.store.jobs.submit(request, batch="out", submitted_by="watch", queue_limit=9).id
    claim = api.store.jobs.claim("worker", 60.0)
    assert claim is not None
    api.store.jobs.fail(claim, "c1.npz is truncated")
    case_page = f"/cases/{api.store.cases.of_job(job_id)[0].key}"
    form = f'<form method="post" action="/jobs/{job_id}/retry"'

    assert form in body(api, case_page)
    assert form in body(api, f"/jobs/{job_id}")
    answer = api.client.post(f"/jobs/{job_id}/retry", headers=OWN_SITE)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job_id}")

    assert api.store.jobs.get(job_id).state == "queued"
    assert form not in body(api, case_page)
    assert "It is being tried again" in words(body(api, case_page))
    assert form not in body(api, f"/jobs/{job_id}")
    refused = api.client.post(f"/jobs/{job_id}/retry", headers=OWN_SITE)
    assert (refused.status_code, "only one that failed" in refused.text) == (409, True)


def test_a_job_that_is_done_or_of_a_reader_is_not_offered_to_be_tried_again(filled: Api, guarded: Api) -> None:
    for record in filled.store.cases.page():
        assert "/retry" not in body(filled, f"/cases/{record.key}")
    job_id = submit(guarded)
    guarded.store.jobs.cancel(job_id)
    assert "/retry" not in guarded.client.get(f"/jobs/{job_id}", headers=guarded.token("read")).text
    assert "/retry" in guarded.client.get(f"/jobs/{job_id}", headers=guarded.token("submit")).text


def test_a_page_of_another_site_cannot_cancel_or_retire(filled: Api) -> None:
    job = filled.store.jobs.page(state="queued")[0]
    sha256 = filled.store.calibrators.list()[0].sha256
    for path in (f"/jobs/{job.id}/cancel", f"/calibrators/{sha256}/retire"):
        answer = filled.client.post(path, headers={"Origin": "http://evil.example"})
        assert answer.status_code == 403
    assert filled.store.jobs.get(job.id).state == "queued"
    assert filled.store.calibrators.get(sha256).retired is None


def test_what_a_token_does_not_allow_is_not_offered_and_refused(guarded: Api) -> None:
    job, sha256 = submit(guarded), add_calibrator(guarded).sha256
    reader, submitter, admin = (guarded.token(scope) for scope in ("read", "submit", "admin"))

    def seen(path: str, headers: dict[str, str]) -> str:
        return guarded.client.get(path, headers=headers).text

    assert "Cancel this job" not in seen(f"/jobs/{job}", reader)
    assert "Cancel this job" in seen(f"/jobs/{job}", submitter)
    assert "Retire" not in seen(f"/calibrators/{sha256}", submitter)
    assert "Retire night shift" in seen(f"/calibrators/{sha256}", admin)
    assert guarded.client.post(f"/jobs/{job}/cancel", headers=reader).status_code == 403
    assert guarded.client.post(f"/calibrators/{sha256}/retire", headers=submitter).status_code == 403
    assert guarded.store.calibrators.get(sha256).retired is None
    assert guarded.client.post(f"/calibrators/{sha256}/retire", headers=admin).status_code == 303
    assert guarded.store.calibrators.get(sha256).retired is not None
    assert "retired" in words(seen(f"/calibrators/{sha256}", admin))


def test_a_calibrator_tells_how_it_was_made_where_it_is_used_and_what_was_measured(filled: Api) -> None:
    record = next(each for each in filled.store.calibrators.list() if each.name == "of spring")
    made = FitRequest(manifest="/data/manifest.yaml", batch="spring fit")
    job = filled.store.jobs.submit(made, batch="spring fit", submitted_by="", queue_limit=1000)
    while (claim := filled.store.jobs.claim("worker", 60.0)) is not None and claim.job.id != job.id:
        pass
    assert claim is not None
    assert filled.store.jobs.finish(
        claim, message="", result={"calibrators": [{"sha256": record.sha256, "method": "ts"}]}
    )
    text = words(body(filled, f"/calibrators/{record.sha256}"))
    assert "method ts" in text
    assert "classes background, anterior, posterior" in text
    assert "keeps the order of all classes" in text
    assert "4 cases so far" in text
    assert "flagged 2 of 3 (67 %)" in text
    assert "ward & <i>7</i>" in text
    assert "fit of calibrators: spring fit" in text


def test_watched_folders_of_a_calibrator_are_named(tmp_path: Path) -> None:
    from segcal.service.settings import WatchSettings

    with running_api(tmp_path / "first") as api:
        record = add_calibrator(api)
        path = api.context.files.calibrator(record.sha256)
        watch = (WatchSettings(Path("/nnunet/out"), record.sha256),)
        with running_api(tmp_path / "second", watch=watch) as other:
            from segcal.service.calibrator_files import import_calibrator

            import_calibrator(path, "watching", other.context.files, other.store)
            assert "Outputs that appear in /nnunet/out get it." in words(body(other, f"/calibrators/{record.sha256}"))


def test_two_calibrators_are_compared_line_by_line(filled: Api) -> None:
    record, other = filled.store.calibrators.list()
    text = body(filled, f"/calibrators/compare?a={record.sha256}&b={other.sha256}")
    rows = re.findall(r'<tr( class="differs")?><th scope="row">([^<]+)', text)
    marked = {name.strip() for differs, name in rows if differs}
    assert {"SHA-256", "flagged", "median expected DSC"} <= marked
    assert not {"method", "classes", "members pooled"} & marked
    body(filled, f"/calibrators/compare?a={record.sha256}&b={'0' * 64}", 404)
    body(filled, "/calibrators/compare?a=nonsense", 422)


def test_two_calibrators_are_compared_on_the_cases_both_had(api: Api) -> None:
    one, other = (add_calibrator(api, t, f"t {t}").sha256 for t in (1.5, 2.0))
    table = np.zeros((3, 15))
    table[:, 10] = 1000, 700, 600
    wrong, right = table.tolist(), (table * [[1], [1], [7 / 6]]).tolist()
    first = (
        looked_at("both", calibrator=one, expected_dsc=0.9, reliability={"before": wrong, "after": right}),
        looked_at("only_first", calibrator=one, expected_dsc=0.1),
    )
    again = looked_at("both", calibrator=other, expected_dsc=0.6, reliability={"before": wrong, "after": wrong})
    finished_job(api, first)
    finished_job(api, (replace(again, expected_dsc=0.2),))
    finished_job(api, (again,))  # the newest of a name counts
    text = words(body(api, f"/calibrators/compare?a={one}&b={other}"))
    shared = text[text.index("On the same cases") : text.index("On the last cases of each")]
    assert "1 case of the same name was calibrated with both." in shared
    assert "median expected DSC 90.0 % 60.0 %" in shared
    assert "10.00 % before, 0.00 % after, over 1 case 10.00 % before, 10.00 % after, over 1 case" in shared


@pytest.mark.parametrize("path", ["/cases/99999", "/jobs/" + "0" * 24, "/calibrators/" + "0" * 64, "/static/none.js"])
def test_what_is_not_there_is_a_page_that_leads_on(api: Api, path: str) -> None:
    text = body(api, path, 404)
    assert "There is no such thing" in text
    assert 'href="/"' in text


@pytest.mark.parametrize(
    "path",
    [
        "/cases/abc",
        "/cases/0",
        "/cases/99999999999999999999",
        "/jobs/x",
        "/cases?sort=up",
        "/cases?start=-1",
        "/cases?day=1",
        "/cases?search=%00",
        "/cases?batch=" + "x" * 201,
        "/?batch=%00",
        "/jobs?state=x",
        "/jobs?batch=%0a",
    ],
)
def test_an_address_that_does_not_fit_is_refused_with_the_reason(api: Api, path: str) -> None:
    assert "The address does not fit" in body(api, path, 422)


def test_static_files_are_answered_once_and_nothing_else_has_an_address(api: Api) -> None:
    answer = api.client.get("/static/viewer.js")
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    again = api.client.get("/static/viewer.js", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/static/%2e%2e/router.py", "/static/../router.py", "/static//etc/passwd", "/static/"):
        status, content = api.raw_get(path)
        assert status == 404
        assert b"APIRouter" not in content


def test_a_static_file_that_changes_is_sent_anew(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "FOLDER", tmp_path)
    (tmp_path / "x.js").write_text("1")
    first = api.client.get("/static/x.js")
    (tmp_path / "x.js").write_text("22")
    assert api.client.get("/static/x.js", headers={"If-None-Match": first.headers["etag"]}).text == "22"


def test_the_volume_viewer_is_offered_only_when_it_was_built_in(
    filled: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "FOLDER", tmp_path)
    key = filled.store.cases.page(search="hippocampus")[0].key
    assert "3-D viewer" not in body(filled, f"/cases/{key}")
    (tmp_path / "niivue").mkdir()
    (tmp_path / "niivue" / "niivue.js").touch()
    text = body(filled, f"/cases/{key}")
    assert "3-D viewer" in text
    assert 'id="slice"' in text  # the slices stay


def test_the_login_page_keeps_where_one_wanted_to_go_and_says_when_a_token_is_wrong(guarded: Api) -> None:
    text = guarded.client.get("/login?next=/cases").text
    assert 'name="next" value="/cases"' in text
    assert "/jobs" not in text  # nothing of the service before signing in
    wrong = guarded.client.post("/login", data={"token": "segcal_x_y", "next": "/cases"}, headers=OWN_SITE)
    assert wrong.status_code == 401
    assert "This token is not valid" in wrong.text
    assert 'value="/cases"' in wrong.text


def test_whoever_signed_in_sees_who_they_are_and_can_sign_out(guarded: Api) -> None:
    _, token = guarded.store.tokens.create("anna", "read", None)
    guarded.client.post("/login", data={"token": token, "next": "/"}, headers=OWN_SITE)
    text = words(guarded.client.get("/").text)
    assert "anna (read)" in text
    assert "Sign out" in text
    guarded.client.post("/logout", headers=OWN_SITE)
    assert guarded.client.get("/", headers={"Accept": "text/html"}).status_code == 303


def test_a_calibrator_that_is_unknown_does_not_break_the_page_of_its_case(api: Api) -> None:
    case = replace(looked_at(), calibrator="b" * 64)
    key = api.store.cases.of_job(finished_job(api, (case,)).id)[0].key
    assert "calibrated with bbbbbbbb" in words(body(api, f"/cases/{key}"))
