"""`segcal evaluate`: how good are the probabilities, before and after calibration?"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from segcal.errors import UsageError
from segcal.evaluation.pipelines import pipeline_name
from segcal.evaluation.run import check_results_folder
from segcal.evaluation.run import evaluate as run_evaluation
from segcal.evaluation.summary import HEADLINE, BootstrapSettings
from segcal.evaluation.tables import TITLES, caption, cell
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.manifest import Manifest
from segcal.metrics import MetricSettings

from .common import (
    DebugOption,
    DeviceOption,
    ForceKindOption,
    JsonOption,
    KeepGoingOption,
    Output,
    QuietOption,
    example,
    name_and_file,
)
from .scaling import SchedulerOption, WorkersOption, chosen_workers


@example("segcal evaluate manifest.yaml --split 0 --calibrator cms_ap.safetensors --out results")
def evaluate(
    manifest: Annotated[Path, typer.Argument(help="Manifest (YAML) with labelled cases.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for tables, summary and pictures.")],
    calibrator: Annotated[
        list[str] | None, typer.Option("--calibrator", help="Calibrator file, or NAME=FILE; may be repeated.")
    ] = None,
    split: Annotated[int | None, typer.Option(help="Given split; by default all labelled cases.")] = None,
    subset: Annotated[Literal["calibration", "validation", "test"], typer.Option(help="Which cases of it.")] = "test",
    include_background: Annotated[
        bool, typer.Option("--include-background", help="Count class 0 in the mean Dice (natural images).")
    ] = False,
    ignore_outside: Annotated[
        bool, typer.Option("--ignore-outside", help="Leave out voxels outside the crop instead of counting them.")
    ] = False,
    each_member: Annotated[
        bool,
        typer.Option(
            "--each-member", help="Also calibrate each member and average then: cms_ap(members), for single-model fits."
        ),
    ] = False,
    replicates: Annotated[int, typer.Option(min=1, help="Bootstrap replicates of the intervals.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    keep_going: KeepGoingOption = False,
    force: ForceKindOption = False,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure calibrators and the uncalibrated ensemble on labelled cases.

    The single model p0 and both ways of pooling are always in the table. `segcal report` makes a page of the result.
    """
    output = Output(json=json, quiet=quiet)
    data = Manifest.load(manifest)
    check_results_folder(out, "evaluate")
    with chosen_workers(output, scheduler, workers) as case_map, output.stages() as progress:
        result = run_evaluation(
            data,
            _calibrators(calibrator or []),
            split=split,
            subset=subset,
            metrics=MetricSettings(data.class_names, include_background=include_background),
            bootstrap=BootstrapSettings(n_replicates=replicates, seed=seed),
            count_outside=not ignore_outside,
            each_member=each_member,
            keep_going=keep_going,
            force=force,
            device=device,
            progress=progress,
            case_map=case_map,
        )
    result.save(out)
    for text in result.summary["warnings"]:
        output.warn(text)
    for case_id, message in result.failed.items():
        output.warn_of_case("left out", case_id, message)
    pipelines = result.summary["pipelines"]
    output.table(
        ("pipeline", *(TITLES[column] for column in HEADLINE)),
        [(p["name"], *(cell(p, column) for column in HEADLINE)) for p in pipelines],
    )
    output.line(caption(result.summary))
    page = f"`segcal report {quote(str(out))}` makes the page"
    output.line(f"{out}: cases.csv, summary.json, table.md, table.tex; {page}")
    output.result({"out": str(out), **result.summary})
    if result.failed:
        raise typer.Exit(1)


def _calibrators(given: list[str]) -> dict[str, FittedCalibrator]:
    """By the name their row carries: given as NAME=FILE, or made of method and pooling."""
    named: dict[str, FittedCalibrator] = {}
    for text in given:
        name, path = name_and_file(text)
        fitted = load_calibrator(path)
        chosen = name or pipeline_name(fitted.info.method, fitted.info.pooling)
        if chosen in named:
            raise UsageError(f"two calibrators are both called {chosen}; name one of them: --calibrator NAME=FILE")
        named[chosen] = fitted
    return named
