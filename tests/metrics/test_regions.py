"""Region (sigmoid) models: binary problems, then the mean over regions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from segcal.errors import GeometryError
from segcal.metrics import MetricSettings, RegionFrame, make_region_metrics
from segcal.metrics.ace import pooled_ace
from segcal.metrics.regions import binary_settings
from tests.metrics import reference

NAMES = ("whole", "core")
SHAPE = (5, 9, 8)


def draw(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(R, z, y, x) float32 probabilities and bool labels."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE), indexing="ij"))
    radius = np.sqrt(np.square(grid).sum(axis=0))
    labels = np.stack([radius < 0.9, radius < 0.5])
    logits = rng.normal(size=labels.shape) * 2 + np.where(labels, 3, -3)
    return (1 / (1 + np.exp(-logits))).astype(np.float32), labels


def run(probs: np.ndarray, labels: np.ndarray, **maps: np.ndarray | None):  # type: ignore[no-untyped-def]
    settings = MetricSettings(class_names=NAMES)
    given = {name: None if value is None else torch.from_numpy(value) for name, value in maps.items()}
    frame = RegionFrame.build("case", torch.from_numpy(labels), settings, **given)
    metrics = make_region_metrics(settings)
    metrics.update(frame, torch.from_numpy(probs))
    return metrics.take("case")


def binary(p: np.ndarray) -> np.ndarray:
    return np.stack([1 - p, p])


def test_every_number_is_the_mean_over_the_binary_problems() -> None:
    probs, labels = draw()
    values = run(probs, labels).values
    pairs = [(binary(probs[k]), labels[k].astype(np.int64)) for k in range(2)]
    expected = {
        "nll": [reference.nll(*pair) for pair in pairs],
        "ece": [reference.ece(*pair, 50) for pair in pairs],
        "ba_ece": [reference.ba_ece(*pair) for pair in pairs],
        "dsc": [reference.dice(*pair)[1] for pair in pairs],
    }
    for column, each in expected.items():
        assert values[column] == pytest.approx(np.mean(each), abs=1e-9)
        assert [values[f"{column}:{name}"] for name in NAMES] == pytest.approx(each, abs=1e-9)


def test_one_half_counts_as_outside_and_its_confidence_is_one_half() -> None:
    probs = np.full((2, 1, 1, 4), 0.5, dtype=np.float32)
    labels = np.zeros(probs.shape, dtype=bool)
    result = run(probs, labels)
    assert result.values["ece"] == pytest.approx(0.5)  # always right, half confident


def test_flips_against_the_decision_of_each_region() -> None:
    probs, labels = draw()
    decision = probs > 0.5
    decision[1, 0, 0, :3] ^= True
    values = run(probs, labels, decision=decision).values
    assert (values["flip:whole"], values["flip:core"]) == (0, pytest.approx(3 / math.prod(SHAPE)))
    assert values["flip"] == pytest.approx(1.5 / math.prod(SHAPE))


def test_ignored_voxels_count_for_no_region() -> None:
    probs, labels = draw()
    ignored = np.zeros(SHAPE, dtype=bool)
    ignored[:2] = True
    values = run(probs, labels, ignored=ignored).values
    expected = [reference.nll(binary(p)[:, 2:], y[2:].astype(np.int64)) for p, y in zip(probs, labels, strict=True)]
    assert values["nll"] == pytest.approx(np.mean(expected), abs=1e-9)
    assert values["n_voxels"] == 2 * (math.prod(SHAPE) - ignored.sum())


def test_a_region_in_neither_map_is_left_out_of_the_mean_dice() -> None:
    probs, labels = draw()
    probs[1], labels[1] = 0.01, False
    result = run(probs, labels)
    assert math.isnan(result.values["dsc:core"])
    assert result.undefined["dsc:core"]
    assert result.values["dsc"] == result.values["dsc:whole"]


def test_tables_are_stacked_by_region_so_that_ace_is_their_mean() -> None:
    probs, labels = draw()
    table = run(probs, labels).tables["top_label_15"]
    each = [reference.ace([(binary(probs[k]), labels[k].astype(np.int64))], 15) for k in range(2)]
    assert table.shape == (2, 3, 15)
    assert float(pooled_ace(table)) == pytest.approx(np.mean(each), abs=1e-9)


def test_another_number_of_regions_is_refused() -> None:
    _, labels = draw()
    with pytest.raises(GeometryError, match="case"):
        RegionFrame.build("case", torch.from_numpy(labels[:1]), MetricSettings(class_names=NAMES))


def test_a_region_is_measured_with_the_settings_of_the_model() -> None:
    settings = MetricSettings(NAMES, True, 20, 10, (5,), (0.0, 2.0), "uniform")
    binary = binary_settings(settings, "core")

    assert (binary.class_names, binary.include_background) == (("not core", "core"), False)
    assert replace(binary, class_names=NAMES, include_background=True) == settings
