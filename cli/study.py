"""`segcal study`: pipelines × repeats, the paper's table with intervals."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from segcal.evaluation.study import study as run_study
from segcal.evaluation.study_settings import load_study_settings
from segcal.evaluation.summary import HEADLINE
from segcal.evaluation.tables import TITLES, caption, cell
from segcal.manifest import Manifest

from .common import DebugOption, DeviceOption, JsonOption, Output, QuietOption, ResumeOption, example
from .scaling import SchedulerOption, WorkersOption, chosen_workers


@example("segcal study manifest.yaml --config quick --out study")
def study(
    manifest: Annotated[Path, typer.Argument(help="Manifest (YAML) with labelled cases.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for tables, fits and pictures.")],
    config: Annotated[str, typer.Option("--config", help="paper, quick, or a YAML file of your own.")] = "paper",
    shifted: Annotated[
        Path | None, typer.Option("--shifted", help="Other data to measure the calibrators on, without refitting.")
    ] = None,
    members: Annotated[
        list[int] | None, typer.Option("--members", help="Sensitivity: ensembles of so many members; repeatable.")
    ] = None,
    sizes: Annotated[
        list[int] | None, typer.Option("--sizes", help="Sensitivity: so many calibration cases; repeatable.")
    ] = None,
    bins: Annotated[list[int] | None, typer.Option("--bins", help="Sensitivity: so many bins; repeatable.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Settings tried when tuning a pipeline.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Partitions, samples, trials and resamples.")] = None,
    resume: ResumeOption = False,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Fit and measure every pipeline of a study in every repeat.

    Can be stopped at any moment and resumed; the tables are the same bytes.
    """
    output = Output(json=json, quiet=quiet)
    settings = load_study_settings(config).changed(
        source="options",
        member_counts=None if not members else tuple(members),
        calibration_sizes=None if not sizes else tuple(sizes),
        bins=None if not bins else tuple(bins),
        trials=trials,
        seed=seed,
    )
    with chosen_workers(output, scheduler, workers) as case_map, output.stages() as progress:
        result = run_study(
            Manifest.load(manifest),
            settings,
            out,
            shifted=None if shifted is None else Manifest.load(shifted),
            resume=resume,
            device=device,
            progress=progress,
            case_map=case_map,
        )
    elsewhere = [] if result.shifted is None else result.shifted["warnings"]
    for text in dict.fromkeys([*result.summary["warnings"], *elsewhere]):
        output.warn(text)
    output.table(
        ("pipeline", *(TITLES[column] for column in HEADLINE)),
        [(p["name"], *(cell(p, column) for column in HEADLINE)) for p in result.summary["pipelines"]],
    )
    output.line(caption(result.summary))
    page = f"`segcal report {quote(str(out))}` makes the page"
    output.line(f"{out}: table.md, table.tex, summary.json, cases.csv; {page}")
    output.result({"out": str(out), "summary": result.summary, "shifted": result.shifted})
