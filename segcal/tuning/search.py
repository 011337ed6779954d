"""Optuna's TPE over the hyper-parameters a method has (SEG App. B): reproducible, and resumable from a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from segcal.case_map import CaseMap, in_process
from segcal.errors import DataError
from segcal.settings import Choices, LogRange, SearchSpace
from segcal.tuning import Objective
from segcal.tuning.journal import open_journal

SENSIBLE = {"lambda": 1e-3, "mu": 1e-3, "alpha": 1e-4, "learning_rate": 1e-2, "patience": 20}
"""The first trial: what one would try by hand."""
BATCH = 5
"""Trials that do not know of each other and can run at once. TPE's first ten are drawn blindly anyway."""


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
    case_map: CaseMap = in_process,
) -> Tuned:
    """Minimise `objective(values, report)` over the named hyper-parameters.

    Trials are asked in batches of fixed size and told in order. Every trial has a sampler seeded by (seed, index of
    the trial), so a search that was killed and goes on from its file, or has its trials run at once on many machines,
    asks the same questions as one that was not.

    Args:
        objective: validation NLL of a setting.
        names: out of `lambda`, `mu`, `alpha`, `learning_rate`, `patience`.
        space: their ranges.
        n_trials: how many.
        seed: of the sampler.
        problem: names data, method and settings; trials of another problem in the same file do not mix in.
        storage: journal file to resume from.
        on_trial: called as on_trial(done, total).
        case_map: where the trials run; here, one after the other, by default.
    """
    # Its one warning on this path is about the lock of a killed process, which is expected and dealt with.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kept = InMemoryStorage() if storage is None else open_journal(storage)
    return _search(kept, objective, names, space, n_trials, seed, problem, on_trial, case_map)


def _search(
    storage: BaseStorage,
    objective: Objective,
    names: Sequence[str],
    space: SearchSpace,
    n_trials: int,
    seed: int,
    problem: str,
    on_trial: Callable[[int, int], None] | None,
    case_map: CaseMap,
) -> Tuned:
    name = hashlib.sha256(problem.encode()).hexdigest()[:32]
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    work = _TrialWork(objective)
    while (done := len(finished := _finished(study))) < n_trials:
        # What a trial asks depends on the batches before its own and on its index only: not on how many of its batch
        # were finished before a stop, nor on which of them was finished first.
        start = done - done % BATCH
        batch = [
            _proposed(finished[:start], names, space, index, seed)
            for index in range(done, min(start + BATCH, n_trials))
        ]
        with closing(case_map(work, batch)) as outcomes:
            for outcome in outcomes:
                study.add_trial(outcome.item.told(outcome.result()))
                done += 1
                if on_trial is not None:
                    on_trial(done, n_trials)
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if not complete:
        raise DataError(f"tuning ended without a result: none of {n_trials} trials gave a finite validation NLL")
    # Among equals the first: min keeps it, and trials come in order.
    best = min(complete, key=lambda trial: trial.value if trial.value is not None else float("inf"))
    assert best.value is not None
    return Tuned(json.loads(best.user_attrs["values"]), best.value, len(_finished(study)))


@dataclass(frozen=True, slots=True, eq=False)
class _TrialResult:
    """Validation NLL, not finite if the trial was pruned or came to nothing, and what was reported on the way."""

    value: float
    steps: Mapping[int, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Proposal:
    """One question.

    Attributes:
        index: of the trial.
        values: what the objective is asked for.
        parameters, distributions: the same in Optuna's words.
        known: the trials of the batches before, which pruning compares with.
    """

    index: int
    values: Mapping[str, float]
    parameters: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]
    known: Sequence[FrozenTrial]

    def __str__(self) -> str:
        return f"trial {self.index}"

    def told(self, result: _TrialResult) -> FrozenTrial:
        """The trial as it is kept; one without a finite result counts as tried and is never the best."""
        finite = math.isfinite(result.value)
        return optuna.trial.create_trial(
            state=TrialState.COMPLETE if finite else TrialState.PRUNED,
            value=result.value if finite else None,
            params=dict(self.parameters),
            distributions=dict(self.distributions),
            user_attrs={"values": json.dumps(self.values, sort_keys=True)},
            intermediate_values=dict(result.steps),
        )


def _proposed(
    known: Sequence[FrozenTrial], names: Sequence[str], space: SearchSpace, index: int, seed: int
) -> _Proposal:
    """What TPE asks in trial `index`, knowing the trials of the batches before."""
    sampler = TPESampler(seed=_trial_seed(seed, index), constant_liar=False)
    study = optuna.create_study(sampler=sampler)
    study.add_trials(known)
    if index == 0:
        study.enqueue_trial(_as_parameters(names, space))
    trial = study.ask()
    values = {name: _suggest(trial, name, _range(space, name)) for name in names}
    return _Proposal(index, values, trial.params, trial.distributions, known)


@dataclass(frozen=True, slots=True, eq=False)
class _TrialWork:
    """From a question to its answer: what `segcal.case_map` runs."""

    objective: Objective

    def __call__(self, asked: _Proposal) -> _TrialResult:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        steps: dict[int, float] = {}
        pruning: list[optuna.Trial] = []

        def report(step: int, value: float) -> None:
            if not pruning:  # made when it is needed: the exact solver never reports
                pruning.append(_pruned_trial(asked.known))
            steps[step] = value
            pruning[0].report(value, step)
            if pruning[0].should_prune():
                raise optuna.TrialPruned

        try:
            return _TrialResult(self.objective(asked.values, report), steps)
        except optuna.TrialPruned:
            return _TrialResult(math.nan, steps)


def _pruned_trial(known: Sequence[FrozenTrial]) -> optuna.Trial:
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=20))
    study.add_trials(known)
    return study.ask()


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


def _trial_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/trial/{index}".encode(), digest_size=4).digest(), "little")
