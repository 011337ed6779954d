"""Choosing a device: what is absent or cannot do the sums is refused with the way out."""

from __future__ import annotations

import pytest
import torch

from segcal.device import resolve_device
from segcal.errors import UsageError


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with MPS and without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.usefixtures("apple")
def test_mps_serves_maps_but_not_float64_sums() -> None:
    assert resolve_device("auto").type == "mps"
    assert resolve_device("auto", sums=True).type == "cpu"
    with pytest.raises(UsageError, match="no float64"):
        resolve_device("mps", sums=True)
    with pytest.raises(UsageError, match="no float64"):
        resolve_device(torch.device("mps"), sums=True)


def test_unknown_and_absent_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        resolve_device("gpu")
    with pytest.raises(UsageError, match="'cuda' is not available"):
        resolve_device("cuda")
    assert resolve_device(torch.device("cpu"), sums=True) == torch.device("cpu")
