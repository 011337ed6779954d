"""What a reader has to know of rows before believing numbers about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from segcal.classification.metrics.rows import ScoredRows
from segcal.classification.metrics.tables import RowTables

FEW_ROWS = 10
"""A class labelled in fewer rows is called starved: a share of ten rows is known to within 16 points (one standard
error), and ten events a parameter are the least that rules of thumb ask of a logistic regression."""
NAMED = 10
"""At most so many classes are named; the others are counted."""
LARGEST_SEARCH = 200_000
"""Duplicates are looked for in at most so many rows."""


def row_warnings(before: ScoredRows, tables: Mapping[str, RowTables], names: Sequence[str]) -> list[str]:
    """Sentences about the rows under the uncalibrated scores, and about zeros under every pipeline."""
    return [
        *_starved(before, names),
        *_constant(before),
        *_duplicates(before),
        *_impossible(tables),
    ]


def fit_warnings(labels: NDArray[np.int64], names: Sequence[str], *, by_class: bool) -> list[str]:
    """What the calibrator file says of the rows of a fit.

    Args:
        labels: (n,) of the rows.
        names: of the classes.
        by_class: something was fitted for every class.
    """
    missing, rare = _starved_classes(labels, names)
    found = []
    if missing:
        found.append(f"no row of the fit is labelled {_named(missing)}")
    if rare and by_class:
        found.append(
            f"fewer than {FEW_ROWS} rows are labelled {_named(rare)}: what is fitted for such a class is mostly chance"
        )
    return found


def _starved(rows: ScoredRows, names: Sequence[str]) -> list[str]:
    missing, rare = _starved_classes(rows.labels, names)
    found = []
    if missing:
        found.append(
            f"No row is labelled {_named(missing)}: nothing is known of "
            f"{'that class' if len(missing) == 1 else 'those classes'} but how much probability it gets."
        )
    if rare:
        found.append(
            f"Fewer than {FEW_ROWS} rows are labelled {_named(rare)}: numbers of such a class are mostly chance."
        )
    return found


def _starved_classes(labels: NDArray[np.int64], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of the classes without a labelled row, and of those with too few, with their number."""
    labelled = np.bincount(labels, minlength=len(names))
    missing = [name for name, n in zip(names, labelled, strict=True) if n == 0]
    return missing, [f"{name} ({n})" for name, n in zip(names, labelled, strict=True) if 0 < n < FEW_ROWS]


def _constant(rows: ScoredRows) -> list[str]:
    if rows.n_rows < 2 or np.ptp(rows.probabilities, axis=0).max() > 0:
        return []
    return ["All rows have the same scores: no method can tell them apart, and one bin holds everything."]


def _duplicates(rows: ScoredRows) -> list[str]:
    """Saturated rows (confidence 1) may well be equal by chance; others hardly."""
    part = slice(0, LARGEST_SEARCH)
    doubtful = rows.probabilities[part][rows.confidence[part] < 1.0]
    if len(doubtful) < 2 or np.ptp(rows.probabilities, axis=0).max() == 0:
        return []
    as_bytes = np.ascontiguousarray(doubtful).view(np.dtype((np.void, doubtful.shape[1] * 8)))[:, 0]
    n_repeated = len(doubtful) - len(np.unique(as_bytes))
    if n_repeated <= 0.01 * len(doubtful):
        return []
    return [
        f"{n_repeated:,} rows repeat the scores of another row. If they are copies of one sample, they are not "
        "independent and the intervals are too narrow; give copies the same `subject`."
    ]


def _impossible(tables: Mapping[str, RowTables]) -> list[str]:
    return [
        f"{name}: {table.n_floored:,} rows give their label the probability 0; in the NLL it counts as 1.2e-38, "
        "87.3 nats each."
        for name, table in tables.items()
        if table.n_floored
    ]


def _named(names: Sequence[str]) -> str:
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest
