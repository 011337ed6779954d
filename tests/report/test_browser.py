"""The report in a real browser: no error in the console, sorting by mouse and keyboard, opening a case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from segcal.report.page import write_report
from tests.report.browser import Browser, find_programs
from tests.report.results_data import GOOD, PLAIN, Fake, make_results

SPACE = " "
VALUES = """
const column = arguments[0];
return Array.from(document.querySelectorAll('#cases > tbody')).map(e => e.rows[0].cells[column].dataset.value)
"""
SORTED = "return Array.from(document.querySelectorAll('#cases thead th')).map(e => e.getAttribute('aria-sort'))"
NLL_AFTER = 4


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = find_programs()
    if isinstance(found, str):
        pytest.skip(found)
    try:
        started = Browser(*found, profile=tmp_path_factory.mktemp("profile"))
    except (OSError, RuntimeError) as error:
        pytest.skip(f"chromium does not start here: {error}")
    with started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight cases of two groups, one of them without NLL; the two worst carry a picture."""
    folder = tmp_path_factory.mktemp("results")
    names = [f"case_{k}" for k in (1, 2, 3, 10, 11, 12, 20, 21)]
    pipelines = [PLAIN, Fake("ts(z)", shift=GOOD, spread=0.02, gap=0.02)]
    make_results(folder, pipelines, names=names, groups=["a", "b"], n_pictures=8, undefined=["case_2"])
    return write_report(folder, max_pictures=2)


@pytest.fixture
def page(browser: Browser, report: Path) -> Browser:
    """The page, freshly loaded."""
    browser.open(report)
    return browser


def test_opens_without_a_word_in_the_console_and_asks_for_nothing(page: Browser) -> None:
    page.run("console.log('heard')")
    assert ["heard" in message["message"] for message in page.console()] == [True]  # nothing else was said
    asked = page.run(
        "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
    )
    assert asked == []
    assert page.run("return Array.from(document.images).filter(i => i.complete && !i.naturalWidth).length") == 0


def test_a_script_that_is_not_the_pages_own_is_not_run(page: Browser) -> None:
    """What would happen to a script that slipped in through a data file."""
    page.run(
        "const s = document.createElement('script'); s.textContent = 'window.slipped = 1'; document.body.append(s)"
    )
    assert page.run("return window.slipped === undefined")
    assert any("Content Security Policy" in message["message"] for message in page.console())


def test_worst_case_comes_first_and_the_heading_says_so(page: Browser) -> None:
    values = page.run(VALUES, NLL_AFTER)
    numbers = [float(value) for value in values if value]
    assert numbers == sorted(numbers, reverse=True)
    assert values[-1] == ""
    assert page.run(SORTED)[NLL_AFTER] == "descending"


def test_a_click_sorts_and_a_second_click_turns_the_order(page: Browser) -> None:
    button = page.find("#cases thead th:nth-child(5) button")
    page.click(button)
    rising = page.run(VALUES, NLL_AFTER)
    assert page.run(SORTED)[NLL_AFTER] == "ascending"
    numbers = [float(value) for value in rising if value]
    assert numbers == sorted(numbers)
    assert rising[-1] == ""  # unknown stays last in both orders
    page.click(button)
    assert page.run(SORTED)[NLL_AFTER] == "descending"
    assert page.run(VALUES, NLL_AFTER)[-1] == ""


def test_the_keyboard_sorts_too_and_text_sorts_as_people_count(page: Browser) -> None:
    page.press(page.find("#cases thead th:first-child button"), SPACE)
    assert page.run(VALUES, 0) == [f"case_{k}" for k in (1, 2, 3, 10, 11, 12, 20, 21)]
    assert page.run(SORTED)[0] == "ascending"
    assert page.run(SORTED).count(None) == len(page.run(SORTED)) - 1
    assert page.run("return document.getElementById('sorted').textContent") == "Sorted by case, ascending."


def test_a_case_opens_stays_with_its_row_and_closes(page: Browser) -> None:
    opened = "return Array.from(document.querySelectorAll('#cases tr.detail:not([hidden])')).map(e => e.id)"
    assert page.run(opened) == []
    button = page.find("#cases .open")
    name = page.run("return document.querySelector('#cases .open').textContent")
    page.click(button)
    (detail,) = page.run(opened)
    assert page.run("return document.querySelector('#cases .open').getAttribute('aria-expanded')") == "true"
    picture = "const i = document.querySelector('#' + arguments[0] + ' img'); return [i.offsetHeight > 100, i.alt]"
    visible, alt = page.run(picture, detail)
    assert visible
    assert alt.startswith(f"{name}, slice")
    page.click(page.find("#cases thead th:first-child button"))
    owner = "return document.getElementById(arguments[0]).previousElementSibling.querySelector('.open').textContent"
    assert page.run(owner, detail) == name
    page.press(button, SPACE)
    assert page.run(opened) == []


def test_one_button_opens_all_cases_and_closes_them(page: Browser) -> None:
    button = page.find("#open-all")
    n_open = "return document.querySelectorAll('#cases tr.detail:not([hidden])').length"
    page.click(button)
    assert page.run(n_open) == 8
    assert page.run("return document.getElementById('open-all').textContent") == "Close all cases"
    page.click(button)
    assert page.run(n_open) == 0


def test_the_switch_shows_the_other_intervals(page: Browser) -> None:
    shown = """
    const all = scheme => Array.from(document.querySelectorAll('#result-table .interval.' + scheme));
    return ['two-level', 'by-subject'].map(scheme => all(scheme).some(e => e.offsetHeight))
    """
    assert page.run(shown) == [True, False]
    page.click(page.find("#by-subject"))
    assert page.run(shown) == [False, True]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window_and_text_stands_out(page: Browser, width: int, scheme: str) -> None:
    page.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.devtools("Emulation.setEmulatedMedia", media="screen", features=features)
    assert page.run("return document.documentElement.scrollWidth") <= width
    for selector in ("body", ".soft", ".interval", ".badge", ".state", "a"):
        assert contrast(page, selector) >= 4.5, selector
    page.devtools("Emulation.clearDeviceMetricsOverride")


def test_print_leaves_closed_cases_and_buttons_out(page: Browser) -> None:
    page.devtools("Emulation.setEmulatedMedia", media="print", features=[])
    heights = "return ['#open-all', 'nav', 'tr.detail', '#cases'].map(s => document.querySelector(s).offsetHeight > 0)"
    assert page.run(heights) == [False, False, False, True]
    page.devtools("Emulation.setEmulatedMedia", media="screen", features=[])
    pages = page.devtools("Page.printToPDF", preferCSSPageSize=True)
    assert len(pages["data"]) > 10_000


def contrast(page: Browser, selector: str) -> float:
    """Contrast ratio of WCAG 2 between the text of an element and what lies behind it."""
    script = """
    let element = document.querySelector(arguments[0]);
    const ink = getComputedStyle(element).color;
    while (element && getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)') element = element.parentElement;
    return [ink, getComputedStyle(element || document.body).backgroundColor];
    """
    ink, paper = (luminance(colour) for colour in page.run(script, selector))
    return (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
