"""`segcal apply`: calibrated maps and the segmentation of every case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from segcal.counted import count
from segcal.errors import UsageError
from segcal.types import AppliedPooling, Kind

from .common import (
    DIFFERING,
    DebugOption,
    DeviceOption,
    ForceKindOption,
    JsonOption,
    KeepGoingOption,
    Output,
    QuietOption,
    ResumeOption,
    example,
)
from .scaling import SchedulerOption, WorkersOption, chosen_workers

# Imported when the command runs, so that its help does not wait for torch.
if TYPE_CHECKING:
    from segcal.apply import ApplyRun
    from segcal.fitted import FittedCalibrator
    from segcal.manifest import Manifest

CalibratorArgument = Annotated[Path, typer.Argument(metavar="CALIBRATOR", help="Calibrator written by `segcal fit`.")]
CaseOption = Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this case; repeat for more.")]


@example("segcal apply cms_ap.safetensors manifest.yaml --out calibrated --dtype float16")
def apply(
    calibrator: CalibratorArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the maps and run.json.")],
    data: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MANIFEST", show_default=False, help="Manifest of the cases; or use --member."),
    ] = None,
    member: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Instead of a manifest: folder of one member's predictions; once per member."),
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="With --member: what the files hold; .npz files say it themselves.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --member: the images, which know where the voxels lie.")
    ] = None,
    dataset_json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --member: nnU-Net's dataset.json, if not beside them.")
    ] = None,
    format: Annotated[
        Literal["nnunet", "nifti"], typer.Option(help="nnU-Net's .npz, or NIfTI with the case's affine.")
    ] = "nnunet",
    dtype: Annotated[
        Literal["float32", "float16", "uint16"],
        typer.Option(help="float16 with nnunet only; uint16 (scl_slope 1/65535) with nifti only."),
    ] = "float32",
    pooling: Annotated[
        AppliedPooling | None,
        typer.Option(
            help="The calibrator knows it; say it to have the run refused if it differs. members-probabilities (for a "
            "calibrator of single models): calibrate each member, then average; the segmentation stays the pooled one."
        ),
    ] = None,
    case: CaseOption = None,
    confidence: Annotated[bool, typer.Option("--confidence", help="Also write the largest probability.")] = False,
    entropy: Annotated[bool, typer.Option("--entropy", help="Also write the entropy in nats.")] = False,
    resume: ResumeOption = False,
    keep_going: KeepGoingOption = False,
    force: ForceKindOption = False,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write calibrated probabilities and the segmentation of every case.

    Methods that preserve the decision (ts, cms_ap, ...) keep the segmentation of the pooled members at every voxel,
    also in the stored maps. A run that was stopped is continued with --resume.
    """
    from segcal.apply import apply_calibrator
    from segcal.fitted import load_calibrator

    output = Output(json=json, quiet=quiet)
    fitted = load_calibrator(calibrator)
    if member:
        manifest = _scanned(output, fitted, [*member, *(data or [])], kind, images, dataset_json)
    else:
        manifest = _loaded(data or [], with_scan_options=bool(kind or images or dataset_json))
    with chosen_workers(output, scheduler, workers, written=out) as case_map, output.stages() as progress:
        run = apply_calibrator(
            fitted,
            manifest,
            out,
            device=device,
            format=format,
            dtype=dtype,
            pooling=pooling,
            resume=resume,
            keep_going=keep_going,
            confidence=confidence,
            entropy=entropy,
            force=force,
            cases=case,
            progress=progress,
            case_map=case_map,
        )
    _report(output, run, fitted.info.method)
    if run.failed:
        raise typer.Exit(1)


def _loaded(paths: list[Path], *, with_scan_options: bool) -> Manifest:
    from segcal.manifest import Manifest

    if len(paths) != 1:
        raise UsageError(f"expected one manifest, got {len(paths)}; or name the members' folders with --member")
    if with_scan_options:
        raise UsageError("--kind, --images and --dataset-json belong to --member; a manifest says these itself")
    return Manifest.load(paths[0])


def _scanned(
    output: Output,
    fitted: FittedCalibrator,
    folders: list[Path],
    kind: Kind | None,
    images: Path | None,
    dataset_json: Path | None,
) -> Manifest:
    from segcal.applying.folders import manifest_of_folders

    # The shell turns `--member fold_*` into one option and further arguments, which are folders then.
    files = [path for path in folders if path.is_file()]
    if files:
        raise UsageError(f"{files[0]}: a file among --member folders; give either a manifest or folders")
    found = manifest_of_folders(fitted, folders, kind=kind, images=images, dataset_json=dataset_json)
    for sentence in found.unmatched:
        output.warn(sentence)
    return found.manifest


def _report(output: Output, run: ApplyRun, method: str) -> None:
    for warning in run.warnings:
        output.warn(warning)
    for case_id, message in run.failed.items():
        output.warn_of_case("failed", case_id, message)
    if run.n_floored:
        output.line(f"{run.n_floored:,} probabilities stored as 0 were raised to the smallest number of their type")
    if run.differing:
        output.line(DIFFERING.format(sum(run.differing.values())))
    for reason in dict.fromkeys(run.redone.values()):
        concerned = [case_id for case_id, why in run.redone.items() if why == reason]
        output.line(f"done again, changed: {reason} ({', '.join(concerned)})")
    counts = {"already finished": len(run.skipped), "failed": len(run.failed)}
    rest = "".join(f", {n} {what}" for what, n in counts.items() if n)
    output.line(f"{method}: {count(len(run.done), 'case')} written to {run.out}{rest}")
    output.result(
        {
            "out": run.out,
            "method": method,
            "done": run.done,
            "redone": list(run.redone),
            "changed": run.redone,
            "skipped": run.skipped,
            "failed": run.failed,
            "n_floored": run.n_floored,
            "differing_voxels": run.differing,
            "warnings": run.warnings,
        }
    )
