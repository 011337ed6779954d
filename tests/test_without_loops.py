"""A device without compiled loops gives the same answers, from the fit to the files and the tables.

`--device cuda` runs torch operations where the CPU runs compiled loops (ADR 8). Here the whole flow runs on the CPU
without any loop, which is what a graphics card runs but for its arithmetic, and, where there is one, on the card.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import segcal.compiled
from segcal import device
from segcal.apply import apply_calibrator
from segcal.calibrators import CALIBRATORS
from segcal.evaluation.records import CaseRecord
from segcal.evaluation.run import evaluate
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.io.archive import read_npz_array
from segcal.io.nifti import read_nifti
from segcal.manifest import Manifest
from tests.fit_data import write_ensemble

CPU = torch.device("cpu")
LOOPS = [f"segcal.compiled.{path.stem}" for path in Path(segcal.compiled.__file__).parent.glob("[!_]*.py")]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    split = {"calibration": [0, 1, 2], "validation": [3], "test": [4, 5]}
    return write_ensemble(tmp_path_factory.mktemp("ensemble"), crop=True, ignored=True, ignore_label=9, split=split)


@pytest.fixture(scope="module")
def fitted(manifest: Manifest) -> dict[str, FittedCalibrator]:
    return fit_everything(manifest, CPU)


@pytest.fixture(scope="module")
def maps(manifest: Manifest, fitted: Mapping[str, FittedCalibrator], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return apply_everything(manifest, fitted, tmp_path_factory.mktemp("maps"), CPU)


@pytest.fixture(scope="module")
def counted(manifest: Manifest, fitted: Mapping[str, FittedCalibrator]) -> dict[tuple[str, str], CaseRecord]:
    return evaluate_everything(manifest, fitted, CPU)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device for which nothing is compiled; a loop that is called all the same cannot be imported."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    monkeypatch.setattr(device, "LOOP_DEVICES", frozenset())
    for name in LOOPS:
        monkeypatch.setitem(sys.modules, name, None)
    return torch.device(request.param)


def fit_everything(manifest: Manifest, where: torch.device) -> dict[str, FittedCalibrator]:
    return fit_many(manifest, list(CALIBRATORS), lambda_=1e-3, mu=1e-3, trials=1, device=where)


def apply_everything(
    manifest: Manifest, fitted: Mapping[str, FittedCalibrator], out: Path, where: torch.device
) -> Path:
    for method, calibrator in fitted.items():
        apply_calibrator(calibrator, manifest, out / method, device=where)
    return out


def evaluate_everything(
    manifest: Manifest, fitted: Mapping[str, FittedCalibrator], where: torch.device
) -> dict[tuple[str, str], CaseRecord]:
    found = evaluate(manifest, fitted, split=0, device=where)
    return {(row.pipeline, row.case): row for row in found.records.rows}


def test_a_fit_finds_the_same_calibrators(
    manifest: Manifest, fitted: Mapping[str, FittedCalibrator], elsewhere: torch.device
) -> None:
    again = fit_everything(manifest, elsewhere)

    for method, expected in fitted.items():
        info, other = expected.info, again[method].info
        assert other.fit_nll == pytest.approx(info.fit_nll, rel=1e-6), method
        assert other.validation_nll == pytest.approx(info.validation_nll, rel=1e-6), method
        for name, values in info.reference_statistics.items():
            assert other.reference_statistics[name] == pytest.approx(values, rel=1e-9), (method, name)


def test_the_files_hold_the_same_maps_and_labels(
    manifest: Manifest,
    fitted: Mapping[str, FittedCalibrator],
    maps: Path,
    elsewhere: torch.device,
    tmp_path: Path,
) -> None:
    apply_everything(manifest, fitted, tmp_path, elsewhere)

    for name in (f"{method}/{case.id}" for method in fitted for case in manifest.cases):
        probs, again = (read_npz_array(run / f"{name}.npz", "probabilities") for run in (maps, tmp_path))
        labels, labels_again = (read_nifti(run / f"{name}.nii.gz")[0] for run in (maps, tmp_path))
        np.testing.assert_allclose(again, probs, rtol=0, atol=2e-6, err_msg=name)
        np.testing.assert_array_equal(labels_again, labels, err_msg=name)


def test_an_evaluation_counts_the_same(
    manifest: Manifest,
    fitted: Mapping[str, FittedCalibrator],
    counted: Mapping[tuple[str, str], CaseRecord],
    elsewhere: torch.device,
) -> None:
    again = evaluate_everything(manifest, fitted, elsewhere)

    assert again.keys() == counted.keys()
    # The maps differ in their last bits; tests/metrics/test_two_forms.py shows that the same map is counted alike.
    for key, row in counted.items():
        for name, value in row.values.items():
            np.testing.assert_allclose(again[key].values[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{key} {name}")
