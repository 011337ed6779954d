"""The training loop shared by the small networks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from segcal.classification.training import Training, split_rows, train
from segcal.errors import DataError, ParameterError


@given(st.integers(2, 300), st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_split_holds_every_row_once_with_some_on_either_side(n: int, share: float, seed: int) -> None:
    rows, kept = split_rows(n, share, torch.Generator().manual_seed(seed))
    assert sorted([*rows.tolist(), *kept.tolist()]) == list(range(n))
    assert len(rows) >= 1
    assert len(kept) >= 1


def test_one_row_cannot_be_split() -> None:
    with pytest.raises(DataError, match="at least 2"):
        split_rows(1, 0.2, torch.Generator())


def _line(seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, 2 * x


def _fit(settings: Training, **more: int) -> tuple[float, int]:
    x, y = _line()
    slope = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def loss(rows: Tensor) -> Tensor:
        return (slope * x[rows] - y[rows]).square().mean()

    rows, kept = torch.arange(48), torch.arange(48, 64)
    steps = train([slope], loss, rows, kept, settings, torch.Generator().manual_seed(0), **more)
    return float(slope.detach()), steps


def test_a_slope_is_found() -> None:
    slope, _ = _fit(Training(learning_rate=0.05, weight_decay=0.0, batch_rows=16, max_steps=600))
    assert slope == pytest.approx(2.0, abs=0.01)


def test_a_batch_summed_up_in_pieces_is_the_same_batch() -> None:
    settings = Training(learning_rate=0.05, batch_rows=20, max_steps=30)
    assert _fit(settings, rows_at_once=3)[0] == pytest.approx(_fit(settings)[0], rel=1e-9)


def test_the_best_pass_is_returned_not_the_last() -> None:
    """A step far too large overshoots at once: the start was best."""
    slope, steps = _fit(Training(learning_rate=100.0, max_steps=50, patience=10))
    assert (slope, steps) == (0.0, 0)


def test_the_fit_stops_after_its_patience() -> None:
    calls = 0
    x, _ = _line()
    slope = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def loss(rows: Tensor) -> Tensor:
        return (slope * x[rows]).square().mean()  # 0 is the best there is

    def count(rows: Tensor) -> None:
        nonlocal calls
        calls += 1

    settings = Training(batch_rows=16, patience=12, max_steps=1000)
    train([slope], loss, torch.arange(48), torch.arange(48, 64), settings, torch.Generator(), after_step=count)
    assert calls == 12


def test_unknown_settings_and_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ParameterError, match="unknown setting speed; training knows batch_rows"):
        Training.of({"speed": 1}, "vq")
    for wrong in ({"learning_rate": 0.0}, {"batch_rows": 0}, {"validation_share": 1.0}, {"patience": 0}):
        with pytest.raises(ParameterError):
            Training.of(wrong, "vq")
