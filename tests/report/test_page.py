"""The report: complete, self-contained, escaped, the same bytes every time, small enough to send."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from segcal.errors import FileFormatError, MissingFileError, UsageError
from segcal.evaluation.pictures import CasePicture
from segcal.evaluation.records import Records
from segcal.report.case_list import case_list
from segcal.report.case_pictures import PICTURES_BYTES, SMALL_DPI, case_picture
from segcal.report.charts import Diagrams, stated_confidence
from segcal.report.page import evaluation_page, report_page, write_report
from segcal.report.provenance import pipeline_words
from segcal.report.render import code
from segcal.report.results import Results, load_results
from segcal.report.roles import assign_roles
from segcal.report.wording import listing, number, share, signed
from segcal_cli.main import app
from tests.apply_data import random_logits, rotated, temperature, write_manifest
from tests.report.results_data import GOOD, PLAIN, Fake, make_picture, make_results

TS = Fake("ts(z)", shift=GOOD, spread=0.02, gap=0.02)
NASTY = "<script>alert('x')</script>"
VOID = {"meta", "link", "img", "input", "br", "path"}
LIMIT_BYTES = 15_000_000


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order; keeps elements with their attributes and all text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def segcal(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("results")
    return make_results(folder, [PLAIN, TS], n_cases=8, groups=["site_a", "site_b"], n_pictures=2)


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    return evaluation_page(results)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture
def no_diagrams(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of other parts: drawing takes most of the time of a page."""
    monkeypatch.setattr("segcal.report.page.reliability_diagrams", lambda *_: Diagrams((), (), (), ()))


def test_all_parts_are_there(page: Page) -> None:
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    sections = {"verdict", "warnings", "run", "results", "differences", "reliability", "groups", "case-list"}
    assert sections | {"definitions", "reproduce", "cases"} <= ids
    for words in ("phantom", "ab" * 32, "improvement shown", "few test cases", "site_b", "tumour"):
        assert words in page.text
    assert "segcal evaluate MANIFEST --calibrator CALIBRATOR --replicates 200 --seed 0 --out RESULTS" in page.text


def test_the_numbers_of_the_table_are_those_of_the_summary(page: Page, results: Results) -> None:
    for pipeline in results.summary["pipelines"]:
        for column in ("nll", "ece", "ba_ece"):
            values = pipeline["metrics"][column]
            for ends in (values, values["by_subject"]):
                assert f"{ends['low']:.4f} to {ends['high']:.4f}" in page.text
            assert f"{values['mean']:.4f}" in page.text


def test_the_page_names_the_files_it_shows(page: Page, results: Results) -> None:
    for name in ("summary.json", "cases.csv", "bins.npz"):
        assert hashlib.sha256((results.folder / name).read_bytes()).hexdigest() in page.text


def test_nothing_comes_from_elsewhere(text: str, page: Page) -> None:
    assert not re.search(r"https?://", text)
    for _, attributes in page.elements:
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("data:", "#"))
    assert "@import" not in text
    assert "url(" not in text


def test_the_policy_allows_exactly_the_script_of_the_page(text: str, page: Page) -> None:
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]


def test_pictures_have_words_and_sizes(page: Page) -> None:
    pictures = page.all("img")
    assert len(pictures) == 1 + 4 + 3 + 2  # all voxels, bands, classes, cases
    for picture in pictures:
        assert len(picture["alt"]) > 40
        assert int(picture["width"]) > 100
        assert int(picture["height"]) > 100
    assert sum("slice 4 of 9" in picture["alt"] for picture in pictures) == 2


