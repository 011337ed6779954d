"""The pages in a real browser, on a running server with real results: what a person does with them works."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from segcal.manifest import Manifest
from segcal.service.files import ServiceFiles
from segcal.service.model import JobProgress, NewCase
from segcal.service.requests import CaseRequest, QaRequest
from segcal.service.settings import Limits
from segcal.service.store import Store
from segcal.service.web.static import has_volume_viewer
from tests.report.browser import Browser, find_programs
from tests.report.test_browser import contrast
from tests.service.page_data import Filled, claim_next, fill, open_data
from tests.service.real_results import hippocampus_results, phantom_results
from tests.service.running import running_service

WAIT_S = 60.0
DOWN, RIGHT, END = "\ue015", "\ue014", "\ue010"
"""Keys, as the WebDriver protocol writes them."""

SLICE = "return document.getElementById('slice').currentSrc"
CASES = "return [...document.querySelectorAll('tbody th[scope=row] a')].map(a => a.textContent)"
COLUMN = "return [...document.querySelectorAll('tbody tr')].map(r => r.cells[arguments[0]].textContent)"
PIXELS = """
const picture = document.querySelector(arguments[0]);
const canvas = document.createElement('canvas');
canvas.width = picture.naturalWidth; canvas.height = picture.naturalHeight;
canvas.getContext('2d').drawImage(picture, 0, 0);
return canvas.toDataURL();
"""


@dataclass(frozen=True)
class Site:
    """A browser at a running service."""

    browser: Browser
    url: str
    filled: Filled
    store: Store

    def go(self, path: str) -> None:
        self.browser.visit(self.url + path)

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.run(script, *arguments)

    def text(self, selector: str = "main") -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def choose(self, selector: str, value: str) -> None:
        """Set a control as a hand would: its value, and the events that follow."""
        script = """
        const field = document.querySelector(arguments[0]);
        field.value = arguments[1];
        for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true }));
        """
        self.run(script, selector, value)

    def submit(self, selector: str) -> None:
        self.browser.click(self.browser.find(selector))

    def wait(self, what: Callable[[], Any], why: str) -> Any:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            try:
                if found := what():
                    return found
            except RuntimeError:
                pass  # the page is just changing
            time.sleep(0.05)
        raise AssertionError(f"not within {WAIT_S:g} s: {why}")

    def key(self, case_id: str) -> int:
        return self.store.cases.page(search=case_id)[0].key

    def errors(self) -> list[str]:
        """What the console says, without the graphics driver's advice about software rendering."""
        told = [message["message"] for message in self.browser.console() if message["level"] in ("SEVERE", "WARNING")]
        return [text for text in told if "GL Driver Message" not in text and "software WebGL" not in text]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    programs = find_programs()
    if isinstance(programs, str):
        pytest.skip(programs)
    folder = tmp_path_factory.mktemp("pages")
    data = folder / "data"
    try:
        results = hippocampus_results(request.getfixturevalue("hippocampus"), data, n_cases=3)
    except pytest.skip.Exception:
        results = phantom_results(folder / "phantom", data, n_cases=3)
    filled = fill(data, results, folder / "calibrators")
    store = open_data(data)
    try:
        with (
            running_service(folder, workers=0) as service,
            Browser(*programs, profile=folder / "profile") as browser,
        ):
            yield Site(browser, service.url, filled, store)
    finally:
        store.close()


@pytest.fixture(autouse=True)
def quiet(site: Site) -> Iterator[None]:
    """Every test ends without an error in the console: of a script, of the policy, of something missing."""
    site.browser.console()
    yield
    site.browser.devtools("Emulation.clearDeviceMetricsOverride")
    site.browser.devtools("Emulation.setEmulatedMedia", media="screen", features=[])
    assert site.errors() == []


def real_case(site: Site) -> int:
    return site.store.cases.of_job(site.filled.job_id)[0].key


