"""Fit, apply and evaluate on data files: what `segcal classify` does, for Python.

data = load_data("validation.npz")
fitted = fit_methods(data, ["ts", "dc"], seed=0)
evaluate("test.npz", fitted).save(Path("results"))
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from segcal.classification.data import ScoreData, check_not_input, data_from_arrays, load_data, write_calibrated
from segcal.classification.evaluation import RowEvaluation, RowPipeline, evaluate_pipelines, versions
from segcal.classification.files import FittedMethod, fit, method_named, settings_of
from segcal.classification.metrics.tables import N_BINS
from segcal.errors import DataError, UsageError
from segcal.evaluation.summary import BootstrapSettings
from segcal.io.atomic import write_text_atomic
from segcal.io.own_files import check_replaceable
from segcal.types import Progress

Data: TypeAlias = ScoreData | str | Path | Mapping[str, NDArray[Any]]

RECORD_FILE, RUN = "run.json", "classify apply"
PENALISED = ("lambda_", "mu", "trials", "validation", "validation_share")
"""Settings that only say something to a method with a regulariser, though others may accept them."""


def as_data(data: Data) -> ScoreData:
    """Data that was read, a path, or arrays by name."""
    if isinstance(data, ScoreData):
        return data
    return data_from_arrays(data) if isinstance(data, Mapping) else load_data(data)


def fit_methods(
    data: Data,
    methods: Sequence[str],
    *,
    validation: Data | float | None = None,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, FittedMethod]:
    """Fit methods on the known, labelled rows of data.

    Args:
        data: rows with labels; those marked `ood` are left out.
        methods: registry keys; each once.
        validation: rows to tune on, or the share of `data` to draw for it.
        classes: names of the classes; `0`, `1`, ... without.
        seed: of everything that is drawn.
        settings: of the methods (`lambda_`, `mu`, `trials`, `bins`, ...); each goes to the methods that have it.
        progress: told after every method.

    Raises:
        UsageError: an unknown method, or a setting that no method has.
    """
    source = as_data(data)
    if source.samples.labels is None:
        raise DataError(f"{source.name}: has no labels, and a fit needs one per row; add the key `labels`.")
    for name in methods:
        if method_named(name).needs_features and source.samples.features is None:
            raise DataError(
                f"{source.name}: {name} looks at the features of the penultimate layer, and there are none; add the "
                "key `features`, (n, d), or choose a method that works on scores alone."
            )
    wanted = {name: {**(settings or {}), **_validation(validation)} for name in methods}
    chosen = {name: {k: v for k, v in given.items() if takes(name, k)} for name, given in wanted.items()}
    for name in {key for given in wanted.values() for key in given}:
        if not any(name in given for given in chosen.values()):
            raise UsageError(f"`{name.rstrip('_')}` means nothing for {', '.join(methods)}; leave it out")
    fitted = {}
    for k, name in enumerate(methods):
        made = fit(name, source.known, classes=classes, seed=seed, **chosen[name])
        info = made.info.model_copy(update={"manifest_sha256": source.sha256})
        fitted[name] = replace(made, info=info)
        if progress is not None:
            progress("fit", k + 1, len(methods))
    return fitted


def takes(method: str, setting: str) -> bool:
    """Whether a setting says something to a method."""
    kind = method_named(method)
    core = getattr(kind, "core", None)
    if setting in PENALISED and core is not None and not getattr(core, "penalised", False):
        return False
    return setting in settings_of(kind)


def apply(fitted: FittedMethod, data: Data, out: str | Path) -> dict[str, Any]:
    """Write calibrated probabilities of all rows, foreign ones included, in the layout of the input, and run.json.

    Returns:
        The content of run.json; `output` is the name of what was written into `out`.
    """
    folder = Path(out)
    if isinstance(data, str | Path):
        check_not_input(Path(data), folder)
    check_replaceable(folder, [RECORD_FILE], record=RECORD_FILE, ours=lambda record: record.get("run") == RUN)
    source = as_data(data)
    probabilities = fitted.probabilities(source.samples).numpy()
    place = write_calibrated(source, probabilities, folder)
    changed = int((probabilities.argmax(1) != source.samples.decision.numpy()).sum())
    record = {
        "run": RUN,
        "method": fitted.info.method,
        "calibrator_sha256": file_sha256(fitted),
        "data": {"name": source.name, "sha256": source.sha256, "kind": source.samples.kind, "layout": source.layout},
        "n_rows": source.samples.n_rows,
        "n_changed": changed,
        "output": place.name,
        "warnings": list(fitted.info.warnings),
        "versions": versions(),
    }
    write_text_atomic(folder / RECORD_FILE, json.dumps(record, sort_keys=True, indent=1, ensure_ascii=False) + "\n")
    return record


def evaluate(
    data: Data,
    calibrators: Mapping[str, FittedMethod] | Sequence[FittedMethod] = (),
    *,
    classes: Sequence[str] | None = None,
    n_bins: int = N_BINS,
    bootstrap: BootstrapSettings | None = None,
    progress: Progress | None = None,
) -> RowEvaluation:
    """Measure calibrators and the uncalibrated scores on labelled rows, with intervals.

    Args:
        data: rows with labels; rows marked `ood` count only for the out-of-distribution metrics.
        calibrators: by the name of their row, or in order, named by their methods.
        classes: names of the classes; those of the calibrators by default.
        n_bins: bins of all binned errors.
        bootstrap: replicates, seed and level of the intervals.
        progress: told after every calibrator.
    """
    source = as_data(data)
    named = dict(calibrators) if isinstance(calibrators, Mapping) else named_by_method(calibrators)
    pipelines, warnings = [], []
    for k, (name, fitted) in enumerate(named.items()):
        info = fitted.info
        pipelines.append(
            RowPipeline(
                name,
                info.method,
                fitted.probabilities(source.samples, classes=classes),
                info.preserves,
                info.translation_invariant,
                tuple(info.warnings),
                file_sha256(fitted),
            )
        )
        if info.manifest_sha256 == source.sha256:
            warnings.append(f"{name} was fitted on these very rows: its numbers say nothing about new ones.")
        if progress is not None:
            progress("calibrate", k + 1, len(named))
    names = classes or next((fitted.info.classes for fitted in named.values()), ())
    return evaluate_pipelines(
        source, pipelines, class_names=names, n_bins=n_bins, bootstrap=bootstrap, warnings=warnings
    )


def named_by_method(calibrators: Sequence[FittedMethod]) -> dict[str, FittedMethod]:
    """By their methods; two of one method need names of their own."""
    named: dict[str, FittedMethod] = {}
    for fitted in calibrators:
        if fitted.info.method in named:
            raise UsageError(f"two calibrators are both called {fitted.info.method}; name one of them: NAME=FILE")
        named[fitted.info.method] = fitted
    return named


def file_sha256(fitted: FittedMethod) -> str:
    """Hash of the calibrator file."""
    return hashlib.sha256(fitted.content).hexdigest()


def _validation(given: Data | float | None) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, float | int | np.floating):
        if not 0 < given < 1:
            raise UsageError(f"a validation share must lie between 0 and 1, got {given}")
        return {"validation_share": float(given)}
    rows = as_data(given)
    if rows.samples.labels is None:
        raise DataError(f"{rows.name}: has no labels, and validation needs one per row; add the key `labels`.")
    return {"validation": rows.known}
