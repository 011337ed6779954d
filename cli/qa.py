"""`segcal qa`: which cases of a batch need a look, without ground truth?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import DebugOption, DeviceOption, ForceKindOption, JsonOption, Output, QuietOption, example
from .scaling import SchedulerOption, WorkersOption, chosen_workers

SHOWN = 20


@example("segcal qa calibrated --calibrator cms_ap.safetensors --out qa")
def qa(
    data: Annotated[
        Path,
        typer.Argument(metavar="DIR_OR_MANIFEST", help="Folder written by `segcal apply`, or manifest of the members."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for qa.csv, qa.json and qa.html.")],
    calibrator: Annotated[
        Path | None,
        typer.Option(metavar="CALIBRATOR", help="Needed for a manifest; for a folder it gives the class names."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For a folder: the images, to show beside the segmentation.")
    ] = None,
    config: Annotated[str, typer.Option("--config", help="Thresholds: `qa`, or a YAML file of your own.")] = "qa",
    case: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this case; repeat for more.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when a case is flagged.")] = False,
    force: ForceKindOption = False,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Expected Dice score, volumes, doubt and disagreement of every case, without labels.

    From a manifest, the members are compared with each other and the logits with those of the calibration cases too.
    A case that cannot be read is listed and makes the exit code 1.
    """
    from segcal.counted import count
    from segcal.fitted import load_calibrator
    from segcal.qa import QaResult, load_qa_settings, run_qa
    from segcal.qa.results import check_qa_folder

    output = Output(json=json, quiet=quiet)
    settings = load_qa_settings(config)
    fitted = None if calibrator is None else load_calibrator(calibrator)
    check_qa_folder(out)
    with chosen_workers(output, scheduler, workers) as case_map, output.stages() as progress:
        result: QaResult = run_qa(
            data,
            calibrator=fitted,
            images=images,
            settings=settings,
            cases=case,
            force=force,
            device=device,
            progress=progress,
            case_map=case_map,
        )
    result.save(out)
    for text in result.warnings:
        output.warn(text)
    for case_id, message in result.failed.items():
        output.warn_of_case("not looked at", case_id, message)
    rows = [(each.case.case_id, "; ".join(flag.text for flag in each.flags)) for each in result.flagged]
    if rows:
        output.table(("flagged", "why"), rows[:SHOWN])
    if len(rows) > SHOWN:
        output.line(f"… and {len(rows) - SHOWN} more")
    verb = "is" if 1 in (len(rows), len(result.cases)) else "are"
    flagged = f"{len(rows)} of {count(len(result.cases), 'case')} {verb} flagged"
    output.line(f"{flagged}; {out}: qa.csv, qa.json, qa.html")
    output.result({"out": out, **result.json()})
    if result.failed or (strict and rows):
        raise typer.Exit(1)
