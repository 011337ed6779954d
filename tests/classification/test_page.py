"""The report page of rows: made from its folder, the words claim what the numbers show, works in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from segcal.classification import apply, evaluate, fit_methods
from segcal.errors import FileFormatError, MissingFileError, UsageError
from segcal.evaluation.summary import BootstrapSettings
from segcal.report.page import report_page
from tests.classification.files_data import drawn, saved, with_foreign
from tests.report.browser import Browser, find_programs

QUICK = BootstrapSettings(n_replicates=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods on an over-confident classifier with foreign rows; a class has a name that must be escaped."""
    out = tmp_path_factory.mktemp("rows")
    names = ["cat", "<b>dog</b>", "$x_1$", "d"]
    fitted = fit_methods(drawn(0, 1500), ["ts", "ets", "vs", "platt", "histogram"], classes=names)
    evaluate(saved(out / "test.npz", with_foreign(drawn(1, 1500), 100)), fitted, bootstrap=QUICK).save(out / "results")
    return out / "results"


def test_the_page_tells_improvement_methods_classes_and_foreign_rows(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert report_page(folder) == page
    assert "improvement shown" in page
    assert "It keeps the prediction of every row." in page
    assert "100 out-of-distribution rows" in page
    assert "ood_auroc" in page
    assert "<b>dog</b>" not in page
    assert "&lt;b&gt;dog&lt;/b&gt;" in page
    assert page.count("data:image/png") >= 1 + 4  # all rows, and each of the four classes
    assert "voxel" not in page
    summary = json.loads((folder / "summary.json").read_text())
    for pipeline in summary["pipelines"]:
        assert f"<code>{pipeline['name']}</code>" in page
        assert f"{pipeline['metrics']['nll']['mean']:.4f}" in page


def test_a_calibrated_classifier_is_not_called_improved(tmp_path: Path) -> None:
    fitted = fit_methods(drawn(2, 20_000, temperature=1.0), ["ts"])
    evaluate(drawn(3, 400, temperature=1.0), fitted, bootstrap=QUICK).save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "improvement shown" not in page
    assert "cannot be told from noise" in page


def test_a_worse_calibrator_is_called_worse(tmp_path: Path) -> None:
    """Fitted on a classifier that is too sharp, applied to one that is not."""
    fitted = fit_methods(drawn(4, 2000, temperature=4.0), ["ts"])
    evaluate(drawn(5, 2000, temperature=1.0), fitted, bootstrap=QUICK).save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "are worse in negative log-likelihood" in page


def test_without_a_calibrator_the_page_describes_the_scores(tmp_path: Path) -> None:
    evaluate(drawn(6, 50), bootstrap=QUICK).save(tmp_path)
    assert "No calibrator was evaluated" in (tmp_path / "report.html").read_text()


def test_a_folder_that_lost_or_mixed_its_files_is_refused(tmp_path: Path) -> None:
    evaluate(drawn(7, 50), bootstrap=QUICK).save(tmp_path / "a", page=False)
    evaluate(drawn(8, 50, 3), bootstrap=QUICK).save(tmp_path / "b", page=False)
    (tmp_path / "a" / "bins.npz").write_bytes((tmp_path / "b" / "bins.npz").read_bytes())
    with pytest.raises(FileFormatError, match="not of the run"):
        report_page(tmp_path / "a")
    (tmp_path / "a" / "bins.npz").unlink()
    with pytest.raises(MissingFileError, match=r"bins\.npz"):
        report_page(tmp_path / "a")


def test_a_folder_of_applied_rows_is_named_as_one_with_the_way_to_a_page(tmp_path: Path) -> None:
    apply(fit_methods(drawn(7, 50), ["ts"])["ts"], drawn(8, 50), tmp_path)
    with pytest.raises(UsageError, match=r"written by `segcal classify apply`.* `segcal classify evaluate CALIBRATOR"):
        report_page(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(FileFormatError, match="not the record of a `segcal apply` run"):
        report_page(tmp_path)


def test_a_thousand_classes_make_a_page_of_readable_size(tmp_path: Path) -> None:
    arrays = drawn(9, 300, 1000)
    evaluate(arrays, bootstrap=BootstrapSettings(n_replicates=20)).save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "the 30 of 1000 classes" in page
    assert len(page) < 2_000_000
    assert len((tmp_path / "classes.csv").read_text().splitlines()) == 1001
    assert np.isfinite(json.loads((tmp_path / "summary.json").read_text())["pipelines"][0]["metrics"]["nll"]["low"])


@pytest.mark.slow
def test_a_browser_shows_it_without_errors_and_without_a_request(folder: Path, tmp_path: Path) -> None:
    programs = find_programs()
    if isinstance(programs, str):
        pytest.skip(programs)
    with Browser(*programs, profile=tmp_path / "profile") as browser:
        browser.open(folder / "report.html")
        assert not [message for message in browser.console() if message["level"] == "SEVERE"]
        asked = "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
        assert browser.run(asked) == []
        decoded = "return [...document.images].every(i => i.alt && i.complete && i.naturalWidth > 0)"
        assert browser.run(decoded) is True
        assert browser.run("return document.querySelectorAll('#result-table tbody tr').length") == 6
        assert browser.run("return document.querySelectorAll('#class-table tbody tr').length") == 4
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth") is True
        targets = "return [...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))"
        assert browser.run(targets) is True
