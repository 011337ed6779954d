"""Choosing a device: what is absent or cannot do the sums is refused with the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from segcal.apply import apply_calibrator
from segcal.audit import audit_calibrator
from segcal.device import resolve_device
from segcal.errors import UsageError
from segcal.evaluation.run import evaluate
from segcal.evaluation.study import study
from segcal.fitting.run import fit_many
from segcal.manifest_check import check_manifest
from segcal.qa.run import run_qa
from tests.apply_data import temperature
from tests.fit_data import write_ensemble


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


@pytest.mark.parametrize("run", [fit_many, evaluate, study, apply_calibrator, audit_calibrator, run_qa, check_manifest])
def test_whatever_works_on_voxels_takes_a_device_by_its_name(run: Callable[..., object]) -> None:
    assert inspect.signature(run).parameters["device"].annotation == "torch.device | str"


def test_a_map_is_made_on_the_device_named(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=1)
    assert apply_calibrator(temperature(2.0), manifest, tmp_path / "out", device="cpu").done == ["case_00"]
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        apply_calibrator(temperature(2.0), manifest, tmp_path / "other", device="gpu")
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        run_qa(manifest, calibrator=temperature(2.0), device="gpu")
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        audit_calibrator(temperature(2.0), manifest, device="gpu")
