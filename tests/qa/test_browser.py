"""The page in a real browser: no errors, sorting, opening a case."""

from __future__ import annotations

from pathlib import Path

import pytest

from segcal.qa import QaSettings, run_qa
from tests.apply_data import rotated, temperature, write_manifest
from tests.qa.batches import blob
from tests.report.browser import Browser, find_programs


@pytest.mark.slow
def test_the_page_sorts_and_opens_cases_without_errors(tmp_path: Path) -> None:
    programs = find_programs()
    if isinstance(programs, str):
        pytest.skip(programs)
    cases = {f"case_{k}": [blob(k, sharp=0.1 * (k + 1), noise=1.0), blob(k + 9)] for k in range(3)}
    manifest = write_manifest(tmp_path, cases, affine=rotated())
    run_qa(manifest, calibrator=temperature(1.0), settings=QaSettings(min_expected_dsc=1.0)).save(tmp_path / "qa")
    with Browser(*programs, profile=tmp_path / "profile") as browser:
        browser.open(tmp_path / "qa" / "qa.html")
        names = "return [...document.querySelectorAll('#cases tbody button.open')].map(b => b.textContent)"
        browser.click(browser.find("#cases thead th:nth-child(1) button"))
        rising = browser.run(names)
        browser.click(browser.find("#cases thead th:nth-child(1) button"))
        assert rising == sorted(cases)
        assert browser.run(names) == rising[::-1]
        shown = "return [...document.querySelectorAll('#cases tr.detail')].filter(r => !r.hidden).length"
        assert browser.run(shown) == 0
        browser.click(browser.find("#cases tbody button.open"))
        assert browser.run(shown) == 1
        decoded = "return [...document.images].every(i => i.alt && i.getAttribute('src').startsWith('data:'))"
        assert browser.run(decoded) is True
        assert not [message for message in browser.console() if message["level"] == "SEVERE"]
