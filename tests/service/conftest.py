"""A service in this process (`api`), and a real one behind a socket (`service`, `client`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.api_data import Api, running_api
from tests.service.running import Service, running_service
from tests.service.stores import store, store_url  # noqa: F401 (fixtures: a store of each database)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """An app on loopback that requires no tokens."""
    root = tmp_path / "root"
    root.mkdir()
    with running_api(tmp_path / "data", roots=(root,)) as running:
        yield running


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Api]:
    """An app that requires tokens."""
    with running_api(tmp_path / "data", require_tokens=True) as running:
        yield running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`segcal serve` in a process of its own, with one worker and SQLite, on a free port."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    """A client of `service`."""
    with service.client() as client:
        yield client