def test_the_overview_opens_and_asks_nobody_else(site: Site) -> None:
    site.go("/")
    assert "Look at these first" in site.text()
    assert site.run(CASES)[0] == site.filled.broken
    asked = site.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert asked
    assert all(name.startswith((site.url, "data:")) for name in asked)
    assert site.run("return document.querySelectorAll('.chart .dot').length") > 100
    assert site.run("return document.querySelectorAll('.chart .limit').length") == 8


def test_a_mark_of_the_trend_leads_to_its_case(site: Site) -> None:
    site.go("/")
    site.run("document.querySelector('.chart .dot.above').closest('a').dispatchEvent(new MouseEvent('click'))")
    site.wait(lambda: "/cases/" in site.run("return location.pathname"), "the case opens")
    assert "mean free energy is" in site.text()


def test_the_overview_filters_by_batch(site: Site) -> None:
    site.go("/")
    site.choose("select[name=batch]", "night")
    site.submit(".filters button")
    site.wait(lambda: "batch=night" in site.run("return location.search"), "the form is sent")
    assert site.filled.broken not in site.text()
    batches = "return [...document.querySelectorAll('#days ~ * tbody td:nth-child(2)')].map(e => e.innerText)"
    assert set(site.run(batches)) == {"night"}


def test_a_heading_sorts_the_list_and_turns_it(site: Site) -> None:
    site.go("/cases")
    site.submit("thead th:nth-child(3) a")
    site.wait(lambda: "sort=expected_dsc" in site.run("return location.search"), "the list is sorted")
    rising = [float(text) for text in site.run(COLUMN, 2) if text != "—"]
    assert rising == sorted(rising)
    assert site.run("return document.querySelector('thead th:nth-child(3)').getAttribute('aria-sort')") == "ascending"
    site.submit("thead th:nth-child(3) a")
    site.wait(lambda: "descending" in site.run("return location.search"), "the list is turned")
    falling = [float(text) for text in site.run(COLUMN, 2) if text != "—"]
    assert falling == sorted(falling, reverse=True)


def test_the_list_is_searched_and_filtered(site: Site) -> None:
    site.go("/cases")
    site.browser.press(site.browser.find("input[name=search]"), "night_2_")
    site.choose("select[name=look]", "flagged")
    site.submit(".filters button")
    site.wait(lambda: "search=night_2_" in site.run("return location.search"), "the form is sent")
    names = site.run(CASES)
    assert names
    assert all(name.startswith("night_2_") for name in names)
    assert all(int(text) > 0 for text in site.run(COLUMN, 1))
    site.choose("input[name=search]", "nothing like it")
    site.submit(".filters button")
    site.wait(lambda: "No case fits." in site.text(), "nothing is found")


def test_a_case_shows_slices_that_change_with_layer_plane_slice_window_and_threshold(site: Site) -> None:
    site.go(f"/cases/{real_case(site)}")
    seen = {site.run(PIXELS, "#slice")}

    def changes(selector: str, value: str) -> None:
        site.choose(selector, value)
        site.wait(lambda: site.run(PIXELS, "#slice") not in seen, f"the picture follows {selector}")
        seen.add(site.run(PIXELS, "#slice"))

    for layer in ("image", "p1", "entropy", "disagreement", "label"):
        changes("select[name=layer]", layer)
    changes("select[name=layer]", "p2")
    changes("input[name=threshold]", "0.6")
    changes("input[name=opacity]", "0.3")
    changes("select[name=axis]", "y")
    first = int(site.run("return document.querySelector('input[name=index]').value"))
    changes("input[name=index]", str(first + 2))
    changes("input[name=high]", site.run("return String(document.querySelector('input[name=high]').placeholder / 2)"))
    assert f"coronal slice {first + 3} of" in site.text("#where")
    # What the browser shows is what the server draws, and the address holds the choice.
    address = site.run("return location.pathname + location.search")
    shown = site.run(SLICE)
    site.go(address)
    assert site.run(SLICE) == shown
    assert site.run(PIXELS, "#slice") in seen