def test_ids_are_unique_and_references_exist(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("aria-controls", "aria-labelledby"):
            if name in attributes:
                assert attributes[name] in ids
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids


def test_headings_of_tables_say_what_they_head(page: Page) -> None:
    assert all(attributes.get("scope") for attributes in page.all("th"))


def test_cases_are_listed_worst_first_and_those_without_a_number_last(tmp_path: Path) -> None:
    results = make_results(tmp_path, [PLAIN, TS], n_cases=7, undefined=["case_003"])
    found = case_list(results.records, results.summary, assign_roles(results.summary))
    values = [line.cells[found.sorted_by].value for line in found.lines]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=True)
    assert found.lines[-1].case == "case_003"
    assert found.columns[found.sorted_by].title == "NLL after"
    assert [column.first for column in found.columns[:3]] == ["ascending", "ascending", "descending"]


def test_numbers_of_a_case_in_several_repeats_are_means(tmp_path: Path) -> None:
    results = make_results(tmp_path, [PLAIN, TS], n_cases=2, n_repeats=2)
    for row in results.records.rows:
        row.values["nll"] += 0.5 * row.repeat  # type: ignore[index]
    found = case_list(results.records, results.summary, assign_roles(results.summary))
    (line,) = [line for line in found.lines if line.case == "case_001"]
    alone = [r.values["nll"] for r in results.records.rows if (r.case, r.pipeline) == ("case_001", "ts(z)")]
    assert line.cells[found.sorted_by].value == pytest.approx(sum(alone) / 2)
    assert "tested in repeat 1, 2" in line.facts[0]


def test_only_a_subject_that_was_named_is_shown_with_its_case(tmp_path: Path) -> None:
    results = make_results(tmp_path, [PLAIN, TS], n_cases=2)
    rows = [replace(row, subject="subject:anna:2") if row.case == "case_001" else row for row in results.records.rows]
    found = case_list(Records(tuple(rows)), results.summary, assign_roles(results.summary))
    assert {line.case: line.facts for line in found.lines} == {"case_000": (), "case_001": ("subject anna:2",)}


def test_what_users_name_is_escaped_everywhere(tmp_path: Path) -> None:
    names = ("background", NASTY, 'a"b&c $\\frac{$ _x')
    bad = Fake(NASTY, shift=GOOD, gap=0.02, warnings=(f"class `{NASTY}` is starved",))
    results = make_results(
        tmp_path,
        [PLAIN, bad],
        classes=names,
        names=["<b>case</b>", "c'2\"", "c3"],
        groups=["<i>g</i>"],
        n_pictures=1,
        context={
            "manifest": {"name": NASTY, "sha256": NASTY, "kind": "logits"},
            "failed": {NASTY: NASTY},
            "warnings": [NASTY],
        },
    )
    text = evaluation_page(results)
    page = Page(text)
    assert len(page.all("script")) == 1
    assert NASTY not in text
    assert not page.all("b")
    assert not page.all("i")
    assert NASTY in page.text  # shown as written
    assert any(a.get("data-value") == "c'2\"" for a in page.all("th"))


def test_same_content_same_bytes_whatever_the_folder_is_called(results: Results, text: str, tmp_path: Path) -> None:
    assert report_page(Path(shutil.copytree(results.folder, tmp_path / "elsewhere"))) == text
    assert not re.search(r"\b20[2-9]\d-\d\d-\d\d\b", Page(text).text)  # no date


