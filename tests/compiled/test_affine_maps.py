"""One loop for all affine maps: what torch gives in double precision, and every voxel by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from segcal.calibrators import CALIBRATORS
from segcal.calibrators.affine import AffineCalibrator
from segcal.errors import ParameterError
from tests.conformance.drawn import draw_calibrator

METHODS = pytest.mark.parametrize(
    "name", [name for name, method in CALIBRATORS.items() if issubclass(method, AffineCalibrator)]
)
INVARIANT = pytest.mark.parametrize(
    "name", [name for name in METHODS.args[1] if CALIBRATORS[name].translation_invariant]
)
BOTH_FORMS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["loop", "torch"])
CONDITIONAL = pytest.mark.parametrize("name", ["cdc", "cms_ap", "cms_op"])


def draw_voxels(n_classes: int, n_voxels: int) -> tuple[Tensor, Tensor]:
    """(C, n) float32 logits with ties among them, and decisions: long runs of one class, single ones, wrong ones."""
    generator = torch.Generator().manual_seed(n_classes)
    logits = torch.randn(n_classes, n_voxels, generator=generator) * 3
    logits[:, ::7] = torch.randint(-2, 3, logits[:, ::7].shape, generator=generator).float()
    logits[-1, n_voxels // 3 : n_voxels // 2] += 20
    decision = logits.argmax(0)
    wrong = torch.rand(n_voxels, generator=generator) < 0.02
    wrong[n_voxels // 3 : n_voxels // 2] = False
    return logits, torch.where(wrong, torch.randint(0, n_classes, (n_voxels,), generator=generator), decision)


@METHODS
@pytest.mark.parametrize("n_classes", [2, 3, 5, 16, 40])
def test_maps_are_those_of_torch_in_double_precision(name: str, n_classes: int) -> None:
    calibrator = draw_calibrator(name, n_classes)
    logits, decision = draw_voxels(n_classes, 3001)
    exact = calibrator.voxel_log_probs(logits.double(), decision)
    # What goes into a sum decides how it is rounded: a Dirichlet map multiplies logarithms of up to 60 by up to 1.
    rounding = 2.0**-24 * n_classes * 60
    torch.testing.assert_close(calibrator.voxel_log_probs(logits, decision).double(), exact, rtol=1e-6, atol=rounding)
    torch.testing.assert_close(
        calibrator.voxel_probs(logits, decision).double(), exact.exp(), rtol=0, atol=rounding / 4
    )


@METHODS
@pytest.mark.parametrize("step", [1, 100, 512, 1024])
def test_a_voxel_has_the_same_bits_wherever_it_stands(name: str, step: int) -> None:
    calibrator = draw_calibrator(name, 4)
    logits, decision = draw_voxels(4, 2100)
    whole = calibrator.voxel_probs(logits, decision)
    order = torch.randperm(2100, generator=torch.Generator().manual_seed(1))
    pieces = [
        calibrator.voxel_probs(logits[:, part], decision[part])
        for part in (order[k : k + step] for k in range(0, 2100, step))
    ]
    assert torch.equal(whole[:, order], torch.cat(pieces, 1))


@CONDITIONAL
def test_decisions_in_bytes_are_as_good_as_long_ones(name: str) -> None:
    calibrator = draw_calibrator(name, 3)
    logits, decision = draw_voxels(3, 1500)
    assert torch.equal(
        calibrator.voxel_probs(logits, decision), calibrator.voxel_probs(logits, decision.to(torch.uint8))
    )


@METHODS
def test_the_logits_stay_as_they_are(name: str) -> None:
    calibrator = draw_calibrator(name, 5)
    logits, decision = draw_voxels(5, 1500)
    before = logits.clone()
    calibrator.voxel_probs(logits, decision)
    assert torch.equal(logits, before)


@CONDITIONAL
@BOTH_FORMS
@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_decision_that_is_no_class_is_refused(name: str, wrong: int, dtype: torch.dtype) -> None:
    calibrator = draw_calibrator(name, 3)
    logits, decision = draw_voxels(3, 10)
    decision[4] = wrong
    with pytest.raises(ParameterError, match="expected 0 to 2"):
        calibrator.voxel_probs(logits.to(dtype), decision)


@CONDITIONAL
@BOTH_FORMS
@pytest.mark.parametrize("n_decisions", [0, 40, 72])
def test_another_number_of_decisions_is_refused(name: str, n_decisions: int, dtype: torch.dtype) -> None:
    calibrator = draw_calibrator(name, 3)
    logits, decision = draw_voxels(3, 60)
    wrong = decision.repeat(2)[:n_decisions]
    with pytest.raises(ParameterError, match="60 voxels of 3 classes"):
        calibrator.voxel_probs(logits.to(dtype), wrong)
    with pytest.raises(ParameterError, match="expected one each"):
        calibrator.volume_probs(logits.reshape(3, 3, 4, 5), wrong)


@METHODS
def test_where_a_gradient_is_wanted_torch_works_it_out(name: str) -> None:
    calibrator = draw_calibrator(name, 3)
    logits, decision = draw_voxels(3, 60)
    watched = logits.clone().requires_grad_()
    calibrator.voxel_log_probs(watched, decision)[0].sum().backward()
    assert watched.grad is not None
    with torch.no_grad():
        assert torch.equal(calibrator.voxel_probs(watched, decision), calibrator.voxel_probs(logits, decision))


@INVARIANT
def test_what_all_classes_share_costs_no_digits(name: str) -> None:
    calibrator = draw_calibrator(name, 4)
    logits, decision = draw_voxels(4, 1300)
    logits = (logits * 64).round() / 64
    shifted = calibrator.voxel_log_probs(logits + 4096, decision)
    assert torch.equal(shifted, calibrator.voxel_log_probs(logits, decision))


@METHODS
def test_no_voxels_give_no_probabilities(name: str) -> None:
    calibrator = draw_calibrator(name, 3)
    assert calibrator.voxel_probs(torch.empty(3, 0), torch.empty(0, dtype=torch.int64)).shape == (3, 0)


@METHODS
@pytest.mark.parametrize("where", [0, 1, 2, slice(None)], ids=str)
def test_nan_stays_nan_in_its_own_voxel(name: str, where: int | slice) -> None:
    """Files with NaN are refused before; a map must not turn what it is handed into a number all the same."""
    calibrator = draw_calibrator(name, 3)
    logits, decision = draw_voxels(3, 1000)
    logits[where, 700] = torch.nan
    for found in (calibrator.voxel_probs(logits, decision), calibrator.voxel_log_probs(logits, decision)):
        assert bool(found[:, 700].isnan().all())
        assert bool(found[:, torch.arange(1000) != 700].isfinite().all())