def test_the_window_has_to_rise_and_the_page_says_so(site: Site) -> None:
    site.go(f"/cases/{real_case(site)}?layer=image")
    before = site.run(SLICE)
    site.choose("input[name=low]", "1e6")
    assert "has to rise" in site.text("#window-problem")
    assert site.run(SLICE) == before
    site.choose("input[name=low]", "")
    assert site.text("#window-problem") == ""


def test_the_keyboard_goes_through_the_slices(site: Site) -> None:
    site.go(f"/cases/{real_case(site)}")
    first = int(site.run("return document.querySelector('input[name=index]').value"))
    frame = site.browser.find("#frame")
    site.browser.press(frame, RIGHT)
    site.wait(lambda: f"/{first + 1}.png" in site.run(SLICE), "one slice on")
    site.browser.press(frame, DOWN + DOWN)
    site.wait(lambda: f"/{first - 1}.png" in site.run(SLICE), "two slices back")
    site.browser.press(site.browser.find("input[name=index]"), END)
    last = int(site.run("return document.querySelector('input[name=index]').max"))
    site.wait(lambda: f"/{last}.png" in site.run(SLICE), "the last slice")
    site.browser.press(frame, RIGHT)
    assert int(site.run("return document.querySelector('input[name=index]').value")) == last


def test_a_thumbnail_chooses_its_layer(site: Site) -> None:
    site.go(f"/cases/{real_case(site)}")
    site.submit(".thumbnails a[data-layer=entropy]")
    site.wait(lambda: "/slices/entropy/" in site.run(SLICE), "the layer is shown")
    assert site.run("return document.querySelector('.thumbnails [aria-current]').dataset.layer") == "entropy"
    assert site.run("return document.querySelector('select[name=layer]').value") == "entropy"
    assert site.run("return !document.getElementById('legend-share').hidden")


def test_without_a_script_the_form_and_the_links_show_the_same(site: Site) -> None:
    key = real_case(site)
    site.browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        site.go(f"/cases/{key}?layer=p1")
        site.submit("#slice-after")
        site.wait(lambda: "index=" in site.run("return location.search"), "the next slice")
        first = site.run(SLICE)
        site.choose("select[name=layer]", "entropy")
        site.submit("#show")
        site.wait(lambda: "layer=entropy" in site.run("return location.search"), "the form is sent")
        assert site.run(SLICE) == first.replace("/p1/", "/entropy/")
    finally:
        site.browser.devtools("Emulation.setScriptExecutionDisabled", value=False)


def test_the_next_case_of_the_batch_is_a_link_away(site: Site) -> None:
    keys = [record.key for record in site.store.cases.page(batch=site.store.cases.get(real_case(site)).batch)]
    site.go(f"/cases/{keys[0]}")
    site.submit("a[rel=next]")
    site.wait(lambda: site.run("return location.pathname") == f"/cases/{keys[1]}", "the next case opens")


def test_a_running_job_is_followed_to_its_end(site: Site) -> None:
    """The test is the worker: every step it tells the store of shows on the page, without a reload."""
    request = QaRequest(calibrator=site.filled.calibrator.sha256, manifest="/data/manifest.yaml")
    job = site.store.jobs.submit(request, batch="followed", submitted_by="anna", queue_limit=100)
    site.go(f"/jobs/{job.id}")
    site.run("window.sameDocument = true")
    assert "waiting" in site.text("#live")
    claim = claim_next(site.store)
    for done in (1, 4, 8):
        site.store.jobs.renew(claim, 600.0, JobProgress("cases", done, 8))
        site.wait(lambda done=done: f"cases {done} of 8" in site.text("#live"), f"step {done}")
        assert site.run("return document.querySelector('#live progress').value") == done
    assert site.run("return window.sameDocument") is True
    found = NewCase("followed_case", "ok", site.filled.calibrator.sha256, expected_dsc=0.9)
    assert site.store.jobs.finish(claim, message="1 case looked at", result={}, cases=[found])
    site.wait(lambda: site.run(CASES) == ["followed_case"], "the case is listed")
    assert "1 case looked at" in site.text("#live")
    assert site.run("return document.getElementById('job').dataset.state") == "done"


