"""From the per-case table to summary.json: means, intervals, comparisons, and what was run on what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from segcal.evaluation.pipelines import Pipeline
from segcal.evaluation.records import Records
from segcal.metrics import MetricSettings, direction
from segcal.metrics.ace import pooled_ace
from segcal.metrics.bins import BinTable
from segcal.metrics.bootstrap import Bootstrap
from segcal.metrics.summary import ace_json, comparison_json, estimate_json

HEADLINE = ("nll", "dsc", "ece", "ba_ece", "ace", "flip")
"""The columns of SEG Table 4, in its order; ACE is pooled, the others are means over cases."""
COMPARED = ("nll", "brier", "dsc", "ece", "ba_ece")


@dataclass(frozen=True, slots=True)
class BootstrapSettings:
    """How intervals are made."""

    n_replicates: int = 2000
    seed: int = 0
    confidence_level: float = 0.95


def summarise(
    records: Records,
    pipelines: Sequence[Pipeline],
    metrics: MetricSettings,
    bootstrap: BootstrapSettings,
    context: Mapping[str, Any],
    calibrators: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        calibrators: by pipeline, the hash of the calibrator file of every repeat, where there are files.
        context: what was run on what: kind of run, manifest, splits, versions, warnings.
    """
    columns = [c for c in records.columns if not c.startswith("n_")]
    calibrators = calibrators or {}
    drawn = _bootstrap(records, columns, metrics, bootstrap)
    return {
        "pipelines": [_pipeline(p, drawn, columns, calibrators) for p in pipelines],
        "differences": _differences(pipelines, drawn),
        "groups": {
            group: [
                _pipeline(p, inner, columns, calibrators)
                for inner in [_bootstrap(records.of_group(group), columns, metrics, bootstrap)]
                for p in pipelines
            ]
            for group in records.groups
        },
        "n_cases": len({row.case for row in records.rows}),
        "n_repeats": len(records.repeats),
        "n_bootstrap": bootstrap.n_replicates,
        "settings": {"metrics": asdict(metrics), "bootstrap": asdict(bootstrap)},
        **context,
    }


def bin_sensitivity(records: Records, metrics: MetricSettings) -> dict[str, dict[str, dict[str, float]]]:
    """ECE (mean over cases) and ACE (pooled by repeat, then averaged) of every pipeline by number of bins."""
    return {
        str(n_bins): {
            pipeline: {"ece": _mean_ece(records, pipeline, n_bins), "ace": _mean_ace(records, pipeline, n_bins)}
            for pipeline in records.pipelines
        }
        for n_bins in metrics.n_bins
    }


def _mean_ece(records: Records, pipeline: str, n_bins: int) -> float:
    """Mean over repeats of the mean over cases; regions: of the mean over channels."""
    by_repeat = []
    for repeat in records.repeats:
        tables = [r.tables[f"top_label_{n_bins}"] for r in records.rows if (r.repeat, r.pipeline) == (repeat, pipeline)]
        by_repeat.append(np.mean([[BinTable.from_array(t).ece() for t in channels] for channels in tables]))
    return float(np.mean(by_repeat))


def _mean_ace(records: Records, pipeline: str, n_bins: int) -> float:
    by_repeat = []
    for repeat in records.repeats:
        rows = [r.tables[f"top_label_{n_bins}"] for r in records.rows if (r.repeat, r.pipeline) == (repeat, pipeline)]
        by_repeat.append(float(pooled_ace(np.sum(rows, axis=0)[None])[0]))
    return float(np.mean(by_repeat))


def to_json(summary: Mapping[str, Any]) -> str:
    """Canonical text of summary.json."""
    return json.dumps(summary, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _bootstrap(records: Records, columns: Sequence[str], metrics: MetricSettings, how: BootstrapSettings) -> Bootstrap:
    scores = records.scores(columns, ace_bins=metrics.ace_bins)
    return Bootstrap(scores, n_replicates=how.n_replicates, seed=how.seed, confidence_level=how.confidence_level)


def _pipeline(
    pipeline: Pipeline, drawn: Bootstrap, columns: Sequence[str], calibrators: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    info = pipeline.fitted.info
    metrics = {column: estimate_json(drawn.estimate(pipeline.name, column)) for column in columns}
    metrics["ace"] = ace_json(drawn.ace(pipeline.name))
    return {
        "name": pipeline.name,
        "method": pipeline.method,
        "pooling": pipeline.applied,
        "n_members": pipeline.n_members,
        "calibrated": pipeline.calibrated,
        "translation_invariant": info.translation_invariant,
        "preserves": None if pipeline.each_member else info.preserves,
        "flip_applicable": pipeline.can_flip,
        "warnings": list(info.warnings),
        "calibrator_sha256": list(calibrators.get(pipeline.name, ())),
        "metrics": metrics,
    }


def _differences(pipelines: Sequence[Pipeline], drawn: Bootstrap) -> list[dict[str, Any]]:
    """Every calibrated pipeline against the uncalibrated one of its pooling, and all calibrated ones in pairs."""
    found = []
    calibrated = [p for p in pipelines if p.calibrated]
    for position, first in enumerate(calibrated):
        base = [p for p in pipelines if not p.calibrated and _same_input(p, first)]
        for second in [*base, *calibrated[position + 1 :]]:
            for column in COMPARED:
                compared = drawn.compare(first.name, second.name, column, direction(column))
                found.append(_difference(first, second, column, comparison_json(compared)))
            found.append(_difference(first, second, "ace", comparison_json(drawn.compare_ace(first.name, second.name))))
    return found


def _difference(first: Pipeline, second: Pipeline, column: str, values: Mapping[str, object]) -> dict[str, Any]:
    return {"first": first.name, "second": second.name, "metric": column, **values}


def _same_input(one: Pipeline, other: Pipeline) -> bool:
    """Whether the first, uncalibrated, is what the other starts from; averaged members start from the mean of p."""
    start = "probabilities" if other.each_member else other.pooling
    return (one.pooling, one.n_members) == (start, other.n_members)
