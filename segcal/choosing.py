"""`--method auto`: fit the sensible candidates, choose one by the validation cases, and record why.

The fits judge themselves on samples, voxel-wise methods on rows and local temperature scaling on patches. Values from
two samples differ by more than methods do, so candidates are compared on all voxels of the validation cases, which
are read once more for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from segcal.calibrators import CALIBRATORS
from segcal.calibrators.base import Preserves
from segcal.case_map import CaseMap, in_process
from segcal.counted import count
from segcal.device import resolve_device
from segcal.errors import DataError, UsageError
from segcal.evaluation.pipelines import calibrated_pipeline
from segcal.evaluation.work import MeasureWork
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import choose_split, fit_many, pipeline_settings
from segcal.manifest import Manifest, Split
from segcal.metrics import MetricSettings
from segcal.types import Pooling, Progress

Criterion: TypeAlias = Literal["nll", "ba_ece"]

PRESERVING = ("ts", "ets", "cms_ap", "cms_op", "lts_ti")
"""Keep the segmentation. All candidates are translation-invariant, so they suit logits and probabilities."""
FLIPPING = ("ms_c", "dc", "cdc")
"""May change the segmentation; candidates only when the user allows it."""
NEAR_TIE = 1e-3
"""A candidate within this share of the best value counts as equally good: the condensed fit promises no more."""
CRITERION_NAMES: dict[Criterion, str] = {"nll": "validation NLL", "ba_ece": "validation BA-ECE"}


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One fitted method that was considered.

    Attributes:
        method: registry key.
        value: the criterion on the validation cases, lower is better.
        n_parameters: identifiable ones, of all regions together; what "simpler" means.
        fitted: the calibrator itself.
    """

    method: str
    value: float
    n_parameters: int
    fitted: FittedCalibrator

    @property
    def preserves(self) -> Preserves:
        return self.fitted.info.preserves


def choose_calibrator(
    manifest: Manifest,
    *,
    pooling: Pooling = "logits",
    split: int | Split | None = None,
    criterion: Criterion = "nll",
    allow_flips: bool = False,
    device: torch.device | str = "auto",
    progress: Progress | None = None,
    case_map: CaseMap = in_process,
    **options: Any,
) -> tuple[FittedCalibrator, tuple[Candidate, ...]]:
    """Fit all candidates from one read of the data, measure them in one read of the validation cases, choose one.

    The rule: candidates whose value is at most 0.1 % above the best one count as equally good; of these the one with
    the fewest parameters is chosen, of several with as few the one with the lowest value. The choice and its reason
    are recorded in `info.choice` of the returned calibrator.

    Args:
        manifest: the data.
        pooling: how members are pooled.
        split: as in `fit_many`; it must have validation cases.
        criterion: "nll", the mean over all validation voxels, as tuning estimates it; or "ba_ece", the mean over the
            validation cases, as `evaluate` reports it.
        allow_flips: also consider methods that may change the segmentation.
        device: where voxels are processed.
        progress: told about cases and trials.
        case_map: where the cases are worked on; here, one after the other, by default.
        options: further options of `fit_many`.

    Returns:
        The chosen calibrator, and all candidates in the order they are listed in.

    Raises:
        UsageError: there is no validation case to choose by.
    """
    methods = candidate_methods(manifest, allow_flips=allow_flips)
    chosen_split = _split_with_validation(manifest, split, pooling, methods, options)
    on_device = resolve_device(device, sums=True)
    fitted = fit_many(
        manifest,
        methods,
        pooling=pooling,
        split=chosen_split,
        device=on_device,
        progress=progress,
        case_map=case_map,
        **options,
    )
    values = _measured(manifest, sorted(chosen_split.validation), fitted, criterion, on_device, progress, case_map)
    candidates = tuple(
        Candidate(method, _defined(value, method, criterion), _n_parameters(manifest, method), fitted[method])
        for method, value in values.items()
    )
    best = simplest_of_the_best(candidates)
    choice = {
        "criterion": criterion,
        "constraint": "none" if allow_flips else "decision-preserving",
        "candidates": {one.method: {"value": one.value, "parameters": one.n_parameters} for one in candidates},
        "near_tie": NEAR_TIE,
        "reason": reason(best, candidates, criterion, allow_flips=allow_flips),
    }
    info = best.fitted.info.model_copy(update={"choice": choice})
    return FittedCalibrator(best.fitted.calibrator, info), candidates


def candidate_methods(manifest: Manifest, *, allow_flips: bool) -> tuple[str, ...]:
    """What is worth fitting on these data.

    With two classes, and so in every region, there is one margin only: cms_op is then the same map as cms_ap and
    is left out.
    """
    methods = PRESERVING + (FLIPPING if allow_flips else ())
    return tuple(method for method in methods if not (_is_binary(manifest) and method == "cms_op"))


