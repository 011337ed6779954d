"""The audit finds what a calibrator really does, and tells it from what the file declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp, softmax

from segcal.audit import SHIFT_TOLERANCE, Audit, audit_calibrator
from segcal.calibrators import CALIBRATORS
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from tests.apply_data import CPU, make_fitted, random_logits, temperature, write_manifest

RNG = np.random.default_rng(1)
WEIGHT, BIAS = np.eye(3) + RNG.normal(0, 0.2, (3, 3)), RNG.normal(0, 0.2, 3)
CONE = {"A": RNG.uniform(0, 1, (3, 2, 2)), "beta": RNG.uniform(1e-6, 0.5, (3, 2))}
LOCAL = {"weight": RNG.normal(0, 0.05, (7, 3, 5, 5)), "bias": RNG.normal(0.5, 0.3, 7)}
CONSTANT_ROWS = WEIGHT - WEIGHT.sum(1, keepdims=True) / 3 + 0.4
PARAMETERS: dict[str, dict[str, Any] | None] = {
    "identity": None,
    "ts": {"temperature": np.array([1.7])},
    "ets": {"temperature": np.array([1.7]), "mixture": np.array([0.5, 0.3, 0.2])},
    "vs": {"a": np.array([1.2, 0.7, 0.9]), "b": BIAS},
    "ms": {"W": WEIGHT, "b": BIAS},
    "ms_c": {"W": CONSTANT_ROWS, "b": BIAS},
    "dc": {"W": WEIGHT, "b": BIAS},
    "cdc": {"W": np.stack([WEIGHT, WEIGHT.T, WEIGHT @ WEIGHT]), "b": np.stack([BIAS, -BIAS, 2 * BIAS])},
    "cms_ap": CONE,
    "cms_op": CONE,
    "lts": LOCAL,
    "lts_ti": LOCAL,
}


def fitted_with_parameters(method: str, **how: Any) -> FittedCalibrator:
    return make_fitted(method, PARAMETERS[method], **how)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path, {case_id: [random_logits(seed)] for seed, case_id in enumerate("abcd")})


def audit(fitted: FittedCalibrator, manifest: Manifest, **how: Any) -> Audit:
    return audit_calibrator(fitted, manifest, device=CPU, **how)


def declaring(fitted: FittedCalibrator, **claims: Any) -> FittedCalibrator:
    """The same parameters under a metadata that claims something else."""
    return FittedCalibrator(fitted.calibrator, fitted.info.model_copy(update=claims))


@pytest.mark.parametrize("method", CALIBRATORS)
def test_every_method_keeps_what_it_declares(manifest: Manifest, method: str) -> None:
    found = audit(fitted_with_parameters(method), manifest)

    assert found.holds, [verdict.text for verdict in found.verdicts]
    assert found.shift_change is not None
    assert (found.shift_change <= SHIFT_TOLERANCE) or not CALIBRATORS[method].translation_invariant
    assert found.n_voxels == 4 * 4 * 5 * 6


@pytest.mark.parametrize("method", ["vs", "ms", "lts"])
def test_shift_sensitive_methods_move_a_lot(manifest: Manifest, method: str) -> None:
    found = audit(fitted_with_parameters(method), manifest)

    assert found.shift_change is not None
    assert found.shift_change > 0.1
    assert found.verdicts[0].holds is None
    assert found.verdicts[0].text.startswith("not declared translation-invariant: max |Δp|")


def test_a_false_claim_of_translation_invariance_is_found(manifest: Manifest) -> None:
    found = audit(declaring(fitted_with_parameters("ms"), translation_invariant=True), manifest)

    assert not found.holds
    assert found.verdicts[0].holds is False
    assert "DOES NOT HOLD" in found.verdicts[0].text


def test_shifts_of_the_members_vanish_in_probability_pooling(manifest: Manifest) -> None:
    """ms on pooled probabilities is a translation-invariant pipeline although ms is not."""
    found = audit(fitted_with_parameters("ms", pooling="probabilities"), manifest)

    assert found.translation_invariant
    assert found.verdicts[0].holds is True


def test_flips_are_counted_against_the_pooled_decision(tmp_path: Path) -> None:
    logits = random_logits(0, (3, 8, 9, 10), scale=1.0)
    manifest = write_manifest(tmp_path, {"a": [logits]})
    expected = np.einsum("ij,j...->i...", WEIGHT, log_softmax(logits.astype(np.float64), 0)) + BIAS[:, None, None, None]
    n_flips = int((expected.argmax(0) != logits.argmax(0)).sum())
    found = audit(fitted_with_parameters("dc"), manifest)

    assert n_flips > 10
    assert found.cases[0].n_flips == n_flips
    assert found.verdicts[1].holds is None
    assert f"{n_flips} flips in 720 voxels" in found.verdicts[1].text


def test_a_false_claim_of_preservation_is_found(manifest: Manifest) -> None:
    found = audit(declaring(fitted_with_parameters("dc"), preserves="argmax"), manifest)

    assert not found.holds
    assert found.verdicts[1].holds is False


def test_a_false_claim_of_order_is_found_where_the_argmax_is_kept(manifest: Manifest) -> None:
    swap = {"A": np.broadcast_to(np.array([[0.0, 1.0], [1.0, 0.0]]), (3, 2, 2)).copy(), "beta": np.full((3, 2), 1e-6)}
    swapping = make_fitted("cms_ap", swap)
    assert audit(swapping, manifest).holds
    found = audit(declaring(swapping, preserves="order"), manifest)

    assert not found.holds
    assert found.n_flips == 0
    assert found.verdicts[2].text.startswith("declared order-preserving: DOES NOT HOLD")
    # Swapping the losers of a voxel reorders every voxel.
    assert sum(case.n_reordered or 0 for case in found.cases) == found.n_voxels


def test_free_energy_spread_agrees_with_an_independent_computation(tmp_path: Path) -> None:
    members = {case_id: [random_logits(seed) + seed for seed in range(k, k + 3)] for k, case_id in enumerate("abcde")}
    manifest = write_manifest(tmp_path, members)
    stds = [logsumexp(np.mean(m, 0, dtype=np.float64), 0).std() for m in members.values()]
    found = audit(temperature(2.0), manifest)

    np.testing.assert_allclose([case.free_energy_std for case in found.cases], stds, rtol=1e-5)
    assert found.free_energy_std is not None
    np.testing.assert_allclose(found.free_energy_std, [np.mean(stds), *np.quantile(stds, [0.25, 0.5, 0.75])], rtol=1e-5)


def test_only_voxels_inside_the_crop_are_looked_at(tmp_path: Path) -> None:
    logits = random_logits(3)
    manifest = write_manifest(tmp_path, {"a": [logits]}, crop=[[1, 3], [0, 4], [2, 5]])
    case = audit(fitted_with_parameters("dc"), manifest).cases[0]

    assert case.n_voxels == 2 * 4 * 3
    inner = logits[:, 1:3, 0:4, 2:5]
    assert case.free_energy_std == pytest.approx(logsumexp(inner.astype(np.float64), 0).std(), rel=1e-5)
    assert case.n_flips <= case.n_voxels


def test_shifts_depend_on_seed_and_case_but_not_on_the_choice_of_cases(manifest: Manifest) -> None:
    fitted = fitted_with_parameters("ms")
    everything = {case.case_id: case for case in audit(fitted, manifest).cases}
    alone = audit(fitted, manifest, cases=["c"]).cases

    assert alone == (everything["c"],)
    assert audit(fitted, manifest, seed=1).cases[0].shift_change != everything["a"].shift_change


def test_regions_have_flips_but_no_shift_to_be_invariant_to(tmp_path: Path) -> None:
    log_odds = random_logits(5, (2, 3, 4, 5), scale=1.0)
    regions = [{"name": "whole", "labels": [1, 2]}, {"name": "core", "labels": [2]}]
    manifest = write_manifest(tmp_path, {"a": [log_odds]}, classes=None, regions=regions, regions_class_order=[1, 2])
    names = ("whole", "core")
    shifting = {"W": np.eye(2), "b": np.array([0.0, 0.7])}
    found = audit(make_fitted("dc", shifting, classes=names, regions=True), manifest)
    flips = ((log_odds > 0) != (log_odds + 0.7 > 0)).any(0).sum()

    assert found.n_flips == flips > 0
    assert found.shift_change is None
    assert found.free_energy_std is None
    assert audit(temperature(2.0, classes=names, regions=True), manifest).holds


def test_probability_files_are_audited_too(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [softmax(random_logits(0), 0)]}, kind="probabilities")
    found = audit(fitted_with_parameters("cms_op"), manifest)

    assert found.holds
    assert found.cases[0].free_energy_std == pytest.approx(0, abs=1e-6)


def test_real_cases(hippocampus: Path) -> None:
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    ids = ["hippocampus_001", "hippocampus_006"]
    calls: list[tuple[str, int, int]] = []
    names = manifest.class_names
    found = audit(make_fitted("cms_ap", CONE, classes=names), manifest, cases=ids, progress=lambda *s: calls.append(s))

    assert found.holds
    assert calls[-1] == ("audit", 2, 2)
    for case_id, case in zip(ids, found.cases, strict=True):
        total = np.zeros(1)
        for index in range(5):
            with np.load(hippocampus / f"member_{index}" / f"{case_id}.npz") as member:
                total = total + member["logits"].astype(np.float64)
        assert case.free_energy_std == pytest.approx(logsumexp(total / 5, 0).std(), rel=1e-5)
        assert case.n_flips == 0
