"""The real ensemble: fits against the optima an independent float64 implementation found (reference.json)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest

PENALTY = 1e-3
"""lambda and mu of the reference."""
Z_METHODS = ("identity", "ts", "ms", "ms_c", "dc", "cdc", "cms_ap", "cms_op")
P_METHODS = ("identity", "ts", "dc", "cdc", "cms_ap", "cms_op")
LETTER = {"logits": "z", "probabilities": "p"}


@cache
def reference(folder: Path) -> Any:
    return json.loads((folder / "reference.json").read_text())["repeats"]


def entry(folder: Path, repeat: int, method: str, pooling: str) -> dict[str, Any]:
    name = "uncalibrated" if method == "identity" else method
    return reference(folder)[repeat]["pipelines"][f"{name}({LETTER[pooling]})"]


@cache
def fits(folder: Path, repeat: int, pooling: Any, methods: tuple[str, ...], full: bool) -> dict[str, FittedCalibrator]:
    """One read (or one series of reads) for all methods."""
    manifest = Manifest.load(folder / "manifest.yaml")
    return fit_many(manifest, methods, split=repeat, pooling=pooling, lambda_=PENALTY, mu=PENALTY, full=full)


def check(folder: Path, repeat: int, pooling: str, fitted: dict[str, FittedCalibrator], tolerance: float) -> None:
    """NLL of every method within the tolerance, and nothing left untested: all methods of the reference are there."""
    for method, calibrator in fitted.items():
        expected = entry(folder, repeat, method, pooling)
        assert calibrator.info.fit_nll == pytest.approx(expected["fit_nll_with_penalty_excluded"], rel=tolerance), (
            method
        )
        if "T" in expected:
            temperature = float(calibrator.calibrator.tensors()["temperature"][0])  # type: ignore[union-attr]
            assert temperature == pytest.approx(expected["T"], rel=10 * tolerance)


def test_every_pipeline_of_the_reference_is_fitted(hippocampus: Path) -> None:
    for repeat in reference(hippocampus):
        known = {f"{m}(z)" for m in Z_METHODS} | {f"{m}(p)" for m in P_METHODS}
        assert {name.replace("uncalibrated", "identity") for name in repeat["pipelines"]} == known


def test_full_fits_on_pooled_logits_match_the_reference(hippocampus: Path) -> None:
    check(hippocampus, 0, "logits", fits(hippocampus, 0, "logits", Z_METHODS, True), 1e-5)


def test_condensed_fits_on_pooled_logits_are_within_a_thousandth(hippocampus: Path) -> None:
    check(hippocampus, 0, "logits", fits(hippocampus, 0, "logits", Z_METHODS, False), 1e-3)


def test_full_fits_on_pooled_probabilities_match_the_reference(hippocampus: Path) -> None:
    check(hippocampus, 0, "probabilities", fits(hippocampus, 0, "probabilities", ("dc", "ts"), True), 1e-5)


def test_a_full_fit_needs_no_warning(hippocampus: Path) -> None:
    for calibrator in fits(hippocampus, 0, "logits", Z_METHODS, True).values():
        assert calibrator.info.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["logits", "probabilities"])
@pytest.mark.parametrize("repeat", [0, 1, 2])
def test_every_split_and_pooling_matches_the_reference(hippocampus: Path, repeat: int, pooling: str) -> None:
    methods = Z_METHODS if pooling == "logits" else P_METHODS
    check(hippocampus, repeat, pooling, fits(hippocampus, repeat, pooling, methods, True), 1e-5)
    check(hippocampus, repeat, pooling, fits(hippocampus, repeat, pooling, methods, False), 1e-3)
