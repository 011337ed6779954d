"""Intervals over rows: which rows are drawn together, and every metric of all draws at once.

The bootstrap draws *units*: subjects where the data names them, single rows otherwise. Beyond MAX_UNITS they are put
together at random (from the seed) into MAX_UNITS blocks of equal size and blocks are drawn. A mean over random blocks
varies as a mean over their rows does, so the intervals are those of drawing rows, up to a share of about
1 / sqrt(2 MAX_UNITS) of their width, and their cost no longer grows with the number of rows. Draws are matrices of
whole numbers (segcal.metrics.resampling), so all statistics are matrix products and the same for every pipeline.

Equal-mass bins keep the edges they have on all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from segcal.classification.metrics.binning import bin_index, equal_width_index
from segcal.classification.metrics.rows import Floats, ScoredRows, Whole
from segcal.classification.metrics.tables import row_brier, row_nll
from segcal.metrics.resampling import draw_by_subject

MAX_UNITS = 2000

MEANS = ("accuracy", "nll", "brier", "flip")
"""Means over rows; their intervals are percentile intervals."""
ERRORS = (
    "ece",
    "ece_2",
    "adaptive_ece",
    "adaptive_ece_2",
    "debiased_ce",
    "classwise_ece",
    "ecce",
    "ecce_max",
)
"""Calibration errors (segcal.classification.error_intervals)."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What is drawn.

    Attributes:
        what: the kind of thing that is independent.
        n_independent: how many of them there are, before they are put into blocks.
        index: (n,) the unit of every row.
        n_units: how many are drawn.
    """

    what: Literal["rows", "subjects"]
    n_independent: int
    index: Whole
    n_units: int

    @classmethod
    def of(cls, n_rows: int, subjects: Whole | None, seed: int) -> Units:
        """Rows by themselves, or by subject; in blocks when there are many."""
        names = np.arange(n_rows) if subjects is None else np.unique(subjects, return_inverse=True)[1]
        n = int(names.max()) + 1
        what: Literal["rows", "subjects"] = "rows" if subjects is None else "subjects"
        if n <= MAX_UNITS:
            return cls(what, n, names.astype(np.int64), n)
        place = np.random.default_rng([seed, 3]).permutation(n)
        return cls(what, n, (place * MAX_UNITS // n)[names].astype(np.int64), MAX_UNITS)

    def sums(self, values: Floats) -> Floats:
        """(unit, 1) sums of a value a row."""
        return np.bincount(self.index, values, self.n_units).astype(np.float64)[:, None]

    def table(self, bins: Whole, values: Floats | None, n_bins: int) -> Floats:
        """(unit, bin) sums of a value a row, or numbers of rows."""
        cells = self.index * n_bins + bins
        return np.bincount(cells, values, self.n_units * n_bins).reshape(self.n_units, n_bins).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """All replicates.

    Attributes:
        units: what was drawn.
        weights: (unit, replicate) how often, whole numbers as float64.
        n_rows: (replicate,) the rows that makes.
    """

    units: Units
    weights: Floats
    n_rows: Floats

    @classmethod
    def of(cls, units: Units, *, n_replicates: int, seed: int) -> Draws:
        """Draw units with replacement; the same seed gives the same draws."""
        names = [f"{k:08d}" for k in range(units.n_units)]
        drawn = draw_by_subject([names], n_replicates=n_replicates, seed=seed).by_repeat[0].weights
        return cls.from_weights(units, np.ascontiguousarray(drawn.T))

    @classmethod
    def from_weights(cls, units: Units, weights: Floats) -> Draws:
        """Given (unit, replicate) weights."""
        sizes = np.bincount(units.index, minlength=units.n_units).astype(np.float64)
        return cls(units, weights, sizes @ weights)

    def total(self, sums: Floats) -> Floats:
        """(replicate, K) sums over the drawn units of (unit, K).

        Most cells of the tables of many classes are empty: as a sparse product the cost follows those that are not.
        It adds in the order of the units, whatever the number of threads.
        """
        return np.asarray((csr_array(sums.T) @ self.weights).T)


@dataclass(frozen=True, slots=True, eq=False)
class Replicates:
    """Metrics of one pipeline in every replicate.

    Attributes:
        values: metric -> (replicate,); not of debiased errors, which resampled rows do not have.
        noise: metric -> (replicate,) the same after the gap of every bin was taken out: what noise alone makes of a
            perfectly calibrated pipeline with the same scores. Also of debiased errors.
    """

    values: dict[str, Floats]
    noise: dict[str, Floats]


def replicate(rows: ScoredRows, before: NDArray[np.int64], draws: Draws, n_bins: int) -> Replicates:
    """All metrics of MEANS and ERRORS, debiased ones apart, for every draw.

    Args:
        before: (n,) the uncalibrated prediction, for the share of rows whose prediction changes.
    """
    units = draws.units
    means = {
        "accuracy": rows.hit.astype(np.float64),
        "nll": row_nll(rows),
        "brier": row_brier(rows),
        "flip": (rows.prediction != before).astype(np.float64),
    }
    values = {name: draws.total(units.sums(each))[:, 0] / draws.n_rows for name, each in means.items()}
    noise: dict[str, Floats] = {}
    for found, quiet in (
        _top_label(rows, draws, n_bins),
        _equal_mass(rows, draws, n_bins),
        _classes(rows, draws, n_bins),
    ):
        values |= found
        noise |= quiet
    return Replicates(values, noise)


def _top_label(rows: ScoredRows, draws: Draws, n_bins: int) -> tuple[dict[str, Floats], dict[str, Floats]]:
    index = equal_width_index(rows.confidence, n_bins)
    counts, excess, calibrated = drawn_table(index, rows.confidence, rows.hit, draws, n_bins)

    found, quiet = (
        dict(zip(("ece", "ece_2"), gap_errors(counts, gaps, draws.n_rows), strict=True))
        for gaps in (excess, calibrated)
    )
    return found, quiet


def _equal_mass(rows: ScoredRows, draws: Draws, n_bins: int) -> tuple[dict[str, Floats], dict[str, Floats]]:
    index = bin_index(rows.confidence, n_bins, "mass")
    n_groups = int(index.max()) + 1
    counts, excess, calibrated = drawn_table(index, rows.confidence, rows.hit, draws, n_groups)
    hits = draws.total(draws.units.table(index, rows.hit.astype(np.float64), n_groups))

    found, quiet = (
        dict(zip(("adaptive_ece", "adaptive_ece_2"), gap_errors(counts, gaps, draws.n_rows), strict=True))
        for gaps in (excess, calibrated)
    )
    debiased = np.sqrt(np.maximum(debiased_squares(counts, calibrated, hits), 0.0) / draws.n_rows)
    return found, {**quiet, "debiased_ce": debiased}


def gap_errors(counts: Floats, gap_sums: Floats, n_rows: Floats) -> tuple[Floats, Floats]:
    """(replicate,) ECE_bin,1 and ECE_bin,2 of (replicate, bin) numbers of rows and sums of gaps."""
    squares = (gap_sums**2 / np.maximum(counts, 1.0)).sum(axis=1)
    return np.abs(gap_sums).sum(axis=1) / n_rows, np.sqrt(squares / n_rows)


def debiased_squares(counts: Floats, gap_sums: Floats, hits: Floats) -> Floats:
    """(replicate,) n times the debiased squared error of (replicate, bin) tables; may be negative."""
    frequency = hits / np.maximum(counts, 1.0)
    spread = frequency * (1.0 - frequency) / np.maximum(counts - 1.0, 1.0)
    squares = (gap_sums / np.maximum(counts, 1.0)) ** 2
    return np.asarray(np.where(counts > 1, counts * (squares - spread), 0.0).sum(axis=1))


def _classes(rows: ScoredRows, draws: Draws, n_bins: int) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Means over classes, class by class: memory does not grow with their number."""
    names = ("classwise_ece", "ecce", "ecce_max")
    found, quiet = ({name: np.zeros(len(draws.n_rows)) for name in names} for _ in range(2))
    for scores, hits in each_class(rows):
        index = equal_width_index(scores, n_bins)
        _, excess, calibrated = drawn_table(index, scores, hits, draws, n_bins)
        for total, gap_sums in ((found, excess), (quiet, calibrated)):
            cumulated = np.abs(np.cumsum(gap_sums, axis=1))
            total["classwise_ece"] += np.abs(gap_sums).sum(axis=1)
            total["ecce"] += cumulated.sum(axis=1)
            total["ecce_max"] += cumulated.max(axis=1)
    scale = rows.n_classes * draws.n_rows
    return {name: total / scale for name, total in found.items()}, {
        name: total / scale for name, total in quiet.items()
    }


def each_class(rows: ScoredRows) -> Iterator[tuple[Floats, NDArray[np.bool_]]]:
    """Every class's own probabilities, and which rows are of it."""
    for c in range(rows.n_classes):
        yield np.minimum(rows.probabilities[:, c], 1.0), rows.labels == c


def drawn_table(
    index: Whole, scores: Floats, hits: NDArray[np.bool_], draws: Draws, n_bins: int
) -> tuple[Floats, Floats, Floats]:
    """(replicate, bin) rows, sums of score minus hit, and what noise makes of these sums: with the bin's gap taken out.

    Around their own mean u units vary by a share (u - 1)/u of what they vary by, which is given back.
    """
    counts = draws.units.table(index, None, n_bins)
    excess = draws.units.table(index, scores - hits, n_bins)
    gap = excess.sum(axis=0) / np.maximum(counts.sum(axis=0), 1.0)
    drawn_counts, drawn_excess = np.split(draws.total(np.hstack([counts, excess])), 2, axis=1)
    n_units = (counts > 0).sum(axis=0)
    growth = np.sqrt(n_units / np.maximum(n_units - 1, 1))
    return drawn_counts, drawn_excess, growth * (drawn_excess - drawn_counts * gap)