@pytest.mark.slow
def test_a_job_is_followed_also_when_no_more_event_streams_are_given(site: Site) -> None:
    request = QaRequest(calibrator=site.filled.calibrator.sha256, manifest="/data/manifest.yaml")
    job = site.store.jobs.submit(request, batch="crowded", submitted_by="anna", queue_limit=100)
    with ExitStack() as crowd:
        client = crowd.enter_context(httpx.Client(base_url=site.url, limits=httpx.Limits(max_connections=200)))
        for _ in range(Limits().event_streams):
            crowd.enter_context(client.stream("GET", f"/v1/jobs/{job.id}/events"))
        site.go(f"/jobs/{job.id}")
        claim = claim_next(site.store)
        site.store.jobs.renew(claim, 600.0, JobProgress("cases", 2, 3))
        site.wait(lambda: "cases 2 of 3" in site.text("#live"), "the page asks by itself")
        site.store.jobs.fail(claim, "the crowd was too large")
        site.wait(lambda: site.run("return document.getElementById('cancel') === null"), "the page is asked for anew")
        assert "the crowd was too large" in site.text("#live")
    refused = [text for text in site.errors() if "429" not in text]
    assert refused == []


@pytest.mark.slow
def test_a_submitted_job_is_followed_from_the_first_page_to_the_slices_of_its_case(
    site: Site, tmp_path: Path, hippocampus: Path
) -> None:
    """All of it real: the examples of the empty page, a worker process, its progress, its results."""
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    calibrator = ServiceFiles(site.filled.data).calibrator(site.filled.other.sha256)
    with (
        running_service(tmp_path, "--root", str(hippocampus)) as service,
        httpx.Client(base_url=service.url, timeout=60.0) as client,
    ):
        visitor = replace(site, url=service.url)
        visitor.go("/")
        assert f"'{service.url}/v1/calibrators?name=cms_ap'" in visitor.text()
        binary = {"Content-Type": "application/octet-stream"}
        answer = client.post("/v1/calibrators?name=cms_ap", content=calibrator.read_bytes(), headers=binary)
        assert answer.status_code == 201, answer.text
        request = {
            "kind": "apply",
            "calibrator": answer.json()["sha256"],
            "manifest": str(manifest.path),
            "cases": list(manifest.split_ids(0).test[:3]),
        }
        job = client.post("/v1/jobs", json=request).json()
        visitor.go(f"/jobs/{job['id']}")
        names = visitor.wait(lambda: visitor.run(CASES), "the cases are listed")
        assert sorted(names) == sorted(request["cases"])
        assert "done" in visitor.text("#live")
        visitor.submit("tbody th a")
        visitor.wait(lambda: visitor.run("return document.getElementById('slice').naturalWidth"), "its slice is drawn")
        assert "Reliability, from the label" in visitor.text()
        site.go("/")  # what this page still asks for would be refused once its server is gone


def test_the_list_of_jobs_keeps_itself_current(site: Site) -> None:
    request = QaRequest(calibrator=site.filled.calibrator.sha256, manifest="/data/manifest.yaml")
    job = site.store.jobs.submit(request, batch="listed", submitted_by="anna", queue_limit=100)
    site.go("/jobs")
    row = f"tr[data-job='{job.id}']"
    assert "waiting" in site.text(row)
    claim = claim_next(site.store)
    site.store.jobs.renew(claim, 600.0, JobProgress("cases", 2, 9))
    site.wait(lambda: "cases 2 of 9" in site.text(row), "progress in the list")
    assert site.text("[data-count=running]") == "1"
    site.store.jobs.fail(claim, "its manifest is gone")
    site.wait(lambda: "its manifest is gone" in site.text(row), "the end in the list")


