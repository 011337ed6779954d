"""Addresses of pages with anything in them: a page, maybe one that says what is wrong, never the service at fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.api_data import Api, add_calibrator, case_with_layers, running_api
from tests.service.postgres import running_postgres

PARAMETERS = {
    "/": ("calibrator", "batch"),
    "/cases": ("search", "batch", "day", "calibrator", "look", "sort", "descending", "start"),
    "/cases/1": ("layer", "axis", "index", "low", "high", "threshold", "opacity"),
    "/jobs": ("state", "kind", "batch", "before"),
    "/calibrators/compare": ("a", "b"),
}
SENSIBLE = ["", "0", "1", "-1", "0.5", "z", "x", "p1", "label", "worst", "flagged", "queued", "true", "2026-03-01"]
NASTY = ["nan", "inf", "1e400", "9" * 40, "%", "_", "\\", "'; --", "\x00", "é", "\U0001f9e0", "a" * 64, "[]", "null"]
VALUES = st.one_of(st.sampled_from(SENSIBLE), st.sampled_from(NASTY), st.text(max_size=30), st.floats().map(str))


@st.composite
def addresses(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    path = draw(st.sampled_from(sorted(PARAMETERS)))
    return path, draw(st.dictionaries(st.sampled_from(PARAMETERS[path]), VALUES, max_size=4))


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def one_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    data: Path = tmp_path_factory.mktemp("fuzz") / "data"
    url = None if request.param == "sqlite" else running_postgres().new_database()
    data.mkdir()
    with running_api(data, store_url=url) as api:
        add_calibrator(api)
        assert case_with_layers(api) == 1
        yield api


@settings(max_examples=150)
@given(address=addresses())
def test_no_address_of_a_page_ends_in_an_error_of_the_service(
    one_case: Api, address: tuple[str, dict[str, str]]
) -> None:
    path, values = address
    encoded = {name: value.encode("utf-8", "surrogatepass") for name, value in values.items()}
    answer = one_case.client.get(path, params={name: value.decode("latin-1") for name, value in encoded.items()})
    assert answer.status_code in (200, 404, 422), (path, values, answer.text[:300])
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
