"""TS-SB-ECE and TS-HB-ECE: the objectives literally, the search against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.classification.core import TemperatureRows
from segcal.classification.temperature_search import (
    HardBinnedTemperature,
    SoftBinnedTemperature,
    hard_binned_ece,
    soft_binned_ece,
)
from segcal.errors import ParameterError
from tests.classification.rows import draw_rows

DATA = draw_rows(2000, 4)


def confidence(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.softmax(DATA.logits / temperature, 1)
    return probs.max(1).values, (probs.argmax(1) == DATA.known_labels).to(torch.float64)


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_soft_binned_ece_is_the_papers_sum(norm: float) -> None:
    conf, hits = (part[:60] for part in confidence(1.0))
    centres = [(j + 0.5) / 5 for j in range(5)]
    total = 0.0
    members = []
    for c in conf.tolist():
        g = [np.exp(-((c - x) ** 2) / 0.02) for x in centres]
        members.append([value / sum(g) for value in g])
    for j in range(5):
        size = sum(u[j] for u in members)
        mean_conf = sum(u[j] * c for u, c in zip(members, conf.tolist(), strict=True)) / size
        mean_hit = sum(u[j] * a for u, a in zip(members, hits.tolist(), strict=True)) / size
        total += size / 60 * abs(mean_hit - mean_conf) ** norm
    assert soft_binned_ece(conf, hits, 5, 0.02, norm) == pytest.approx(total ** (1 / norm), rel=1e-10)


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_hard_binned_ece_is_the_plain_loop(norm: float) -> None:
    conf, hits = confidence(1.0)
    total = 0.0
    for j in range(15):
        inside = (conf >= j / 15) & ((conf < (j + 1) / 15) | (j == 14))
        if bool(inside.any()):
            total += float(inside.double().mean()) * abs(float(hits[inside].mean() - conf[inside].mean())) ** norm
    assert hard_binned_ece(conf, hits, 15, norm) == pytest.approx(total ** (1 / norm), rel=1e-9)


def test_soft_binning_tends_to_hard_binning_as_it_hardens() -> None:
    conf, hits = confidence(1.0)
    # Squares: where every bin is over-confident, the sum of absolute gaps is the same however they are binned.
    hard = hard_binned_ece(conf, hits, 15, 2.0)
    gaps = [abs(soft_binned_ece(conf, hits, 15, t, 2.0) - hard) for t in (1e-2, 1e-4, 1e-7)]
    assert gaps[2] < 1e-6
    assert gaps[2] < 0.01 * gaps[0]


def test_the_searches_are_as_good_as_a_fine_grid() -> None:
    grid = np.geomspace(0.5, 8, 400)
    soft = SoftBinnedTemperature.fit(DATA).temperature
    best = min(soft_binned_ece(*confidence(t), 15, 0.01, 2.0) for t in grid)
    assert soft_binned_ece(*confidence(soft), 15, 0.01, 2.0) <= best + 1e-7
    hard = HardBinnedTemperature.fit(DATA).temperature
    # Hard bins jump, so a coarse first level may miss a narrow dip; it must still be close to the best of the grid.
    best = min(hard_binned_ece(*confidence(t), 15, 1.0) for t in grid)
    assert hard_binned_ece(*confidence(hard), 15, 1.0) <= best + 5e-3


@pytest.mark.parametrize("method", [SoftBinnedTemperature, HardBinnedTemperature])
def test_the_temperature_that_drew_the_labels_is_found(method: type) -> None:
    data = draw_rows(40_000, 4, temperature=1.7)
    assert method.fit(data).temperature == pytest.approx(1.7, rel=0.06)


@pytest.mark.parametrize("method", [SoftBinnedTemperature, HardBinnedTemperature])
def test_few_rows_are_said_as_temperature_scaling_says_them(method: type[SoftBinnedTemperature]) -> None:
    few = DATA.rows(torch.arange(499))
    assert f"{method.name} was fitted on only 499 rows" in method.fit(few).warnings
    assert TemperatureRows.fit(few).warnings == ("ts was fitted on only 499 rows",)
    assert method.fit(DATA.rows(torch.arange(500))).warnings == ()


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ParameterError, match="bins"):
        HardBinnedTemperature.fit(DATA, bins=0)
    with pytest.raises(ParameterError, match="softness"):
        SoftBinnedTemperature.fit(DATA, softness=0.0)
