"""How good are the probabilities of a classifier, before and after calibration? Numbers, intervals, files."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import segcal
from segcal.calibrators.base import Preserves
from segcal.classification.data import ScoreData
from segcal.classification.intervals import COMPARED, LOCAL_REASON, RowBootstrap, foreign_estimates
from segcal.classification.metrics import LOCAL_METRICS, METRICS, RowTables, ScoredRows, measure_ood
from segcal.classification.metrics.local import local_errors
from segcal.classification.metrics.tables import N_BINS, row_nll
from segcal.classification.principal import Standardiser, principal_axes
from segcal.classification.row_warnings import row_warnings
from segcal.classification.samples import Samples
from segcal.classification.tables import class_csv, latex_table, markdown_table
from segcal.errors import DataError, UsageError
from segcal.evaluation.summary import BootstrapSettings, to_json
from segcal.evaluation.tables import differences_csv
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write, check_folder, write_text_atomic
from segcal.io.own_files import PAGE_FILE, check_replaceable
from segcal.metrics.summary import json_number

UNCALIBRATED = "uncalibrated"
MOST_LOCAL_ROWS = 20_000
"""Local errors look at all pairs of rows; with more rows than this they are left out, and the summary says so."""
SUMMARY_FILE, BINS_FILE, ROWS_FILE = "summary.json", "bins.npz", "rows.npz"
RESULT_FILES = (
    *(SUMMARY_FILE, BINS_FILE, ROWS_FILE, PAGE_FILE),
    *("classes.csv", "differences.csv", "table.md", "table.tex"),
)
RUN = "classify"
"""What summary.json says of who wrote it."""


@dataclass(frozen=True, slots=True, eq=False)
class RowPipeline:
    """One way from scores to probabilities, with what was made of the rows at hand.

    Attributes:
        name: of its row in every table.
        method: registry key.
        probabilities: (n, C) of all rows, foreign ones included.
        preserves, translation_invariant: what the method promises.
        warnings: what its calibrator file warns of.
        sha256: of the calibrator file; empty for the uncalibrated scores.
    """

    name: str
    method: str
    probabilities: Tensor
    preserves: Preserves
    translation_invariant: bool
    warnings: tuple[str, ...] = ()
    sha256: str = ""

    @property
    def calibrated(self) -> bool:
        return bool(self.sha256)


@dataclass(frozen=True, slots=True, eq=False)
class RowEvaluation:
    """Everything an evaluation found.

    Attributes:
        summary: the content of summary.json.
        bins: `top_label` (pipeline, 3, B) and `classwise` (pipeline, class, 3, B): counts, sums of scores, hits.
        rows: `label` (row,), `confidence`, `prediction` and `nll` (pipeline, row) of the known rows.
    """

    summary: Mapping[str, Any]
    bins: Mapping[str, NDArray[np.float64]]
    rows: Mapping[str, NDArray[Any]]

    def save(self, folder: Path, *, page: bool = True) -> None:
        """Write summary.json, bins.npz, rows.npz, classes.csv, differences.csv, table.md, table.tex, report.html."""
        write_text_atomic(folder / SUMMARY_FILE, to_json(self.summary))  # first: it says whose folder this is
        (folder / PAGE_FILE).unlink(missing_ok=True)  # it showed other numbers
        for name, arrays in ((BINS_FILE, self.bins), (ROWS_FILE, self.rows)):
            with atomic_write(folder / name) as temporary:
                write_npz(temporary, arrays)
        write_text_atomic(folder / "classes.csv", class_csv(self.summary))
        write_text_atomic(folder / "differences.csv", differences_csv(self.summary))
        write_text_atomic(folder / "table.md", markdown_table(self.summary))
        write_text_atomic(folder / "table.tex", latex_table(self.summary))
        if page:
            from segcal.report.page import write_report  # not above: it brings matplotlib

            write_report(folder, folder / PAGE_FILE)


def check_results_folder(folder: Path) -> None:
    """Say before the work that results cannot be written into a folder, or would replace files of somebody else."""
    check_folder(folder)
    check_replaceable(folder, RESULT_FILES, record=SUMMARY_FILE, ours=lambda summary: summary.get("run") == RUN)


def evaluate_pipelines(
    data: ScoreData,
    pipelines: Sequence[RowPipeline] = (),
    *,
    class_names: Sequence[str] = (),
    n_bins: int = N_BINS,
    bootstrap: BootstrapSettings | None = None,
    warnings: Sequence[str] = (),
) -> RowEvaluation:
    """Measure pipelines and the uncalibrated scores on the same labelled rows.

    Args:
        data: rows with labels; rows marked `ood` count only for the out-of-distribution metrics.
        pipelines: in the order of the tables.
        class_names: by default `0`, `1`, ...
        n_bins: bins of all binned errors.
        bootstrap: how intervals are made.
        warnings: further ones for the report.
    """
    how = bootstrap or BootstrapSettings()
    if data.samples.labels is None:
        raise DataError(f"{data.name}: has no labels, and an evaluation needs one per row; add the key `labels`.")
    every = [_uncalibrated(data), *pipelines]
    _check_names([p.name for p in every])
    known = np.ones(data.samples.n_rows, dtype=bool) if data.ood is None else ~data.ood
    labels = data.known.known_labels
    scored = {p.name: ScoredRows.of(p.probabilities.numpy()[known], labels.numpy()) for p in every}
    drawn = RowBootstrap(scored, UNCALIBRATED, data.known_subjects, n_bins=n_bins, how=how)
    tables = {name: RowTables.of(rows, n_bins) for name, rows in scored.items()}
    names = _class_names(class_names, data.samples.n_classes)
    local = _local_metrics(data.known, scored, n_bins)
    summary = {
        "run": RUN,
        "pipelines": [_entry(p, drawn, tables[p.name], scored[p.name], data, names, local[p.name]) for p in every],
        "differences": _differences(every, drawn),
        "n_rows": int(known.sum()),
        "n_cases": int(known.sum()),
        "n_repeats": 1,
        "n_bootstrap": how.n_replicates,
        "settings": {"metrics": {"n_bins": n_bins}, "bootstrap": asdict(how)},
        "resampled": {"what": drawn.units.what, "n": drawn.units.n_independent, "n_units": drawn.units.n_units},
        "data": {
            "name": data.name,
            "sha256": data.sha256,
            "kind": data.samples.kind,
            "n_ood": int((~known).sum()),
        },
        "classes": list(names),
        "groups": {},
        "warnings": [*warnings, *row_warnings(scored[UNCALIBRATED], tables, names)],
        "versions": versions(),
    }
    return RowEvaluation(summary, _bins(tables), _rows(scored))


def versions() -> dict[str, str]:
    """Of the software that decides the numbers."""
    return {
        "numpy": np.__version__,
        "python": platform.python_version(),
        "segcal": segcal.__version__,
        "torch": torch.__version__,
    }


def _uncalibrated(data: ScoreData) -> RowPipeline:
    probabilities = torch.softmax(data.samples.logits, dim=1)
    return RowPipeline(UNCALIBRATED, "identity", probabilities, "order", True)


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two pipelines are both called {name}; give one of them another name (NAME=FILE)")


def _class_names(given: Sequence[str], n_classes: int) -> tuple[str, ...]:
    if not given:
        return tuple(str(c) for c in range(n_classes))
    if len(given) != n_classes or len(set(given)) != n_classes:
        raise UsageError(f"{len(set(given))} different class names were given for {n_classes} classes")
    return tuple(given)


def _entry(
    pipeline: RowPipeline,
    drawn: RowBootstrap,
    tables: RowTables,
    rows: ScoredRows,
    data: ScoreData,
    names: Sequence[str],
    local: Mapping[str, Any],
) -> dict[str, Any]:
    metrics = {metric: drawn.estimate(pipeline.name, metric) for metric in (*METRICS, "flip")}
    if data.ood is not None:
        confidence = np.minimum(pipeline.probabilities.numpy().max(axis=1), 1.0)
        values = measure_ood(confidence, data.ood)
        metrics |= foreign_estimates(confidence, data.ood, data.subjects, values, drawn.how)
    metrics |= local
    return {
        "name": pipeline.name,
        "method": pipeline.method,
        "calibrated": pipeline.calibrated,
        "translation_invariant": pipeline.translation_invariant,
        "preserves": pipeline.preserves,
        "flip_applicable": pipeline.calibrated and pipeline.preserves is None,
        "warnings": list(pipeline.warnings),
        "calibrator_sha256": [pipeline.sha256] if pipeline.sha256 else [],
        "n_floored": tables.n_floored,
        "metrics": metrics,
        "classes": _class_entries(tables, rows, names),
    }


def _local_metrics(known: Samples, scored: Mapping[str, ScoredRows], n_bins: int) -> dict[str, dict[str, Any]]:
    """LCE and MLCE in one feature space for all pipelines: the principal components of the features measured."""
    if known.features is None:
        return {name: {} for name in scored}
    if known.n_rows > MOST_LOCAL_ROWS:
        reason = f"not measured: {known.n_rows:,} rows, and the time grows with their square"
        return {name: dict.fromkeys(LOCAL_METRICS, _without(None, reason)) for name in scored}
    points = Standardiser.fit(known.features)(known.features, "lce")
    points = points @ principal_axes(points).to(points.dtype)
    found = {}
    for name, rows in scored.items():
        errors = local_errors(
            torch.as_tensor(rows.probabilities, device="cpu"),
            torch.as_tensor(rows.labels, device="cpu"),
            points,
            n_bins=n_bins,
        )
        found[name] = {"lce": _without(errors.lce, LOCAL_REASON), "mlce": _without(errors.mlce, LOCAL_REASON)}
    return found


def _without(value: float | None, reason: str) -> dict[str, Any]:
    """A number that has no interval, as summary.json has it."""
    return {"mean": None if value is None else json_number(value), "low": None, "high": None, "reason": reason}


def _class_entries(tables: RowTables, rows: ScoredRows, names: Sequence[str]) -> list[dict[str, Any]]:
    table = tables.by_class.as_bin_table()
    labelled, sums = table.hits.sum(axis=1), table.confidence.sum(axis=1)
    predicted = np.bincount(rows.prediction, minlength=rows.n_classes)
    errors = tables.classwise()
    return [
        {
            "name": name,
            "n_labelled": int(labelled[c]),
            "n_predicted": int(predicted[c]),
            "mean_probability": float(sums[c] / tables.n_rows),
            "ece": float(errors[c]),
        }
        for c, name in enumerate(names)
    ]


def _differences(pipelines: Sequence[RowPipeline], drawn: RowBootstrap) -> list[dict[str, Any]]:
    """Every calibrated pipeline against the uncalibrated scores, and all calibrated ones in pairs."""
    found = []
    calibrated = [p.name for p in pipelines if p.calibrated]
    for position, first in enumerate(calibrated):
        for second in (UNCALIBRATED, *calibrated[position + 1 :]):
            found += [drawn.compare(first, second, metric) for metric in COMPARED]
    return found


def _bins(tables: Mapping[str, RowTables]) -> dict[str, NDArray[np.float64]]:
    return {
        "top_label": np.stack([t.top_label.as_bin_table().as_array() for t in tables.values()]),
        "classwise": np.stack([t.by_class.as_bin_table().as_array() for t in tables.values()]),
    }


def _rows(scored: Mapping[str, ScoredRows]) -> dict[str, NDArray[Any]]:
    every = list(scored.values())
    return {
        "label": every[0].labels,
        "confidence": np.stack([rows.confidence for rows in every]),
        "prediction": np.stack([rows.prediction for rows in every]),
        "nll": np.stack([row_nll(rows) for rows in every]),
    }
