"""Which cases a bootstrap replicate sees, as matrices of whole numbers: all statistics become matrix products.

Two schemes. `two_level` is the paper's: draw repeats with replacement, then cases within every drawn repeat.
`by_subject` draws subjects with replacement and takes each along in every repeat whose test set holds it, so a subject
tested in several repeats is not mistaken for several independent ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from segcal.errors import ParameterError

Scheme: TypeAlias = Literal["two_level", "by_subject"]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RepeatDraws:
    """Every time one repeat was drawn.

    Attributes:
        replicate: (draw,) which bootstrap replicate the draw belongs to, rising.
        weights: (draw, case) how often each case of the repeat was drawn, whole numbers as float64.
    """

    replicate: NDArray[np.int64]
    weights: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Resamples:
    """All draws of a bootstrap, repeat by repeat; the same ones serve every pipeline and metric."""

    scheme: Scheme
    n_replicates: int
    by_repeat: tuple[RepeatDraws, ...]

    def means(self, values: Sequence[Floats]) -> Floats:
        """(replicate, K) mean over drawn repeats of the mean over drawn cases.

        Args:
            values: for every repeat (case, K); NaN (undefined) cases are left out of a mean.
        """
        pairs = zip(self.by_repeat, values, strict=True)
        return self.over_repeats([weighted_mean(draws.weights, repeat) for draws, repeat in pairs])

    def over_repeats(self, statistics: Sequence[Floats]) -> Floats:
        """(replicate, K) mean over the drawn repeats of a statistic given for every draw, NaN draws left out.

        Args:
            statistics: for every repeat (draw, K).
        """
        total = np.zeros((self.n_replicates, statistics[0].shape[1]))
        number = np.zeros_like(total)
        for draws, statistic in zip(self.by_repeat, statistics, strict=True):
            defined = np.isfinite(statistic)
            n_draws = len(draws.replicate)
            gather = csr_array(
                (np.ones(n_draws), (draws.replicate, np.arange(n_draws))), shape=(self.n_replicates, n_draws)
            )
            total += gather @ np.where(defined, statistic, 0.0)
            number += gather @ defined.astype(np.float64)
        return _ratio(total, number)


def draw_two_level(n_cases: Sequence[int], *, n_replicates: int, seed: int) -> Resamples:
    """Resample repeats, then cases within each drawn repeat; a repeat drawn twice has its cases drawn twice.

    Args:
        n_cases: number of test cases of every repeat.
        n_replicates: number of bootstrap replicates.
        seed: the same seed gives the same resamples.
    """
    _check(n_cases, n_replicates)
    rng = np.random.default_rng([seed, 1])
    drawn = rng.integers(0, len(n_cases), size=(n_replicates, len(n_cases)))
    by_repeat = []
    for repeat, n in enumerate(n_cases):
        replicate = np.nonzero(drawn == repeat)[0]
        by_repeat.append(RepeatDraws(replicate, _draw_counts(rng, len(replicate), n)))
    return Resamples("two_level", n_replicates, tuple(by_repeat))


def draw_by_subject(subjects: Sequence[Sequence[str]], *, n_replicates: int, seed: int) -> Resamples:
    """Resample subjects jointly over all repeats.

    Args:
        subjects: for every repeat the subject of each test case, in the order of the values.
        n_replicates: number of bootstrap replicates.
        seed: the same seed gives the same resamples.
    """
    _check([len(repeat) for repeat in subjects], n_replicates)
    names = sorted({subject for repeat in subjects for subject in repeat})
    position = {subject: k for k, subject in enumerate(names)}
    counts = _draw_counts(np.random.default_rng([seed, 2]), n_replicates, len(names))
    every = np.arange(n_replicates)
    by_repeat = [RepeatDraws(every, counts[:, [position[subject] for subject in repeat]]) for repeat in subjects]
    return Resamples("by_subject", n_replicates, tuple(by_repeat))


def weighted_mean(weights: Floats, values: Floats) -> Floats:
    """(draw, K) mean of (case, K) values under (draw, case) weights; undefined values do not count."""
    defined = np.isfinite(values)
    sums = exact_product(weights, np.where(defined, values, 0.0))
    if defined.all():
        return _ratio(sums, weights.sum(axis=1, keepdims=True))
    return _ratio(sums, weights @ defined.astype(np.float64))


def exact_product(weights: Floats, values: Floats) -> Floats:
    """weights @ values with whole-number weights, to the same bits whatever the number of threads or columns.

    Matrix libraries add in an order that depends on both. Each column is rounded to about 44 bits of its largest value
    (more than any statistic needs), after which all partial sums are exact and their order does not matter.
    """
    largest = np.abs(values).max(axis=0, initial=0.0) * max(float(weights.sum(axis=1).max(initial=0.0)), 1.0)
    unit = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1.0))) - 52.0)
    product: Floats = (weights @ np.rint(values / unit)) * unit
    return product


def _draw_counts(rng: np.random.Generator, n_draws: int, n_items: int) -> Floats:
    """(draw, item) how often each item comes up in n_items draws with replacement."""
    drawn = rng.integers(0, n_items, size=(n_draws, n_items))
    cells = drawn + n_items * np.arange(n_draws)[:, None]
    counts = np.bincount(cells.reshape(-1), minlength=n_draws * n_items)
    return counts.reshape(n_draws, n_items).astype(np.float64)


def _ratio(sums: Floats, numbers: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / numbers)


def _check(n_cases: Sequence[int], n_replicates: int) -> None:
    if not n_cases or min(n_cases) < 1:
        raise ParameterError(f"a bootstrap needs at least one case in every repeat, got {list(n_cases)}")
    if n_replicates < 1:
        raise ParameterError(f"the number of bootstrap replicates must be at least 1, got {n_replicates}")
