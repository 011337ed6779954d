"""`segcal fit`: calibrators from the labelled cases of a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from segcal.calibrators import CALIBRATORS
from segcal.choosing import CRITERION_NAMES, Candidate, Criterion, choose_calibrator
from segcal.errors import UsageError
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
from segcal.settings import PipelineSettings, load_settings
from segcal.types import Pooling

from .common import DebugOption, DeviceOption, JsonOption, Output, QuietOption, calibrator_paths, example
from .scaling import SchedulerOption, WorkersOption, chosen_workers

AUTO = "auto"


@example("segcal fit manifest.yaml --method cms_ap --split 0 --out cms_ap.safetensors")
def fit(
    manifest: Annotated[Path, typer.Argument(help="Manifest (YAML) with labelled cases.")],
    out: Annotated[Path, typer.Option("--out", help="Calibrator file; with several methods a folder.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help=f"One of {', '.join(CALIBRATORS)}; may be repeated. auto: fit several and choose by validation cases.",
        ),
    ] = None,
    criterion: Annotated[
        Criterion | None, typer.Option(help="What auto chooses by, on the validation cases: nll (default) or ba_ece.")
    ] = None,
    allow_flips: Annotated[
        bool, typer.Option("--allow-flips", help="Let auto also try methods that may change the segmentation.")
    ] = False,
    pooling: Annotated[
        Literal["logits", "probabilities"] | None,
        typer.Option(help="Pool members by logits (default) or probabilities."),
    ] = None,
    split: Annotated[
        int | None, typer.Option(help="Given split to use; by default the first, or one drawn from the seed.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", help="Shipped settings by name (cms_ap, dc_p, …) or a YAML file.")
    ] = None,
    solver: Annotated[
        Literal["exact", "adam"] | None, typer.Option(help="exact: the optimum; adam: the published protocol.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Settings tried when tuning (20).")] = None,
    lambda_: Annotated[float | None, typer.Option("--lambda", min=0, help="Fix the off-diagonal penalty.")] = None,
    mu: Annotated[
        float | None, typer.Option(min=0, help="Fix the bias penalty; with --lambda nothing is tuned.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Fit on every voxel (a few reads) instead of a sample.")] = False,
    polish: Annotated[bool, typer.Option("--polish", help="Two more reads: within 0.001 % of the full fit.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fit a shift-sensitive method on probabilities.")] = False,
    storage: Annotated[
        Path | None, typer.Option(help="File that keeps finished trials, to go on after a stop.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Decides sample, drawn split and trials (0).")] = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Fit calibrators on the labelled cases of a manifest.

    Several methods share one read of the data. λ and µ are tuned on the validation cases unless they are given.
    With --method auto the methods that keep the segmentation are fitted and one is chosen; of methods within 0.1 % of
    the best the simplest is taken, and the calibrator file says why.
    """
    output = Output(json=json, quiet=quiet)
    settings = _settings(method or [], config or [])
    automatic = AUTO in settings
    pooled = _pooling(pooling, settings)
    if full and polish:
        raise UsageError("--full already goes beyond --polish; give one of them")
    if not automatic:
        _check_penalties(settings, lambda_, mu)
        _check_not_automatic(criterion, allow_flips)
    paths = calibrator_paths(list(settings), out)
    data = Manifest.load(manifest)
    options: dict[str, Any] = {
        "pooling": pooled,
        "split": split,
        "trials": trials,
        "lambda_": lambda_,
        "mu": mu,
        "solver": solver,
        "seed": seed,
        "full": full,
        "polished": polish,
        "force": force,
        "storage": storage,
        "device": device,
    }
    with chosen_workers(output, scheduler, workers) as case_map, output.stages() as progress:
        if automatic:
            wanted = criterion or "nll"
            chosen, candidates = choose_calibrator(
                data, criterion=wanted, allow_flips=allow_flips, progress=progress, case_map=case_map, **options
            )
            fitted = {AUTO: chosen}
        else:
            given = {name: value for name, value in settings.items() if value is not None}
            fitted = fit_many(data, list(settings), settings=given, progress=progress, case_map=case_map, **options)
    if automatic:
        _show_choice(output, chosen, candidates, wanted)
    _save(output, fitted, paths)


