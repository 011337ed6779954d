"""Fitting one method on one channel's samples: what is tuned, which solver, what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.affine import AffineCalibrator
from segcal.calibrators.ensemble_temperature import EnsembleTemperatureScaling
from segcal.case_map import CaseMap, in_process
from segcal.errors import UsageError
from segcal.fitting.adam import AdamSettings, solve_adam
from segcal.fitting.exact import ExactSolver, Solution
from segcal.fitting.likelihood import Likelihood, mean_nll
from segcal.fitting.local import LocalFit, fit_local
from segcal.fitting.mixture import solve_mixture
from segcal.fitting.patches import PatchSample
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import Rows
from segcal.settings import PipelineSettings
from segcal.tuning import Objective, Report

OnTrial = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """The samples of one channel (the only one, or a region).

    Attributes:
        class_names: for warnings.
        rows, validation_rows: None when no voxel-wise method is fitted, or there is no validation case.
        patches, validation_patches: likewise for local temperature scaling.
    """

    class_names: tuple[str, ...]
    rows: Rows | None
    validation_rows: Rows | None
    patches: PatchSample | None
    validation_patches: PatchSample | None


@dataclass(frozen=True, slots=True, eq=False)
class MethodFit:
    """One fitted method.

    Attributes:
        solution: the calibrator and the evidence for it.
        values: the hyper-parameters it was fitted with.
        fit_nll, validation_nll: mean NLL over all voxels behind the samples.
    """

    solution: Solution
    values: Mapping[str, float]
    fit_nll: float
    validation_nll: float | None

    @property
    def penalty(self) -> Penalty:
        return Penalty(self.values.get("lambda", 0.0), self.values.get("mu", 0.0))


@dataclass(frozen=True, slots=True)
class TuningJob:
    """Where trials are kept and reported.

    Attributes:
        problem: identifies data and settings in the storage file.
        storage: journal file, None for memory only.
        on_trial: told about every finished trial.
        case_map: where they run.
    """

    problem: str
    storage: Path | None = None
    on_trial: OnTrial | None = None
    case_map: CaseMap = in_process


def tuned_names(settings: PipelineSettings, n_classes: int) -> list[str]:
    """The hyper-parameters a pipeline searches over; those the settings fix are left out."""
    method = CALIBRATORS[settings.method]
    names = []
    if method.spatial:
        return ["alpha", "learning_rate", "patience"]
    if issubclass(method, AffineCalibrator) and method.penalised:
        # With two classes W = diag + 1 c' says every map at no cost, so lambda means nothing (METHODS 2).
        if settings.lambda_ is None and n_classes > 2:
            names.append("lambda")
        if settings.mu is None:
            names.append("mu")
    if settings.solver == "adam" and issubclass(method, AffineCalibrator):
        names += ["learning_rate", "patience"]
    return names


def goes_on_to_all_voxels(settings: PipelineSettings) -> bool:
    """Whether `--full` and `--polish` do anything: Adam stops before the optimum they move, the identity has none."""
    return settings.solver == "exact" and settings.method != "identity"


def fit_method(settings: PipelineSettings, channel: Channel, job: TuningJob, *, device: torch.device) -> MethodFit:
    """Tune and fit one method on one channel."""
    method = CALIBRATORS[settings.method]
    if method.spatial:
        return _fit_local(settings, channel, job, device)
    assert channel.rows is not None
    validation = None if channel.validation_rows is None else Likelihood(channel.validation_rows)
    if not issubclass(method, AffineCalibrator):
        solution = _fit_simple(method, channel.rows)
        return _judged(solution, {}, channel.rows, validation)
    solve: Solve = _Exact(method, channel.rows, channel.class_names)
    if settings.solver == "adam":
        solve = _Adam(method, channel.rows, _needed(validation, settings), channel.class_names)
    values = _tuned(settings, channel, job, lambda fixed: _Judge(solve, _needed(validation, settings), fixed))
    return _judged(solve(values, _ignore), values, channel.rows, validation)


def _fit_simple(method: type[Calibrator], rows: Rows) -> Solution:
    if method is EnsembleTemperatureScaling:
        return solve_mixture(rows)
    return Solution(method.identity(rows.n_classes), float("nan"), 0.0)


Solve = Callable[[Mapping[str, float], Report], Solution]


@dataclass(eq=False)
class _Exact:
    """Solves for a penalty; picklable, so that trials can run elsewhere."""

    method: type[AffineCalibrator]
    rows: Rows
    class_names: Sequence[str]

    def __call__(self, values: Mapping[str, float], report: Report) -> Solution:
        solver, anchor = self._prepared
        return solver.solve(Penalty(values.get("lambda", 0.0), values.get("mu", 0.0)), start=anchor)

    @cached_property
    def _prepared(self) -> tuple[ExactSolver, AffineCalibrator]:
        solver = ExactSolver(self.method, self.rows, class_names=self.class_names)
        # Every trial starts from the same solution: few steps, and no trial depends on which ones ran before.
        anchor = solver.solve(Penalty(1e-3, 1e-3) if self.method.penalised else Penalty()).calibrator
        assert isinstance(anchor, AffineCalibrator)
        return solver, anchor

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_prepared"}


@dataclass(frozen=True, slots=True, eq=False)
class _Adam:
    """Solves for a penalty, learning rate and patience by the published protocol."""

    method: type[AffineCalibrator]
    rows: Rows
    validation: Likelihood
    class_names: Sequence[str]

    def __call__(self, values: Mapping[str, float], report: Report) -> Solution:
        penalty = Penalty(values.get("lambda", 0.0), values.get("mu", 0.0))
        chosen = AdamSettings(values["learning_rate"], int(values["patience"]))
        return solve_adam(
            self.method, self.rows, self.validation, penalty, chosen, class_names=self.class_names, on_epoch=report
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Judge:
    """The objective of a trial: validation NLL of what the solver finds."""

    solve: Solve
    validation: Likelihood
    fixed: Mapping[str, float]

    def __call__(self, values: Mapping[str, float], report: Report) -> float:
        return self.validation.mean(self.solve({**self.fixed, **values}, report).calibrator)


@dataclass(frozen=True, slots=True, eq=False)
class _Local:
    """Trains local temperature scaling."""

    train: PatchSample
    validation: PatchSample
    translation_invariant: bool
    seed: int
    device: torch.device

    def __call__(self, values: Mapping[str, float], report: Report) -> LocalFit:
        return fit_local(
            self.train,
            self.validation,
            translation_invariant=self.translation_invariant,
            seed=self.seed,
            device=self.device,
            learning_rate=values["learning_rate"],
            patience=int(values["patience"]),
            alpha=values["alpha"],
            on_epoch=report,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _LocalJudge:
    solve: _Local

    def __call__(self, values: Mapping[str, float], report: Report) -> float:
        return self.solve(values, report).validation_nll


def _fit_local(settings: PipelineSettings, channel: Channel, job: TuningJob, device: torch.device) -> MethodFit:
    train, validation = channel.patches, channel.validation_patches
    assert train is not None
    if validation is None:
        raise UsageError(
            f"{settings.method} stops early on validation cases, but there are none; give a split with some"
        )

    solve = _Local(train, validation, settings.method == "lts_ti", settings.seed, device)
    values = _tuned(settings, channel, job, lambda _: _LocalJudge(solve))
    fit = solve(values, _ignore)
    solution = Solution(fit.calibrator, fit.objective, float("nan"), fit.warnings)
    return MethodFit(solution, values, fit.fit_nll, fit.validation_nll)


def _tuned(
    settings: PipelineSettings,
    channel: Channel,
    job: TuningJob,
    objective: Callable[[Mapping[str, float]], Objective],
) -> dict[str, float]:
    """Fixed values and, where something is left open, the best of the trials."""
    n_classes = len(channel.class_names)
    fixed = {}
    method = CALIBRATORS[settings.method]
    if issubclass(method, AffineCalibrator) and method.penalised:
        fixed = {"lambda": settings.lambda_ or 0.0, "mu": settings.mu or 0.0}
    names = tuned_names(settings, n_classes)
    if not names:
        return fixed
    if channel.validation_rows is None and channel.validation_patches is None:
        raise UsageError(
            f"{settings.method}: {', '.join(names)} must be tuned, but there is no validation case. "
            "Give a split with validation cases, or fix them with --lambda and --mu."
        )
    from segcal.tuning.search import tune  # here, because it brings Optuna

    found = tune(
        objective(fixed),
        names,
        settings.space,
        n_trials=settings.trials,
        seed=settings.seed,
        problem=job.problem,
        storage=job.storage,
        on_trial=job.on_trial,
        case_map=job.case_map,
    )
    return {**fixed, **found.values}


def _judged(solution: Solution, values: Mapping[str, float], rows: Rows, validation: Likelihood | None) -> MethodFit:
    fit_nll = mean_nll(solution.calibrator, rows)
    return MethodFit(solution, values, fit_nll, None if validation is None else validation.mean(solution.calibrator))


def _needed(validation: Likelihood | None, settings: PipelineSettings) -> Likelihood:
    if validation is None:
        raise UsageError(
            f"{settings.method}: the {settings.solver} solver needs validation cases; give a split with some"
        )
    return validation


def _ignore(step: int, value: float) -> None:
    """The final fit runs to its end whatever it reports."""
