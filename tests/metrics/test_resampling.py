"""The draws themselves."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.errors import ParameterError
from segcal.metrics.resampling import draw_by_subject, draw_two_level, exact_product, weighted_mean


def test_two_level_draws_as_many_repeats_and_cases_as_there_are() -> None:
    resamples = draw_two_level([5, 7, 3], n_replicates=200, seed=0)
    draws_of = sum(np.bincount(draws.replicate, minlength=200) for draws in resamples.by_repeat)
    assert (draws_of == 3).all()
    for draws, n in zip(resamples.by_repeat, [5, 7, 3], strict=True):
        assert (draws.weights.sum(axis=1) == n).all()


def test_a_repeat_drawn_twice_has_its_cases_drawn_independently() -> None:
    draws = draw_two_level([50, 50], n_replicates=200, seed=0).by_repeat[0]
    twice = [k for k in range(len(draws.replicate) - 1) if draws.replicate[k] == draws.replicate[k + 1]]
    assert twice
    assert all((draws.weights[k] != draws.weights[k + 1]).any() for k in twice)


def test_every_repeat_and_every_case_is_equally_likely() -> None:
    resamples = draw_two_level([4, 4], n_replicates=20_000, seed=1)
    for draws in resamples.by_repeat:
        assert len(draws.replicate) == pytest.approx(20_000, rel=0.03)
        assert draws.weights.mean(axis=0) == pytest.approx(np.ones(4), abs=0.03)
        assert draws.weights.var(axis=0) == pytest.approx(np.full(4, 3 / 4), abs=0.05)  # binomial(4, 1/4)


def test_a_subject_is_drawn_equally_often_in_every_repeat_that_tests_it() -> None:
    subjects = (("a", "b", "c"), ("c", "d", "a", "a"))
    first, second = draw_by_subject(subjects, n_replicates=100, seed=0).by_repeat
    np.testing.assert_array_equal(first.weights[:, 0], second.weights[:, 2])
    np.testing.assert_array_equal(second.weights[:, 2], second.weights[:, 3])
    np.testing.assert_array_equal(first.weights[:, 2], second.weights[:, 0])
    totals = first.weights.sum(axis=1) + second.weights[:, 1]  # a, b, c and d: all subjects once
    assert (totals == 4).all()


def test_both_schemes_follow_the_seed() -> None:
    subjects = [tuple("abcdefgh")]
    for draw in (
        lambda seed: draw_two_level([8], n_replicates=20, seed=seed),
        lambda seed: draw_by_subject(subjects, n_replicates=20, seed=seed),
    ):
        first, again, other = (draw(seed).by_repeat[0].weights for seed in (0, 0, 1))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


def test_products_do_not_depend_on_the_order_of_adding() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 5, (40, 300)).astype(np.float64)
    values = rng.normal(size=(300, 6)) * 10.0 ** rng.integers(-9, 4, 6)
    order = rng.permutation(300)
    one, other = exact_product(weights, values), exact_product(weights[:, order], values[order])
    assert one.tobytes() == other.tobytes()
    np.testing.assert_allclose(one, weights @ values, rtol=0, atol=1e-10 * np.abs(values).max())
    assert (exact_product(weights, np.zeros((300, 2))) == 0).all()


def test_undefined_values_take_their_weight_with_them() -> None:
    weights = np.array([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    values = np.array([[1.0], [4.0], [np.nan]])
    mean = weighted_mean(weights, values)
    assert mean[0, 0] == pytest.approx(2.0)
    assert np.isnan(mean[1, 0])


@pytest.mark.parametrize("n_cases", [[], [3, 0]])
def test_an_empty_repeat_is_refused(n_cases: list[int]) -> None:
    with pytest.raises(ParameterError, match="at least one case"):
        draw_two_level(n_cases, n_replicates=10, seed=0)


def test_no_replicates_are_refused() -> None:
    with pytest.raises(ParameterError, match="replicates"):
        draw_by_subject([["a"]], n_replicates=0, seed=0)