def test_a_job_is_cancelled_with_the_button(site: Site) -> None:
    request = QaRequest(calibrator=site.filled.calibrator.sha256, manifest="/data/manifest.yaml")
    job = site.store.jobs.submit(request, batch="unwanted", submitted_by="anna", queue_limit=100)
    site.go(f"/jobs/{job.id}")
    site.submit("#cancel button")
    site.wait(lambda: "cancelled" in site.text("#live"), "the job is cancelled")
    assert site.store.jobs.get(job.id).state == "cancelled"


def test_two_calibrators_are_compared(site: Site) -> None:
    site.go("/calibrators")
    site.submit("#compare ~ form button")
    site.wait(lambda: "side by side" in site.text(), "the comparison opens")
    differing = site.run("return [...document.querySelectorAll('tr.differs th')].map(e => e.innerText.split(' ')[0])")
    assert "SHA-256" in differing
    assert "method" not in differing


def test_a_calibrator_is_retired_after_a_second_look(site: Site) -> None:
    sha256 = site.filled.calibrator.sha256
    site.go(f"/calibrators/{sha256}")
    site.submit("#retire ~ details summary")
    site.submit("#retire ~ details button")
    site.wait(lambda: "retired" in site.text(".lead"), "it is retired")
    assert site.store.calibrators.get(sha256).retired is not None


def test_a_job_that_failed_is_tried_again_and_followed_to_its_end(site: Site) -> None:
    calibrator = replace(site.filled.calibrator, sha256="b" * 64, name="of autumn")  # the other one may be retired
    site.store.calibrators.add(calibrator)
    request = CaseRequest(calibrator=calibrator.sha256, case="tried_twice")
    job = site.store.jobs.submit(request, batch="night", submitted_by="watch", queue_limit=100)
    site.store.jobs.fail(claim_next(site.store), "tried_twice: its npz is truncated; export it again")
    site.go(f"/cases/{site.key('tried_twice')}")

    site.submit(".retry button")
    site.wait(lambda: site.run("return location.pathname") == f"/jobs/{job.id}", "the job's page")
    assert "waiting" in site.text("#live")
    again = NewCase("tried_twice", "ok", calibrator.sha256, expected_dsc=0.9)
    site.store.jobs.finish(claim_next(site.store), message="1 case calibrated", result={}, cases=[again])
    site.wait(lambda: "1 case calibrated" in site.text("#live"), "the end of the job")
    assert site.run("return document.querySelector('.retry')") is None


@pytest.mark.slow
def test_signing_in_and_out_with_a_token(site: Site, tmp_path: Path) -> None:
    """On a server that asks for tokens; the cookie then also cancels a job, which forged forms of others cannot."""
    with running_service(tmp_path, "--require-tokens", workers=0) as guarded:
        store = open_data(guarded.data)
        try:
            _, token = store.tokens.create("anna", "submit", None)
            request = QaRequest(calibrator="a" * 64, manifest="/data/manifest.yaml")
            job = store.jobs.submit(request, batch="night", submitted_by="anna", queue_limit=100)
            visitor = replace(site, url=guarded.url, store=store)
            visitor.go(f"/jobs/{job.id}")
            assert visitor.run("return location.pathname") == "/login"
            visitor.browser.press(visitor.browser.find("input[name=token]"), token)
            visitor.submit(".login button")
            visitor.wait(lambda: "anna (submit)" in visitor.text("header"), "signed in")
            assert visitor.run("return location.pathname") == f"/jobs/{job.id}"
            assert visitor.run("return document.cookie") == ""  # no script can read it
            visitor.submit("#cancel button")
            visitor.wait(lambda: "cancelled" in visitor.text("#live"), "the job is cancelled")
            visitor.submit(".who button")
            visitor.wait(lambda: visitor.run("return location.pathname") == "/login", "signed out")
            visitor.go("/cases")
            assert visitor.run("return location.pathname") == "/login"
        finally:
            store.close()


PATHS = ("/", "/cases", "/jobs", "/calibrators", "/case", "/broken", "/job")


