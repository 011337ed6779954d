"""Metrics of plain classifiers. METRICS names all of them; `measure` computes them for labelled rows.

rows = ScoredRows.of(probabilities, labels)
measure(rows)["ece"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from segcal.classification.metrics.calibration import (
    debiased_error,
    expected_error,
    ks_error,
    label_binned_error,
    marginal_error,
    sweep_error,
)
from segcal.classification.metrics.ranking import aurc, excess_aurc, ood_auroc, ood_fpr
from segcal.classification.metrics.rows import ScoredRows
from segcal.classification.metrics.tables import N_BINS, RowTables
from segcal.errors import ParameterError

Value = Callable[[ScoredRows, int], float]


@dataclass(frozen=True, slots=True)
class RowMetric:
    """One number of labelled rows.

    Attributes:
        words: what it is, as a sentence says it.
        better: which way it gets better.
        value: from rows and the number of bins; None where `RowTables`, the additive state, gives it.
    """

    words: str
    better: Literal["lower", "higher"] = "lower"
    value: Value | None = None

    @property
    def additive(self) -> bool:
        """Whether tables of batches add up to the metric of all rows; otherwise it needs all rows at once."""
        return self.value is None


METRICS: dict[str, RowMetric] = {
    "accuracy": RowMetric("share of rows whose largest probability is that of the label", "higher"),
    "nll": RowMetric("mean negative log-likelihood of the label, nats"),
    "brier": RowMetric("mean squared distance between probabilities and truth, 0 to 2"),
    "ece": RowMetric("top-label ECE, equal-width bins, p = 1"),
    "ece_2": RowMetric("top-label ECE, equal-width bins, p = 2"),
    "mce": RowMetric("largest gap of a non-empty bin, top label, equal width"),
    "ace": RowMetric("unweighted mean gap of the non-empty bins, top label, equal width"),
    "classwise_ece": RowMetric("mean over classes of the ECE of each class's own probability"),
    "ecce": RowMetric("cumulative error, VQ eq. 66: sum over bins of |cumulated gaps|, mean over classes"),
    "ecce_max": RowMetric("cumulative error, largest |cumulated gap| instead of the sum, mean over classes"),
    "adaptive_ece": RowMetric(
        "top-label ECE, equal-mass bins, p = 1",
        value=lambda rows, b: expected_error(rows.confidence, rows.hit, n_bins=b, binning="mass"),
    ),
    "adaptive_ece_2": RowMetric(
        "top-label ECE, equal-mass bins, p = 2 (the ECE of SOFT)",
        value=lambda rows, b: expected_error(rows.confidence, rows.hit, n_bins=b, p=2.0, binning="mass"),
    ),
    "ece_lb": RowMetric(
        "label-binned ECE, equal-width bins, p = 1",
        value=lambda rows, b: label_binned_error(rows.confidence, rows.hit, n_bins=b),
    ),
    "ece_lb_2": RowMetric(
        "label-binned ECE, equal-width bins, p = 2",
        value=lambda rows, b: label_binned_error(rows.confidence, rows.hit, n_bins=b, p=2.0),
    ),
    "debiased_ce": RowMetric(
        "top-label error of order 2 less the noise of the bins, equal mass",
        value=lambda rows, b: debiased_error(rows.confidence, rows.hit, n_bins=b),
    ),
    "marginal_ce": RowMetric(
        "root mean square over classes of their debiased errors, equal mass",
        value=lambda rows, b: marginal_error(rows, n_bins=b),
    ),
    "sweep_ce": RowMetric(
        "mean-sweep error, p = 2: as many equal-mass bins as keep accuracy rising",
        value=lambda rows, _: sweep_error(rows.confidence, rows.hit),
    ),
    "ks_error": RowMetric(
        "largest distance of the cumulated confidences and hits, without bins",
        value=lambda rows, _: ks_error(rows.confidence, rows.hit),
    ),
    "aurc": RowMetric(
        "mean error rate of the most confident rows over all coverages",
        value=lambda rows, _: aurc(rows.confidence, (~rows.hit).astype(float)),
    ),
    "e_aurc": RowMetric(
        "AURC less that of the best ranking with the same error rate",
        value=lambda rows, _: excess_aurc(rows.confidence, ~rows.hit),
    ),
}
"""Every metric of labelled rows. A new one needs its function, a line here and its test."""

OOD_METRICS: dict[str, RowMetric] = {
    "ood_auroc": RowMetric("AUROC of out-of-distribution rows (positive), score minus confidence", "higher"),
    "ood_fpr95": RowMetric("share of known rows called foreign where 95 % of the foreign ones are found"),
}
"""Metrics of known and foreign rows together; they need the key `ood`."""

LOCAL_METRICS: dict[str, RowMetric] = {
    "lce": RowMetric("local error, VQ eq. 67: mean over rows of the error among rows with similar features"),
    "mlce": RowMetric("local error, VQ eq. 68: the largest of them, up to 2"),
}
"""Metrics of rows with features (segcal.classification.metrics.local); time grows with the square of the rows."""


def measure(rows: ScoredRows, names: Iterable[str] | None = None, *, n_bins: int = N_BINS) -> dict[str, float]:
    """Metrics of rows by name; all of METRICS by default."""
    wanted = list(METRICS) if names is None else list(names)
    for name in wanted:
        if name not in METRICS:
            raise ParameterError(f"no metric {name!r}; there are {', '.join(METRICS)}")
    tables: Mapping[str, float] = {}
    if any(METRICS[name].additive for name in wanted):
        tables = RowTables.of(rows, n_bins).values()
    found = {}
    for name in wanted:
        value = METRICS[name].value
        found[name] = tables[name] if value is None else value(rows, n_bins)
    return found


def measure_ood(confidence: ArrayLike, ood: ArrayLike) -> dict[str, float]:
    """OOD_METRICS of confidences of known and foreign rows; NaN when there is only one of both."""
    scores, foreign = np.asarray(confidence, dtype=np.float64), np.asarray(ood, dtype=np.bool_)
    return {"ood_auroc": ood_auroc(scores, foreign), "ood_fpr95": ood_fpr(scores, foreign)}


__all__ = [
    "LOCAL_METRICS",
    "METRICS",
    "OOD_METRICS",
    "RowMetric",
    "RowTables",
    "ScoredRows",
    "measure",
    "measure_ood",
]