def _save(output: Output, fitted: Mapping[str, FittedCalibrator], paths: Mapping[str, Path]) -> None:
    for name, calibrator in fitted.items():
        calibrator.save(paths[name])
        method = calibrator.info.method
        for text in calibrator.info.warnings:
            output.warn(f"{method}: {text.removeprefix(f'{method}: ')}")
    output.table(
        ("method", "lambda", "mu", "fit NLL", "validation NLL", "keeps", "file"),
        [_row(calibrator, paths[name]) for name, calibrator in fitted.items()],
    )
    output.result({"calibrators": [_result(calibrator, paths[name]) for name, calibrator in fitted.items()]})


def _show_choice(
    output: Output, chosen: FittedCalibrator, candidates: Sequence[Candidate], criterion: Criterion
) -> None:
    """The candidates with what they were compared by, and the reason in one sentence."""
    assert chosen.info.choice is not None
    output.table(
        ("candidate", CRITERION_NAMES[criterion], "parameters", "keeps", ""),
        [
            (
                one.method,
                f"{one.value:.6f}",
                one.n_parameters,
                one.preserves or "-",
                "chosen" if one.method == chosen.info.method else "",
            )
            for one in candidates
        ],
    )
    output.line(chosen.info.choice["reason"])
    output.line()


def _settings(methods: list[str], configs: list[str]) -> dict[str, PipelineSettings | None]:
    """By method, in the order given; None takes the shipped settings of the asked pooling."""
    chosen: dict[str, PipelineSettings | None] = {}
    for name in configs:
        settings = load_settings(name)
        if settings.method in chosen:
            raise UsageError(f"two --config for `{settings.method}`; fit them in two calls")
        chosen[settings.method] = settings
    for name in methods:
        chosen.setdefault(name, None)
    if AUTO in chosen and len(chosen) > 1:
        others = ", ".join(name for name in chosen if name != AUTO)
        raise UsageError(f"--method auto chooses the method itself; leave out {others}, or leave out auto")
    if not chosen:
        raise UsageError("nothing to fit: give --method NAME or --config NAME (for most uses: --method cms_ap)")
    return chosen


def _pooling(asked: Pooling | None, settings: dict[str, PipelineSettings | None]) -> Pooling:
    """One read has one pooling: asked for, or that of the settings."""
    if asked is not None:
        return asked
    given = {value.pooling for value in settings.values() if value is not None}
    if len(given) > 1:
        raise UsageError("the given --config pool differently; fit them in two calls, or say --pooling")
    return given.pop() if given else "logits"


def _check_penalties(settings: dict[str, PipelineSettings | None], lambda_: float | None, mu: float | None) -> None:
    without = [name for name in settings if not getattr(CALIBRATORS.get(name), "penalised", False)]
    if (lambda_ is not None or mu is not None) and len(without) == len(settings):
        raise UsageError(f"--lambda and --mu mean nothing for {', '.join(without)}; leave them out")


def _check_not_automatic(criterion: Criterion | None, allow_flips: bool) -> None:
    given = [name for name, used in (("--criterion", criterion is not None), ("--allow-flips", allow_flips)) if used]
    if given:
        raise UsageError(f"{' and '.join(given)} only means something with --method auto")


def _row(calibrator: FittedCalibrator, path: Path) -> tuple[object, ...]:
    info = calibrator.info

    def shown(value: float | None, digits: str) -> str:
        return "-" if value is None else format(value, digits)

    return (
        info.method,
        shown(info.lambda_, ".2g"),
        shown(info.mu, ".2g"),
        shown(info.fit_nll, ".6f"),
        shown(info.validation_nll, ".6f"),
        info.preserves or "-",
        path,
    )


def _result(calibrator: FittedCalibrator, path: Path) -> dict[str, object]:
    values = calibrator.info.model_dump(mode="json", by_alias=True)
    return {**values, "file": str(path), "sha256": calibrator.sha256}
