"""Optuna's TPE over the hyper-parameters a method has (SEG App. B): reproducible, and resumable from a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from segcal.errors import DataError
from segcal.settings import Choices, LogRange, SearchSpace
from segcal.tuning import Objective
from segcal.tuning.journal import naming_the_file, open_journal

SENSIBLE = {"lambda": 1e-3, "mu": 1e-3, "alpha": 1e-4, "learning_rate": 1e-2, "patience": 20}
"""The first trial: what one would try by hand."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best hyper-parameters, their validation NLL and how many trials it took."""

    values: Mapping[str, float]
    validation_nll: float
    n_trials: int


def tune(
    objective: Objective,
    names: Sequence[str],
    space: SearchSpace,
    *,
    n_trials: int,
    seed: int,
    problem: str,
    storage: Path | None = None,
    on_trial: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Minimise `objective(values, report)` over the named hyper-parameters.

    Every trial has a sampler seeded by (seed, index of the trial), so a search that was killed and goes on from
    its file asks the same questions as one that was not.

    Args:
        objective: validation NLL of a setting.
        names: out of `lambda`, `mu`, `alpha`, `learning_rate`, `patience`.
        space: their ranges.
        n_trials: how many.
        seed: of the sampler.
        problem: names data, method and settings; trials of another problem in the same file do not mix in.
        storage: journal file to resume from.
        on_trial: called as on_trial(done, total).
    """
    # Its one warning on this path is about the lock of a killed process, which is expected and dealt with.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if storage is None:
        return _search(InMemoryStorage(), objective, names, space, n_trials, seed, problem, on_trial)
    with naming_the_file(storage):
        return _search(open_journal(storage), objective, names, space, n_trials, seed, problem, on_trial)


def _search(
    storage: BaseStorage,
    objective: Objective,
    names: Sequence[str],
    space: SearchSpace,
    n_trials: int,
    seed: int,
    problem: str,
    on_trial: Callable[[int, int], None] | None,
) -> Tuned:
    study = optuna.create_study(
        storage=storage,
        study_name=hashlib.sha256(problem.encode()).hexdigest()[:32],
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=20),
    )
    _close_killed_trials(study)
    while (done := len(_finished(study))) < n_trials:
        # Two trials at once would change what TPE proposes, so a running one must not count: no constant liar.
        study.sampler = TPESampler(seed=_trial_seed(seed, done), constant_liar=False)
        # Asked again if the first trial was killed, once if the process died between queueing and asking.
        if done == 0 and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            study.enqueue_trial(_as_parameters(names, space))
        _run_trial(study, objective, names, space)
        if on_trial is not None:
            on_trial(done + 1, n_trials)
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if not complete:
        raise DataError(f"tuning ended without a result: none of {n_trials} trials gave a finite validation NLL")
    # Among equals the first: min keeps it, and trials come in order.
    best = min(complete, key=lambda trial: trial.value if trial.value is not None else float("inf"))
    assert best.value is not None
    return Tuned(json.loads(best.user_attrs["values"]), best.value, len(_finished(study)))


def _run_trial(study: optuna.Study, objective: Objective, names: Sequence[str], space: SearchSpace) -> None:
    trial = study.ask()
    values = {name: _suggest(trial, name, _range(space, name)) for name in names}
    trial.set_user_attr("values", json.dumps(values, sort_keys=True))

    def report(step: int, value: float) -> None:
        trial.report(value, step)
        if trial.should_prune():
            raise optuna.TrialPruned

    try:
        value = objective(values, report)
    except optuna.TrialPruned:
        value = math.nan
    # A trial without a finite result counts as tried and is never the best.
    if math.isfinite(value):
        study.tell(trial, value)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def _suggest(trial: optuna.Trial, name: str, allowed: LogRange | Choices) -> float:
    if isinstance(allowed, Choices):
        return int(trial.suggest_categorical(name, list(allowed.choices)))
    if allowed.zero and trial.suggest_categorical(f"{name}_is_zero", [False, True]):
        return 0.0
    return trial.suggest_float(name, allowed.low, allowed.high, log=True)


def _as_parameters(names: Sequence[str], space: SearchSpace) -> dict[str, float | bool]:
    """The sensible first trial in Optuna's words, moved into the allowed range where it is narrower."""
    parameters: dict[str, float | bool] = {}
    for name in names:
        allowed = _range(space, name)
        if isinstance(allowed, Choices):
            parameters[name] = min(allowed.choices, key=lambda choice: abs(choice - SENSIBLE[name]))
            continue
        if allowed.zero:
            parameters[f"{name}_is_zero"] = False
        parameters[name] = min(max(SENSIBLE[name], allowed.low), allowed.high)
    return parameters


def _range(space: SearchSpace, name: str) -> LogRange | Choices:
    found = getattr(space, "lambda_" if name == "lambda" else name)
    assert isinstance(found, LogRange | Choices)
    return found


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    return [trial for trial in study.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def _close_killed_trials(study: optuna.Study) -> None:
    """A trial that was running when the process died would stay so for ever."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


def _trial_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/trial/{index}".encode(), digest_size=4).digest(), "little")