@pytest.mark.slow
def test_same_bytes_from_another_process(results: Results, text: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = "import sys; from pathlib import Path; from segcal.report.page import write_report; "
    script += "write_report(Path(sys.argv[1]), Path(sys.argv[2]))"
    out = tmp_path / "other.html"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", script, results.folder, out], check=True, cwd=root, env=environment)
    assert out.read_text(encoding="utf-8") == text


def test_a_hundred_cases_stay_below_fifteen_megabytes(tmp_path: Path, no_diagrams: None) -> None:
    """No picture is larger than its share, however noisy; the rest of the page is small."""
    results = make_results(tmp_path, [PLAIN, TS], n_cases=100)
    without = len(evaluation_page(results, max_pictures=0).encode())
    roles = assign_roles(results.summary)
    share = PICTURES_BYTES // 100
    worst = make_picture(0, size=240, flips=True)  # noise everywhere, as no scanner makes it
    heaviest = case_picture("c", worst, results.summary, roles, dpi=SMALL_DPI, max_bytes=share)
    assert 0.5 * 4 / 3 * share < len(heaviest.uri) <= 4 / 3 * share + 100
    assert without < 1_000_000
    assert without + 100 * len(heaviest.uri) < 0.97 * LIMIT_BYTES  # the diagrams take the rest


def test_diagrams_are_small(text: str, results: Results) -> None:
    sizes = [len(uri) for uri in re.findall(r"data:image/png;base64,[^\"]+", text)]
    assert len(sizes) == 8
    assert max(sizes) < 60_000


def test_only_the_worst_cases_carry_a_picture_when_asked(results: Results, no_diagrams: None) -> None:
    page = Page(evaluation_page(results, max_pictures=0))
    assert not [a for a in page.all("img") if "slice 4 of 9" in a["alt"]]
    assert "No picture of this case" in page.text


def test_a_broken_picture_is_told_and_spoils_nothing(tmp_path: Path, no_diagrams: None) -> None:
    results = make_results(tmp_path, [PLAIN], n_cases=2, n_pictures=2)
    (tmp_path / "pictures" / "case_001.npz").write_bytes(b"PK\x03\x04 nonsense")
    page = Page(evaluation_page(results))
    assert "The picture cannot be shown" in page.text
    assert sum("slice 4 of 9" in a["alt"] for a in page.all("img")) == 1


def test_a_case_id_cannot_reach_files_outside_the_folder(tmp_path: Path) -> None:
    results = make_results(tmp_path / "inner", [PLAIN], n_cases=1, n_pictures=1)
    (tmp_path / "case.npz").write_bytes((tmp_path / "inner" / "pictures" / "case_000.npz").read_bytes())
    assert isinstance(results.picture("case_000"), CasePicture)
    assert results.picture("../../case") is None


def test_a_study_shows_sensitivities_and_every_pipeline(tmp_path: Path) -> None:
    fakes = [
        PLAIN,
        TS,
        Fake("ets(z)", "ets", shift=GOOD),
        Fake("ms(z)", "ms", shift={"nll": -0.03}, flip=0.01),
        Fake("dc(z)", "dc", flip=0.01),
        Fake("ts(z) M=3", n_members=3),
        Fake("ts(z) n=10"),
    ]
    bins = {b: {f.name: {"ece": 0.01, "ace": 0.02} for f in fakes} for b in ("15", "50")}
    context = {"bins": bins, "study": {"repeats": 2, "seed": 5}, "pictured": "ts(z)"}
    results = make_results(tmp_path, fakes, n_cases=6, n_repeats=2, context=context)
    roles = assign_roles(results.summary)
    assert roles.shown == ("ts(z)", "ets(z)", "ms(z)")  # pictured, lowest NLL that keeps labels, lowest NLL
    assert [p["name"] for p in roles.variants] == ["ts(z) M=3", "ts(z) n=10"]
    page = Page(evaluation_page(results, max_pictures=0))
    for words in ("Number of ensemble members", "Number of calibration cases", "ECE by number of bins", "15 bins"):
        assert words in page.text
    assert "Every calibrated pipeline by itself (4)" in page.text
    assert "seed: 5" in page.text
    assert "segcal study MANIFEST --config study.yaml --out RESULTS" in page.text


def test_the_single_member_is_not_called_an_ensemble() -> None:
    single, ensemble = pipeline_words([{"name": "p0", "n_members": 1}, {"name": "uncalibrated(z)", "n_members": None}])
    assert (single.words, ensemble.words) == ("none: the member as it is", "none: the ensemble as it is")


def test_regions_have_their_own_diagrams(tmp_path: Path) -> None:
    results = make_results(tmp_path, [PLAIN, TS], n_cases=6, classes=("whole", "core"), regions=True, n_pictures=1)
    page = Page(evaluation_page(results))
    assert {"whole", "core"} <= {a["alt"].split(":")[0].removeprefix("Reliability diagram, ") for a in page.all("img")}


def test_stated_confidence_gives_the_accuracy_of_each_tenth(results: Results) -> None:
    rows = stated_confidence(results.records, results.summary, ["uncalibrated(z)"])
    assert [round(row.low, 1) for row in rows] == [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    voxels, right = rows[3].cells[0]
    assert voxels == pytest.approx(1 / 6)
    assert right == pytest.approx(0.75 - PLAIN.gap, abs=1e-3)


def test_an_apply_folder_gets_a_short_page(tmp_path: Path) -> None:
    cases = {"a": [random_logits(0)], "b": [random_logits(1)]}
    write_manifest(tmp_path, cases, affine=rotated())
    temperature(2.0).save(tmp_path / "ts.safetensors")
    (tmp_path / "member_0" / "b.npz").write_bytes(b"not a zip")
    out = tmp_path / "out"
    command = ("apply", tmp_path / "ts.safetensors", tmp_path / "manifest.yaml", "--out", out, "--keep-going")
    assert segcal(*command, "--device", "cpu").exit_code == 1
    page = Page(report_page(out))
    assert "1 case was written completely." in page.text
    assert "1 case failed and has no result" in page.text
    assert "b.npz" in page.text
    assert f"segcal qa {out} --out qa" in page.text
    assert "ts: softmax(z / T)" in page.text


def test_a_folder_without_results_is_named_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"no results in this folder\. Expected summary\.json .* or run\.json"):
        report_page(tmp_path)
    with pytest.raises(MissingFileError, match="not a folder"):
        report_page(tmp_path / "nowhere")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    make_results(tmp_path, [PLAIN, TS], n_cases=2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary["pipelines"].pop()
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(FileFormatError, match=r"do not name the same pipelines \(ts\(z\)\)"):
        load_results(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(FileFormatError, match="no `pipelines` in it"):
        load_results(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(FileFormatError, match="not JSON"):
        load_results(tmp_path)
    (tmp_path / "bins.npz").unlink()
    (tmp_path / "summary.json").write_text(json.dumps({**summary}))
    with pytest.raises(MissingFileError, match=r"bins\.npz: not there"):
        load_results(tmp_path)


def test_the_command_writes_the_page_into_the_folder_and_says_where(tmp_path: Path, no_diagrams: None) -> None:
    make_results(tmp_path, [PLAIN], n_cases=2)
    done = segcal("report", tmp_path, "--pictures", 0, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert Path(said["page"]) == tmp_path / "report.html"
    assert said["bytes"] == (tmp_path / "report.html").stat().st_size
    missing = segcal("report", tmp_path / "nowhere")
    assert missing.exit_code == 1
    assert "Expected summary.json" in missing.stderr


def test_out_must_name_a_file(tmp_path: Path) -> None:
    make_results(tmp_path, [PLAIN], n_cases=2)
    with pytest.raises(UsageError, match="is a folder"):
        write_report(tmp_path, tmp_path, max_pictures=0)


def test_words_and_numbers() -> None:
    assert listing(["a"]) == "a"
    assert listing(["a", "b", "c"]) == "a, b and c"
    assert (number(0.5, "nll"), number(0.5, "dsc"), number(None, "nll"), number(np.nan, "ece")) == (
        "0.5000",
        "50.00 %",
        "—",
        "—",
    )
    assert (signed(-0.001, "nll"), signed(0.01, "dsc"), signed(0.0, "nll"), signed(-1e-9, "nll")) == (
        "−0.0010",
        "+1.00",
        "0.0000",
        "0.0000",
    )
    assert (share(0.0), share(1.0), share(0.25), share(0.000021)) == ("0 %", "100 %", "25.0 %", "0.0021 %")
    assert code("use `a<b` & c") == "use <code>a&lt;b</code> &amp; c"
