"""Free-energy statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from segcal.errors import DataError
from segcal.metrics import FreeEnergy


def draw(seed: int, shape: tuple[int, ...] = (4, 7, 40, 300)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 5 + 100


def test_mean_and_spatial_std_agree_with_scipy() -> None:
    logits = draw(0)
    energy = FreeEnergy()
    energy.update("a", logits)
    expected = logsumexp(logits.numpy().astype(np.float64), axis=0)
    row = energy.compute()["a"]
    assert row["free_energy_mean"] == pytest.approx(expected.mean(), abs=1e-9)
    assert row["free_energy_std"] == pytest.approx(expected.std(), abs=1e-9)


def test_a_shift_of_the_logits_moves_the_mean_and_a_varying_one_the_spread() -> None:
    logits = draw(1)
    shift = torch.linspace(-20, 20, logits.shape[-1])
    energy = FreeEnergy()
    for name, values in {"as is": logits, "constant": logits + 50, "varying": logits + shift}.items():
        energy.update(name, values)
    rows = energy.compute()
    assert rows["constant"]["free_energy_mean"] == pytest.approx(rows["as is"]["free_energy_mean"] + 50, abs=1e-3)
    assert rows["constant"]["free_energy_std"] == pytest.approx(rows["as is"]["free_energy_std"], abs=1e-3)
    assert rows["varying"]["free_energy_std"] > 2 * rows["as is"]["free_energy_std"]


def test_parts_of_a_case_merge_into_the_whole() -> None:
    logits = draw(2)
    whole, first, second = FreeEnergy(), FreeEnergy(), FreeEnergy()
    whole.update("a", logits)
    first.update("a", logits[:, :2])
    second.update("a", logits[:, 2:])
    second.update("b", logits[:, :1])
    first.merge(second)
    assert first.compute()["a"] == pytest.approx(whole.compute()["a"], abs=1e-10)
    assert set(first.compute()) == {"a", "b"}


def test_the_fill_outside_the_crop_does_not_count() -> None:
    logits = draw(3)
    inside = torch.zeros(logits.shape[1:], dtype=torch.bool)
    inside[1:4, 5:30, 10:200] = True
    filled = torch.where(inside, logits, torch.tensor([1.0, 0.0, 0.0, 0.0])[:, None, None, None])
    energy = FreeEnergy()
    energy.update("filled", filled, inside=inside)
    energy.update("cut", logits[:, 1:4, 5:30, 10:200])
    rows = energy.compute()
    assert rows["filled"] == pytest.approx(rows["cut"], abs=1e-10)


def test_nothing_measured_is_undefined_and_not_zero() -> None:
    energy = FreeEnergy()
    energy.update("a", draw(0), inside=torch.zeros(draw(0).shape[1:], dtype=torch.bool))
    assert all(math.isnan(value) for value in energy.compute()["a"].values())


def test_nan_in_the_logits_is_an_error_that_names_the_case() -> None:
    logits = draw(0)
    logits[1, 2, 3, 4] = math.nan
    with pytest.raises(DataError, match="case_7"):
        FreeEnergy().update("case_7", logits)
