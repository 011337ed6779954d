"""Fixtures of the whole suite: reproducible hypothesis, one torch thread a worker, the real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "segcal", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("segcal")

SHARED_DATA = Path(os.environ.get("SEGCAL_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def _shared(name: str) -> Path:
    folder = SHARED_DATA / name
    if not folder.is_dir():
        pytest.skip(f"real data not found: {folder}; set SEGCAL_SHARED_DATA to the folder that holds `{name}`")
    return folder


@pytest.fixture(scope="session")
def hippocampus() -> Path:
    """Folder of the really trained 5-member hippocampus ensemble (manifest, members, labels, images, reference)."""
    return _shared("hippocampus")


@pytest.fixture(scope="session")
def classifiers() -> Path:
    """Folder of real classifier outputs."""
    return _shared("classifiers")
