"""LCE and MLCE against loops over pairs of rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from segcal.classification.metrics import local
from segcal.classification.metrics.local import local_errors, released_local_errors
from segcal.errors import DataError, ParameterError
from tests.classification.feature_rows import draw_rows


def _rows(n: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    rows = draw_rows(n=n)
    return (rows.logits / 3).softmax(1), rows.known_labels, rows.known_features


def _bin(value: float, n_bins: int) -> int:
    return min(int(value * n_bins), n_bins - 1)


def _weight(features: Tensor, i: int, j: int, bandwidth: float) -> float:
    apart = sum(float(a - b) ** 2 for a, b in zip(features[i].double(), features[j].double(), strict=True))
    return math.exp(-apart / (2 * bandwidth**2))


def _gap(p: Tensor, y: Tensor, x: Tensor, i: int, c: int, members: list[int], bandwidth: float) -> float:
    weights = [_weight(x, i, j, bandwidth) for j in members]
    errors = [float(p[j, c]) - float(y[j] == c) for j in members]
    return sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)


@pytest.mark.parametrize("bandwidth", [0.5, 10.0])
def test_the_written_form_is_its_loop(bandwidth: float) -> None:
    p, y, x = _rows()
    n, n_classes = p.shape
    bins = [_bin(float(p[i].max()), 15) for i in range(n)]
    norms = []
    for i in range(n):
        members = [j for j in range(n) if bins[j] == bins[i]]
        norms.append(sum(abs(_gap(p, y, x, i, c, members, bandwidth)) for c in range(n_classes)))
    found = local_errors(p, y, x, bandwidth=bandwidth)
    assert found.lce == pytest.approx(sum(norms) / n / n_classes, rel=1e-10)
    assert found.mlce == pytest.approx(max(norms), rel=1e-10)


@pytest.mark.parametrize("min_rows", [0, 8, 20, 100])
def test_the_released_form_is_its_loop(min_rows: int) -> None:
    p, y, x = _rows()
    n, n_classes = p.shape
    lce = mlce = 0.0
    for c in range(n_classes):
        bins = [_bin(float(p[i, c]), 15) for i in range(n)]
        gaps = []
        for i in range(n):
            members = [j for j in range(n) if bins[j] == bins[i]]
            if len(members) > min_rows:
                gaps.append(abs(_gap(p, y, x, i, c, members, 1.5)))
        share = float((y == c).double().mean())
        if gaps:
            lce += share * sum(gaps) / len(gaps)
            mlce += share * max(gaps)
    found = released_local_errors(p, y, x, bandwidth=1.5, min_rows=min_rows)
    assert found.lce == pytest.approx(lce, rel=1e-10, abs=1e-15)
    assert found.mlce == pytest.approx(mlce, rel=1e-10, abs=1e-15)


def test_the_size_of_the_blocks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _rows(200)
    whole = local_errors(*rows), released_local_errors(*rows)
    monkeypatch.setattr(local, "ROWS_AT_ONCE", 7)
    pieces = local_errors(*rows), released_local_errors(*rows)
    for one, two in zip(whole, pieces, strict=True):
        assert (one.lce, one.mlce) == pytest.approx((two.lce, two.mlce), rel=1e-12)


def test_no_more_than_a_block_of_the_kernel_is_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, original = 0, local._kernel

    def watched(anchors: Tensor, points: Tensor, bandwidth: float) -> Tensor:
        nonlocal largest
        largest = max(largest, len(anchors))
        return original(anchors, points, bandwidth)

    monkeypatch.setattr(local, "_kernel", watched)
    monkeypatch.setattr(local, "ROWS_AT_ONCE", 50)
    local_errors(*_rows(400))
    released_local_errors(*_rows(400))
    assert largest == 50


def test_a_wide_kernel_gives_the_calibration_error_of_every_bin() -> None:
    p, y, x = _rows(300)
    index = (p.amax(1) * 15).long().clamp(max=14)
    residual = p - torch.nn.functional.one_hot(y, 3)
    expected = sum(float(residual[index == b].sum(0).abs().sum()) for b in range(15)) / (300 * 3)
    assert local_errors(p, y, x, bandwidth=1e9).lce == pytest.approx(expected, rel=1e-9)


def test_a_narrow_kernel_leaves_every_row_alone_with_its_own_error() -> None:
    p, y, x = _rows()
    norms = (p - torch.nn.functional.one_hot(y, 3)).abs().sum(1)
    found = local_errors(p, y, x, bandwidth=1e-9)
    assert found.lce == pytest.approx(float(norms.mean()) / 3, rel=1e-12)
    assert found.mlce == pytest.approx(float(norms.max()), rel=1e-12)


def test_errors_that_cancel_over_all_rows_are_seen_locally() -> None:
    """Two regions, one always right and one always wrong, all rows at one half: global errors are 0."""
    y = torch.cat([torch.zeros(50), torch.ones(50)]).long()
    p = torch.full((100, 2), 0.5, dtype=torch.float64)
    x = torch.cat([torch.zeros(50, 1), torch.full((50, 1), 100.0)])
    assert local_errors(p, y, x, bandwidth=1e6).lce == pytest.approx(0.0, abs=1e-6)
    assert local_errors(p, y, x, bandwidth=1.0).lce == pytest.approx(0.5)
    assert released_local_errors(p, y, x, bandwidth=1.0).mlce == pytest.approx(0.5)


def test_rows_that_do_not_belong_together_are_refused() -> None:
    p, y, x = _rows()
    with pytest.raises(DataError, match="belong together"):
        local_errors(p, y, x[:-1])
    with pytest.raises(DataError, match="belong together"):
        released_local_errors(p[:0], y[:0], x[:0])
    with pytest.raises(ParameterError, match="bandwidth"):
        local_errors(p, y, x, bandwidth=0.0)
