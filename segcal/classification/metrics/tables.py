"""The additive state of rows: tables of batches, or of workers, add up to the table of all rows, bit for bit.

state = RowTables.of(ScoredRows.of(probabilities, labels))   # one batch
state = state + RowTables.of(next_batch)
state.values()["ece"]

Every loss and probability is rounded once to a multiple of 2^-34 and the multiples are added as whole numbers
(segcal.metrics.fixed_point), so the sums are exact in any order; the results agree with float64 sums to 1e-9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from segcal.classification.metrics.binning import equal_width_index, unit_sums
from segcal.classification.metrics.rows import Floats, ScoredRows
from segcal.errors import ParameterError
from segcal.metrics.bins import BinTable
from segcal.metrics.fixed_point import CHUNK_VOXELS, from_units
from segcal.metrics.voxel_sums import PROBABILITY_FLOOR, ClassTables

N_BINS = 15
_AT_FLOOR = PROBABILITY_FLOOR * (1 + 1e-9)  # zeros of a file were raised to the floor and went through a softmax


@dataclass(frozen=True, slots=True, eq=False)
class RowTables:
    """Everything that NLL, Brier, accuracy and all errors with fixed equal-width bins need of some rows.

    Attributes:
        n_rows, n_hits: rows, and those predicted right.
        nll, brier: sums in units of segcal.metrics.fixed_point.
        n_floored: rows whose label had no probability to speak of: PROBABILITY_FLOOR, to which it is raised, or less.
        top_label: (B,) tables of the confidence.
        by_class: (C, B) tables of every class's own probability.
    """

    n_rows: int
    n_hits: int
    nll: int
    brier: int
    n_floored: int
    top_label: ClassTables
    by_class: ClassTables

    @classmethod
    def of(cls, rows: ScoredRows, n_bins: int = N_BINS) -> RowTables:
        """Measure a batch."""
        if n_bins < 1:
            raise ParameterError(f"the number of bins must be at least 1, got {n_bins}")
        return cls(
            n_rows=rows.n_rows,
            n_hits=int(rows.hit.sum()),
            nll=_total(row_nll(rows)),
            brier=_total(row_brier(rows)),
            n_floored=int((rows.label_probability <= _AT_FLOOR).sum()),
            top_label=_top_label(rows, n_bins),
            by_class=_by_class(rows, n_bins),
        )

    def __add__(self, other: RowTables) -> RowTables:
        if self.by_class.counts.shape != other.by_class.counts.shape:
            raise ParameterError("tables with other numbers of classes or bins cannot be added")
        return RowTables(
            self.n_rows + other.n_rows,
            self.n_hits + other.n_hits,
            self.nll + other.nll,
            self.brier + other.brier,
            self.n_floored + other.n_floored,
            self.top_label + other.top_label,
            self.by_class + other.by_class,
        )

    def values(self) -> dict[str, float]:
        """All metrics that these tables determine, by their name in METRICS."""
        top = self.top_label.as_bin_table()
        return {
            "accuracy": self.n_hits / self.n_rows,
            "nll": from_units(self.nll) / self.n_rows,
            "brier": from_units(self.brier) / self.n_rows,
            "ece": top.ece(),
            "ece_2": ece_bin(top, 2.0),
            "mce": top.mce(),
            "ace": top.ace(),
            "classwise_ece": float(self.classwise(1.0).mean()),
            "ecce": float(self._cumulative().sum(axis=1).mean()),
            "ecce_max": float(self._cumulative().max(axis=1).mean()),
        }

    def classwise(self, p: float = 1.0) -> Floats:
        """(C,) ECE_bin,p of the question "is it class c?" on the probability of c."""
        table = self.by_class.as_bin_table()
        each = [BinTable(*parts) for parts in zip(table.counts, table.confidence, table.hits, strict=True)]
        return np.array([ece_bin(one, p) for one in each])

    def _cumulative(self) -> Floats:
        """(C, B) |sum over the bins up to b of (frequency - confidence) n_b / n|: the terms of VQ eq. 66."""
        table = self.by_class.as_bin_table()
        return np.abs(np.cumsum(table.hits - table.confidence, axis=1)) / self.n_rows


def ece_bin(table: BinTable, p: float = 1.0) -> float:
    """ECE_bin,p = (sum_b n_b / n |accuracy_b - confidence_b|^p)^(1/p) (SOFT eq. 6); NaN without rows."""
    check_order(p)
    if not table.total:
        return math.nan
    if p == 1.0:
        return table.ece()
    filled = table.counts > 0
    return float((table.counts[filled] / table.total @ table.gaps()[filled] ** p) ** (1.0 / p))


def check_order(p: float) -> None:
    """Orders below 1 are no norms."""
    if not 1.0 <= p < math.inf:
        raise ParameterError(f"the order p of a calibration error must be at least 1 and finite, got {p}")


def row_nll(rows: ScoredRows) -> Floats:
    """(n,) -log of the probability of the true class in nats, that probability raised to PROBABILITY_FLOOR."""
    return -np.log(np.maximum(rows.label_probability, PROBABILITY_FLOOR))


def row_brier(rows: ScoredRows) -> Floats:
    """(n,) sum_c (p_c - 1[y = c])^2, between 0 and 2."""
    squares = np.einsum("nc,nc->n", rows.probabilities, rows.probabilities)
    return np.asarray(squares - 2.0 * rows.label_probability + 1.0)


def class_chunks(rows: ScoredRows) -> list[slice]:
    """Rows cut so that (row, class) arrays of a part stay small, whatever the number of classes."""
    step = max(1, 16 * CHUNK_VOXELS // rows.n_classes)
    return [slice(start, start + step) for start in range(0, rows.n_rows, step)]


def _total(values: Floats) -> int:
    return int(unit_sums(np.zeros(len(values), dtype=np.int64), values, 1)[0])


def _top_label(rows: ScoredRows, n_bins: int) -> ClassTables:
    index = equal_width_index(rows.confidence, n_bins)
    counts = np.bincount(index, minlength=n_bins)
    return ClassTables(
        counts, unit_sums(index, rows.confidence, n_bins), np.bincount(index[rows.hit], minlength=n_bins)
    )


def _by_class(rows: ScoredRows, n_bins: int) -> ClassTables:
    n_cells = rows.n_classes * n_bins
    counts, units, positives = (np.zeros(n_cells, dtype=np.int64) for _ in range(3))
    offsets = n_bins * np.arange(rows.n_classes)
    for part in class_chunks(rows):
        probs, labels = np.minimum(rows.probabilities[part], 1.0), rows.labels[part]
        cells = equal_width_index(probs, n_bins) + offsets
        counts += np.bincount(cells.ravel(), minlength=n_cells)
        units += unit_sums(cells.ravel(), probs.ravel(), n_cells)
        positives += np.bincount(cells[np.arange(len(labels)), labels], minlength=n_cells)
    shape = (rows.n_classes, n_bins)
    return ClassTables(counts.reshape(shape), units.reshape(shape), positives.reshape(shape))