def at(site: Site, path: str) -> str:
    others = {"/broken": f"/cases/{site.key(site.filled.broken)}", "/job": f"/jobs/{site.filled.failed_id}"}
    return {"/case": f"/cases/{real_case(site)}", **others}.get(path, path)


@pytest.mark.parametrize("path", PATHS)
def test_pages_fit_the_window_and_text_stands_out_in_both_modes(site: Site, path: str) -> None:
    background = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        site.browser.devtools("Emulation.setEmulatedMedia", media="screen", features=features)
        for width in (400, 1024, 1280):
            site.browser.devtools(
                "Emulation.setDeviceMetricsOverride", width=width, height=820, deviceScaleFactor=1, mobile=False
            )
            site.go(at(site, path))
            assert site.run("return document.documentElement.scrollWidth") <= width
        for selector in ("body", "footer", "main a", "header a", ".soft"):
            if site.run("return document.querySelector(arguments[0]) !== null", selector):
                assert contrast(site.browser, selector) >= 4.5, (scheme, selector)
        background[scheme] = site.run("return getComputedStyle(document.body).backgroundColor")
    assert background["light"] != background["dark"]


def test_tab_makes_the_way_to_the_content_visible_and_focus_shows(site: Site) -> None:
    site.go("/cases")
    site.browser.devtools("Page.bringToFront")  # a key pressed before the page has the focus is lost
    site.wait(lambda: site.run("return document.hasFocus()"), "the page has the focus")
    site.browser.press_key("Tab")
    site.wait(lambda: site.run("return document.activeElement.className") == "skip", "the way past the menu")
    assert site.run("return document.activeElement.getBoundingClientRect().left") >= 0
    site.browser.press_key("Enter")
    site.wait(lambda: site.run("return document.activeElement.id") == "main", "the content has the focus")
    site.browser.press_key("Tab")
    assert site.run("return document.activeElement.name") == "search"
    outline = "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, parseFloat(s.outlineWidth)]"
    style, width = site.run(outline)
    assert style == "solid"
    assert width >= 2


@pytest.mark.parametrize("path", PATHS)
def test_every_control_has_a_name_and_the_first_tab_skips_to_the_content(site: Site, path: str) -> None:
    site.go(at(site, path))
    unnamed = """
    return [...document.querySelectorAll('input:not([type=hidden]), select, button, a[href], progress, [role=img]')]
      .filter(e => !(e.innerText || e.textContent || '').trim() && !(e.labels && e.labels.length)
        && !e.getAttribute('aria-label') && !e.querySelector('title') && !e.hidden)
      .map(e => e.outerHTML.slice(0, 100))
    """
    assert site.run(unnamed) == []
    first = "return document.querySelector('a, button, input, select').getAttribute('href')"
    assert site.run(first) == "#main"
    assert site.run("return document.querySelectorAll('h1').length") == 1


@pytest.mark.slow
@pytest.mark.skipif(not has_volume_viewer(), reason="NiiVue is not built in; `make viewer` does it")
def test_the_volume_viewer_shows_layers_under_the_same_policy(site: Site) -> None:
    site.go(f"/cases/{real_case(site)}?layer=p1")
    site.submit("#volume")
    told = site.wait(lambda: site.text("#volume-words"), "NiiVue shows or says why not")
    if "webgl" in told.lower():
        pytest.skip(told)
    assert "probability of" in told

    def drawn() -> bytes:
        place = site.run("const r = document.getElementById('volume-canvas').getBoundingClientRect();"
                         "return [r.x + scrollX, r.y + scrollY, r.width, r.height]")  # fmt: skip
        clip = dict(zip(("x", "y", "width", "height"), place, strict=True), scale=1)
        shot = site.browser.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    first = drawn()
    assert len(first) > 20_000  # an even black canvas takes a few hundred bytes
    site.choose("select[name=layer]", "segmentation")
    site.wait(lambda: site.text("#volume-words").startswith("segmentation"), "the other layer")
    assert drawn() != first
    assert site.run("return document.getElementById('slice').naturalWidth") > 0
