"""Local temperature scaling: the tree against explicit loops, and what lts and lts_ti promise."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators import local_temperature
from segcal.calibrators.local_temperature import (
    TAU_MAX,
    TAU_MIN,
    LocalTemperatureScaling,
    LocalTemperatureScalingTI,
)
from segcal.errors import ParameterError

Tree: TypeAlias = type[LocalTemperatureScaling]

BOTH = pytest.mark.parametrize("cls", [LocalTemperatureScaling, LocalTemperatureScalingTI])
SHAPES = [(2, 9, 6), (1, 5, 5), (3, 3, 7), (2, 7, 4), (1, 1, 1), (1, 12, 1)]


def draw_logits(shape: tuple[int, ...], *, n_classes: int = 3, seed: int = 0, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n_classes, *shape, generator=generator, dtype=torch.float64)


def draw_calibrator(cls: Tree, n_classes: int = 3, *, seed: int = 1, std: float = 0.1) -> LocalTemperatureScaling:
    generator = torch.Generator().manual_seed(seed)
    weight = std * torch.randn(7, n_classes, 5, 5, generator=generator, dtype=torch.float64)
    return cls(weight, torch.randn(7, generator=generator, dtype=torch.float64))


def tau_by_loops(
    features: NDArray[np.float64], weight: NDArray[np.float64], bias: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The definition, one pixel and one tap at a time: (C, z, y, x) features to (z, y, x)."""
    _, n_slices, height, width = features.shape
    mode = "reflect" if min(height, width) >= 5 else "edge"
    padded = np.pad(features, ((0, 0), (0, 0), (4, 4), (4, 4)), mode=mode)
    tau = np.empty((n_slices, height, width))
    for z, y, x in np.ndindex(tau.shape):
        maps = bias.copy()
        for i, j in np.ndindex(5, 5):
            maps += weight[:, :, i, j] @ padded[:, z, y + 2 * i, x + 2 * j]
        t = np.log1p(np.exp(maps[:4]))
        g = 1 / (1 + np.exp(-maps[4:]))
        tau[z, y, x] = g[0] * (g[1] * t[0] + (1 - g[1]) * t[1]) + (1 - g[0]) * (g[2] * t[2] + (1 - g[2]) * t[3])
    return tau.clip(TAU_MIN, TAU_MAX)


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_the_temperature_is_the_tree_of_explicit_convolutions(cls: Tree, shape: tuple[int, ...]) -> None:
    calibrator, logits = draw_calibrator(cls), draw_logits(shape)
    features = logits.log_softmax(0) if cls.translation_invariant else logits

    expected = tau_by_loops(features.numpy(), calibrator.weight.numpy(), calibrator.bias.numpy())

    np.testing.assert_allclose(calibrator.temperatures(logits).numpy(), expected, rtol=1e-10)
    probs = calibrator.volume_log_probs(logits).exp().numpy()
    np.testing.assert_allclose(probs, (logits / torch.from_numpy(expected)).softmax(0).numpy(), rtol=1e-9)


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_has_temperature_exactly_one_whatever_the_gates(
    cls: Tree, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    logits = draw_logits(shape).to(dtype)
    identity = cls.identity(3)
    gated = draw_calibrator(cls, std=5.0)
    weight, bias = identity.weight.clone(), identity.bias.clone()
    weight[4:], bias[4:] = gated.weight[4:], gated.bias[4:]

    for calibrator in (identity, cls(weight, bias)):
        assert torch.equal(calibrator.temperatures(logits), torch.ones(shape, dtype=dtype))
        torch.testing.assert_close(calibrator.volume_log_probs(logits), logits.log_softmax(0))


@BOTH
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), std=st.sampled_from([0.01, 0.3, 10.0]), n_classes=st.integers(2, 6))
def test_the_ranking_of_the_classes_is_kept(cls: Tree, seed: int, std: float, n_classes: int) -> None:
    # Halves make exact ties frequent; ties must stay ties or go unresolved, never swap.
    logits = (2 * draw_logits((2, 6, 5), n_classes=n_classes, seed=seed)).round().float() / 2
    log_q = draw_calibrator(cls, n_classes, seed=seed, std=std).volume_log_probs(logits)

    above = logits.unsqueeze(0) > logits.unsqueeze(1)
    assert bool((log_q.unsqueeze(0) >= log_q.unsqueeze(1))[above].all())
    assert torch.equal(log_q.argmax(0), logits.argmax(0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_lts_ti_ignores_a_shift_that_varies_from_voxel_to_voxel(dtype: torch.dtype, tolerance: float) -> None:
    # In float32 a shift of 20 rounds the logits themselves at 1e-6, and the tree multiplies that by its weights.
    logits = draw_logits((3, 16, 12)).to(dtype)
    shift = 20 * (2 * torch.rand(3, 16, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 1)
    ti, plain = draw_calibrator(LocalTemperatureScalingTI), draw_calibrator(LocalTemperatureScaling)

    def change(calibrator: LocalTemperatureScaling) -> float:
        shifted = calibrator.volume_log_probs(logits + shift.to(dtype)).exp()
        return float((shifted - calibrator.volume_log_probs(logits).exp()).abs().max())

    assert change(ti) < tolerance
    assert change(plain) > 0.05


@BOTH
def test_each_slice_is_calibrated_by_itself(cls: Tree) -> None:
    calibrator, logits = draw_calibrator(cls), draw_logits((3, 8, 8))
    other = logits.clone()
    other[:, 1] = draw_logits((8, 8), seed=9)

    before, after = calibrator.volume_log_probs(logits), calibrator.volume_log_probs(other)

    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


def test_the_temperature_stays_within_its_bounds_and_the_output_finite() -> None:
    logits = draw_logits((2, 8, 8), scale=100.0).float()
    calibrator = draw_calibrator(LocalTemperatureScaling, std=100.0)

    tau = calibrator.temperatures(logits)

    assert float(tau.min()) == pytest.approx(TAU_MIN)
    assert float(tau.max()) == pytest.approx(TAU_MAX)
    assert bool(torch.isfinite(calibrator.volume_log_probs(logits)).all())


@BOTH
def test_working_in_chunks_of_slices_bounds_memory_and_changes_nothing(
    cls: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrator, logits = draw_calibrator(cls), draw_logits((7, 10, 9))
    whole = calibrator.volume_log_probs(logits)
    seen = []
    plain = local_temperature.tree_temperature

    def spy(padded: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        seen.append(padded.shape[0])
        return plain(padded, weight, bias)

    monkeypatch.setattr(local_temperature, "tree_temperature", spy)
    monkeypatch.setattr(local_temperature, "VALUES_PER_CHUNK", 2 * 18 * 17 * 10)

    assert torch.allclose(calibrator.volume_log_probs(logits), whole, rtol=1e-12, atol=0)
    assert seen == [2, 2, 2, 1]


@BOTH
def test_half_precision_goes_in_and_comes_out_and_the_work_is_float32(cls: Tree) -> None:
    calibrator, logits = draw_calibrator(cls), draw_logits((2, 8, 8)).half()

    log_q = calibrator.volume_log_probs(logits)

    assert log_q.dtype == torch.float16
    assert torch.equal(log_q, calibrator.volume_log_probs(logits.float()).half())


@BOTH
def test_a_view_gives_what_its_copy_gives_and_is_left_alone(cls: Tree) -> None:
    calibrator = draw_calibrator(cls)
    view = draw_logits((6, 8, 5)).permute(0, 3, 2, 1)
    before = view.clone()

    log_q = calibrator.volume_log_probs(view)

    torch.testing.assert_close(log_q, calibrator.volume_log_probs(before.contiguous()))
    assert torch.equal(view, before)


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 40, 30), (4, 3, 7)])
def test_probabilities_of_a_2d_or_3d_array_keep_the_decision(cls: Tree, shape: tuple[int, ...]) -> None:
    logits = draw_logits(shape, scale=1e-3).float().numpy()

    probs = draw_calibrator(cls).probabilities(logits, class_axis=0)

    assert probs.shape == logits.shape
    np.testing.assert_allclose(probs.sum(0), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(probs.argmax(0), logits.argmax(0))


@BOTH
def test_plain_rows_are_refused_with_a_way_out(cls: Tree) -> None:
    with pytest.raises(ParameterError, match=r"5 voxels by themselves.*volume_probs"):
        cls.identity(3).log_probs(torch.zeros(5, 3))


@BOTH
def test_a_volume_with_other_classes_is_refused(cls: Tree) -> None:
    with pytest.raises(ParameterError, match="fitted for 3 classes, the volume has 4"):
        cls.identity(3).volume_log_probs(torch.zeros(4, 1, 8, 8))


@BOTH
def test_tensors_round_trip(cls: Tree) -> None:
    calibrator = draw_calibrator(cls)
    again = cls.from_tensors(calibrator.tensors())

    assert type(again) is cls
    assert torch.equal(again.weight, calibrator.weight)
    assert torch.equal(again.bias, calibrator.bias)
    assert all(tensor.dtype == torch.float64 for tensor in again.tensors().values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(7, 3, 3, 3)}, "shape"),
        ({"weight": torch.zeros(6, 3, 5, 5)}, "shape"),
        ({"bias": torch.zeros(6)}, "shape"),
        ({"bias": torch.full((7,), float("nan"))}, "not finite"),
    ],
)
def test_tensors_that_are_no_tree_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LocalTemperatureScaling.from_tensors(LocalTemperatureScaling.identity(3).tensors() | change)


@BOTH
@pytest.mark.parametrize(("n_classes", "count"), [(2, 357), (5, 882), (20, 3507)])
def test_parameters_are_counted_as_in_the_paper(cls: Tree, n_classes: int, count: int) -> None:
    assert cls.parameter_counts(n_classes) == (count, count)
    assert sum(tensor.numel() for tensor in cls.identity(n_classes).tensors().values()) == count
