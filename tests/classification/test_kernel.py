"""KCal against a literal double loop, and its bandwidth against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.classification.kernel import KernelCalibration
from segcal.classification.kernel_projection import _draw_background, standardiser, trained_projection
from segcal.classification.samples import Samples
from segcal.errors import DataError, ParameterError
from tests.classification.rows import draw_rows, nll

DATA, TEST = draw_rows(400, 3, n_features=6), draw_rows(60, 3, n_features=6)


def literal(made: KernelCalibration, test: Samples) -> np.ndarray:
    points, memory = made.projection.apply(test.known_features).numpy(), made.memory.numpy()
    n = len(memory)
    out = np.zeros((len(points), 3))
    for i, u in enumerate(points):
        for v, label in zip(memory, made.labels.numpy().astype(int), strict=True):
            out[i, label] += np.exp(-np.mean((u - v) ** 2) / made.bandwidth)
    out /= out.sum(1, keepdims=True)
    return out * (1 - 1 / (n + 2)) + 1 / (n + 2) / 3


@pytest.mark.parametrize("projection", ["trained", "standardised"])
def test_probabilities_are_the_kernel_average(projection: str) -> None:
    made = KernelCalibration.fit(DATA, projection=projection, steps=50)
    np.testing.assert_allclose(made.probabilities(TEST).numpy(), literal(made, TEST), rtol=1e-6, atol=1e-9)


def test_the_network_is_the_papers_skip_elu() -> None:
    made = trained_projection(DATA.known_features, DATA.known_labels, 3, seed=0, dimensions=5, steps=3)
    assert made.weight is not None
    assert made.bias is not None
    assert made.skip is not None
    x = DATA.known_features.double()
    u = ((x - x.mean(0)) / x.std(0, unbiased=False)) @ made.weight.T + made.bias
    elu = torch.where(u > 0, u, torch.expm1(u))
    torch.testing.assert_close(made.apply(DATA.known_features), elu @ made.skip.T + u)


def test_the_background_is_apart_from_the_queries_and_stands_for_all_rows_of_its_class() -> None:
    by_class = [np.arange(0, 300), np.arange(300, 315), np.array([], dtype=np.int64)]
    rng = np.random.default_rng(0)
    for _ in range(20):
        queries = rng.choice(315, 64, replace=False)
        rows, counts = _draw_background(rng, by_class, queries)
        assert len(set(rows.tolist())) == len(rows)
        assert not set(rows.tolist()) & set(queries.tolist())
        assert (rows < 300).sum() == 20
        assert set(rows[rows >= 300].tolist()) == set(range(300, 315)) - set(queries.tolist())
        assert counts[rows < 300].sum() == pytest.approx(300)
        assert counts[rows >= 300].sum() == pytest.approx(15)


def test_a_feature_that_differs_by_rounding_only_says_nothing() -> None:
    """Divided by its own deviation, the last bit would weigh as much as a feature that means something."""
    last_bit = np.random.default_rng(0).integers(0, 2, 400).astype(np.float32) * np.spacing(np.float32(0.1))
    rounded = torch.as_tensor(np.float32(0.1) + last_bit).unsqueeze(1)
    assert float(standardiser(rounded).apply(rounded).abs().max()) < 1e-6


def test_training_the_projection_helps_where_most_features_are_noise() -> None:
    def noisy(seed: int, n: int) -> Samples:
        data = draw_rows(n, 3, seed=seed)
        rng = np.random.default_rng(100 + seed)
        noise = rng.normal(0, 1, (n, 40))
        noise[:, :3] += 3 * np.eye(3)[data.known_labels.numpy()]
        return Samples.of(data.logits, data.labels, torch.as_tensor(noise, dtype=torch.float32))

    data, test = noisy(0, 800), noisy(1, 500)
    plain = KernelCalibration.fit(data, projection="standardised").probabilities(test)
    trained = KernelCalibration.fit(data, steps=300).probabilities(test)
    assert nll(trained, test.known_labels) < nll(plain, test.known_labels) - 0.05


def test_rows_given_for_the_projection_leave_all_calibration_rows_as_memory() -> None:
    made = KernelCalibration.fit(DATA, train=draw_rows(300, 3, seed=7, n_features=6), steps=20)
    assert made.values["memory_rows"] == 400
    assert KernelCalibration.fit(DATA, steps=20).values["memory_rows"] == 200


def test_the_bandwidth_is_the_best_by_leave_one_out() -> None:
    made = KernelCalibration.fit(DATA, projection="standardised")
    points, labels = standardiser(DATA.known_features).apply(DATA.known_features).numpy(), DATA.known_labels.numpy()
    squares = ((points[:, None] - points[None]) ** 2).mean(2)
    np.fill_diagonal(squares, np.inf)

    def loss(h: float) -> float:
        weights = np.exp((squares.min(1, keepdims=True) - squares) / h)
        votes = np.stack([weights[:, labels == k].sum(1) for k in range(3)], 1)
        votes = votes / votes.sum(1, keepdims=True) * (1 - 1 / 402) + 1 / 402 / 3
        return float(-np.log(votes[np.arange(400), labels]).mean())

    assert loss(made.bandwidth) <= min(loss(h) for h in made.bandwidth * np.geomspace(0.05, 20, 81)) + 1e-6


def test_a_row_far_from_everything_is_still_a_distribution() -> None:
    made = KernelCalibration.fit(DATA, steps=20)
    far = Samples.of(TEST.logits, None, torch.full((60, 6), 1e4))
    probs = made.probabilities(far)
    assert bool(torch.isfinite(probs).all())
    assert float((probs.sum(1) - 1).abs().max()) < 1e-9


def test_features_are_needed_and_of_the_same_width() -> None:
    made = KernelCalibration.fit(DATA, steps=20)
    with pytest.raises(DataError, match="features"):
        made.probabilities(Samples.of(TEST.logits))
    with pytest.raises(DataError, match="fitted on 6 features, the rows have 7"):
        made.probabilities(draw_rows(5, 3, n_features=7))
    with pytest.raises(DataError, match="features"):
        KernelCalibration.fit(draw_rows(50, 3))
    with pytest.raises(ParameterError, match="projection"):
        KernelCalibration.fit(DATA, projection="other")