def simplest_of_the_best(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate the rule of `choose_calibrator` chooses."""
    best = min(candidate.value for candidate in candidates)
    as_good = [candidate for candidate in candidates if candidate.value <= best * (1 + NEAR_TIE)]
    return min(as_good, key=lambda candidate: (candidate.n_parameters, candidate.value))


def reason(chosen: Candidate, candidates: Sequence[Candidate], criterion: Criterion, *, allow_flips: bool) -> str:
    """Why `chosen` was chosen, in one sentence that names every candidate with its value."""
    best = min(candidates, key=lambda candidate: candidate.value)
    if chosen is best:
        why = f"has the lowest {CRITERION_NAMES[criterion]}"
    else:
        above = 0.0 if best.value == 0 else 100 * (chosen.value / best.value - 1)
        simpler = "fewer" if chosen.n_parameters < best.n_parameters else "no more"
        why = (
            f"is within {100 * NEAR_TIE:g} % of the lowest {CRITERION_NAMES[criterion]} ({above:.2g} % above "
            f"{best.method}) with {simpler} parameters ({chosen.n_parameters} against {best.n_parameters})"
        )
    kind = "methods" if allow_flips else "methods that keep the segmentation"
    listed = ", ".join(f"{candidate.method} {candidate.value:.6g}" for candidate in candidates)
    return f"Of the {kind}, {chosen.method} {why}: {listed}."


def _split_with_validation(
    manifest: Manifest,
    split: int | Split | None,
    pooling: Pooling,
    methods: Sequence[str],
    options: Mapping[str, Any],
) -> Split:
    """The same split `fit_many` would take, drawn if there is none; an error if nothing is left to choose by."""
    subjects = {case.subject_key for case in manifest.labelled_cases}
    if split is None and not manifest.splits and len(subjects) < 2:
        raise UsageError(
            f"manifest {manifest.name!r}: `auto` chooses by validation cases, but of "
            f"{count(len(subjects), 'labelled subject')} none is to spare. "
            "Add labelled cases, or name one method, for example `ts`."
        )
    given, seed = options.get("settings"), options.get("seed")
    pipelines = [pipeline_settings(method, pooling, given, seed=seed) for method in methods]
    chosen = choose_split(manifest, split, pipelines, pipelines[0].seed)
    if not chosen.validation:
        raise UsageError(
            f"manifest {manifest.name!r}: `auto` chooses by validation cases, but the split has none. "
            "Give a split with some, or name one method, for example `ts`."
        )
    return chosen


def _measured(
    manifest: Manifest,
    ids: Sequence[str],
    fitted: Mapping[str, FittedCalibrator],
    criterion: Criterion,
    device: torch.device,
    progress: Progress | None,
    case_map: CaseMap,
) -> dict[str, float | None]:
    """The criterion by method on all voxels of the cases, each read once; None where it is undefined."""
    pipelines = [calibrated_pipeline(one, name=method) for method, one in fitted.items()]
    settings = MetricSettings(manifest.class_names)
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in fitted}  # value and weight of each case
    # Voxels outside the crop are no business of a fit's NLL, but `evaluate` counts them by default.
    work = MeasureWork(manifest, tuple(pipelines), settings, device, count_outside=criterion == "ba_ece")
    with closing(case_map(work, ids)) as outcomes:
        for done, outcome in enumerate(outcomes, start=1):
            for method, result in outcome.result().results.items():
                weight = result.values["n_voxels"] if criterion == "nll" else 1.0
                found[method].append((result.values[criterion], weight))
            if progress is not None:
                progress("measuring candidates", done, len(ids))
    return {method: _mean_of_defined(values) for method, values in found.items()}


def _mean_of_defined(values: Sequence[tuple[float, float]]) -> float | None:
    defined = [(value, weight) for value, weight in values if math.isfinite(value)]
    total = math.fsum(weight for _, weight in defined)
    return math.fsum(value * weight for value, weight in defined) / total if total else None


def _defined(value: float | None, method: str, criterion: Criterion) -> float:
    if value is None or not math.isfinite(value):
        raise DataError(
            f"{method}: the {CRITERION_NAMES[criterion]} is undefined; do the validation cases have labelled voxels?"
        )
    return value


def _n_parameters(manifest: Manifest, method: str) -> int:
    _, identifiable = CALIBRATORS[method].parameter_counts(2 if manifest.has_regions else manifest.n_classes)
    return identifiable * (manifest.n_classes if manifest.has_regions else 1)


def _is_binary(manifest: Manifest) -> bool:
    return manifest.has_regions or manifest.n_classes == 2
