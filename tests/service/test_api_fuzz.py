"""The whole API against its own OpenAPI file: no 5xx, every answer as described, what does not fit is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.service.api_data import Api, add_calibrator, case_with_layers, finished_job, running_api
from tests.service.postgres import running_postgres
from tests.service.running import serving
from tests.service.test_api_jobs import write_manifest

FAST, LONG = 12, 100
JUDGED = {
    "POST /v1/calibrators",
    "POST /v1/cases",
    "POST /v1/jobs",
    "GET /v1/cases/{key}/slices/{name}/{axis}/{index}.png",
}
"""These may refuse what fits the schema: a file that is no calibrator, a missing path, a window that does not rise."""

PATTERNS = {
    "job_id": r"[0-9a-f]{24}",
    "sha256": r"[0-9a-f]{64}",
    "key": r"[1-9][0-9]{0,17}",
    "name": r"[A-Za-z0-9_-]{1,100}",
}
"""Of valid ids only: an invalid one that is replaced by one that exists would be accepted."""


class Fuzzed:
    """An app behind a real socket, and its OpenAPI file as schemathesis reads it."""

    def __init__(self, api: Api, url: str) -> None:
        self.api, self.url = api, url
        self.schema = schemathesis.openapi.from_dict(api.app.openapi())
        self.schema.config.update(base_url=url)
        self.known = self._known()
        self.session = requests.Session()
        self.session.headers.update(api.token("admin"))

    def _known(self) -> dict[str, str]:
        """Things that exist, so that more than 404 is seen."""
        key = case_with_layers(self.api)
        job = finished_job(self.api)
        return {"job_id": job.id, "sha256": add_calibrator(self.api).sha256, "key": str(key), "name": "image"}

    def operation(self, label: str) -> Any:
        return next(each.ok() for each in self.schema.get_all_operations() if each.ok().label == label)

    def strategy(self, label: str, mode: GenerationMode) -> Any:
        found = self.operation(label).as_strategy(generation_mode=mode).map(self._with_known)
        return found if mode is GenerationMode.POSITIVE else found.filter(_survives_an_address)

    def _with_known(self, case: Any) -> Any:
        """Let every other valid id be one that exists."""
        parameters = dict(case.path_parameters or {})
        for name, value in parameters.items():
            valid = name in PATTERNS and re.fullmatch(PATTERNS[name], str(value))
            if valid and sum(map(ord, str(value))) % 2 == 0:
                parameters[name] = self.known[name]
        case.path_parameters = parameters
        return case


def _survives_an_address(case: Any) -> bool:
    """A list of one value in the place of a value is written as that value, so it arrives as valid."""
    return not any(isinstance(value, list) for value in (case.query or {}).values())


@contextmanager
def fuzzed_service(folder: Path, **values: Any) -> Iterator[Fuzzed]:
    """A service with a job, a case with layers, a calibrator and a manifest."""
    root = folder / "root"
    root.mkdir()
    write_manifest(root, "c1.npz")
    with running_api(folder / "data", roots=(root,), require_tokens=True, **values) as api, serving(api.app) as url:
        yield Fuzzed(api, url)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    """Over SQLite."""
    with fuzzed_service(tmp_path_factory.mktemp("fuzzed")) as running:
        yield running


@pytest.fixture(scope="module")
def fuzzed_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    """Over PostgreSQL, which is strict where SQLite takes anything."""
    with fuzzed_service(tmp_path_factory.mktemp("fuzzed"), store_url=running_postgres().new_database()) as running:
        yield running


def labels() -> list[str]:
    """Every operation: `GET /v1/jobs`."""
    from segcal.service.api.app import create_app
    from segcal.service.settings import ServiceSettings

    described = create_app(ServiceSettings(data=Path("unused")), None).openapi()  # type: ignore[arg-type]
    return [f"{method.upper()} {path}" for path, found in described["paths"].items() for method in found]


def fuzz(fuzzed: Fuzzed, label: str, n_examples: int) -> None:
    # /v1/ready says 503 on purpose when no worker was heard of.
    fuzzed.api.store.workers.beat("worker")
    found = fuzzed.operation(label)
    takes_something = bool(list(found.iter_parameters()) or found.body)
    for mode in GenerationMode if takes_something else [GenerationMode.POSITIVE]:
        strategy = fuzzed.strategy(label, mode)

        @settings(max_examples=n_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=strategy)
        def check(case: Any) -> None:
            excluded = [positive_data_acceptance] if label in JUDGED else []
            case.call_and_validate(base_url=fuzzed.url, session=fuzzed.session, excluded_checks=excluded)

        check()


@pytest.mark.parametrize("label", labels())
def test_every_operation_answers_as_described(fuzzed: Fuzzed, label: str) -> None:
    fuzz(fuzzed, label, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("label", labels())
def test_every_operation_answers_as_described_over_postgresql(fuzzed_postgres: Fuzzed, label: str) -> None:
    fuzz(fuzzed_postgres, label, 4 * FAST)


@pytest.mark.slow
@pytest.mark.parametrize("label", labels())
def test_every_operation_answers_as_described_for_long(fuzzed: Fuzzed, label: str) -> None:
    fuzz(fuzzed, label, LONG)


def test_an_answer_that_is_not_described_would_be_noticed(fuzzed: Fuzzed) -> None:
    described = copy.deepcopy(fuzzed.api.app.openapi())
    del described["paths"]["/v1/jobs/{job_id}"]["get"]["responses"]["404"]
    lacking = Fuzzed.__new__(Fuzzed)
    lacking.__dict__ = {**fuzzed.__dict__, "schema": schemathesis.openapi.from_dict(described)}
    with pytest.raises(FailureGroup, match="404"):
        fuzz(lacking, "GET /v1/jobs/{job_id}", FAST)
