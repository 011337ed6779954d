"""`segcal apply`: calibrated maps and the segmentation of every case."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from segcal.apply import ApplyRun, apply_calibrator
from segcal.applying.folders import manifest_of_folders
from segcal.device import resolve_device
from segcal.errors import UsageError
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.manifest import Manifest
from segcal.types import Kind, Pooling

from .common import DebugOption, DeviceOption, JsonOption, Output, QuietOption, example


@example("segcal apply cms_ap.safetensors manifest.yaml --out calibrated --dtype float16")
def apply(
    calibrator: Annotated[Path, typer.Argument(help="Calibrator written by `segcal fit`.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the maps and run.json; made when absent.")],
    manifest: Annotated[Path | None, typer.Argument(help="Manifest of the cases; or give --member folders.")] = None,
    member: Annotated[
        list[Path] | None, typer.Option(help="Folder with one member's predictions, instead of a manifest; repeat.")
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="With --member: what the files hold; read off the key of .npz files.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="With --member: folder of the images, which know where the voxels lie.")
    ] = None,
    dataset_json: Annotated[
        Path | None, typer.Option(help="With --member: nnU-Net's dataset.json, if it does not lie beside the members.")
    ] = None,
    format: Annotated[
        Literal["nnunet", "nifti"], typer.Option(help="nnU-Net's .npz, or NIfTI with the case's affine.")
    ] = "nnunet",
    dtype: Annotated[
        Literal["float32", "float16", "uint16"],
        typer.Option(help="float16 with nnunet only; uint16 (scl_slope 1/65535) with nifti only."),
    ] = "float32",
    pooling: Annotated[Pooling | None, typer.Option(help="Only to make sure: refused if fitted otherwise.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; repeat for more.")] = None,
    confidence: Annotated[bool, typer.Option("--confidence", help="Also write the largest probability.")] = False,
    entropy: Annotated[bool, typer.Option("--entropy", help="Also write the entropy in nats.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run: finished cases are skipped.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Skip a broken case, list it at the end, exit 1.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Apply in spite of a mismatch; it becomes a warning.")] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write calibrated probabilities and the segmentation of every case.

    Methods that preserve the decision (ts, cms_ap, ...) keep the segmentation of the pooled members at every voxel,
    also in the stored maps. A run that was stopped is continued with --resume.
    """
    output = Output(json=json, quiet=quiet)
    fitted = load_calibrator(calibrator)
    data = _manifest(output, fitted, manifest, member or [], kind, images, dataset_json)
    with output.stages() as progress:
        run = apply_calibrator(
            fitted,
            data,
            out_folder,
            device=resolve_device(device),
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
        )
    _report(output, run, fitted.info.method)
    if run.failed:
        raise typer.Exit(1)


def _manifest(
    output: Output,
    fitted: FittedCalibrator,
    path: Path | None,
    members: list[Path],
    kind: Kind | None,
    images: Path | None,
    dataset_json: Path | None,
) -> Manifest:
    if (path is None) == (not members):
        raise UsageError("give either a manifest or --member folders, one of the two")
    if path is not None:
        if kind or images or dataset_json:
            raise UsageError("--kind, --images and --dataset-json belong to --member; a manifest says these itself")
        return Manifest.load(path)
    found = manifest_of_folders(fitted, members, kind=kind, images=images, dataset_json=dataset_json)
    for sentence in found.unmatched:
        output.warn(sentence)
    return found.manifest


def _report(output: Output, run: ApplyRun, method: str) -> None:
    for warning in run.warnings:
        output.warn(warning)
    for case_id, message in run.failed.items():
        output.warn(f"failed: {case_id}: {message}")
    if run.n_floored:
        output.line(f"{run.n_floored:,} probabilities stored as 0 were raised to the smallest number of their type")
    if run.redone:
        output.line(f"done again because something changed: {', '.join(run.redone)}")
    counts = {"skipped, already finished": len(run.skipped), "failed": len(run.failed)}
    rest = "".join(f", {count} {what}" for what, count in counts.items() if count)
    output.line(f"{method}: {len(run.done)} cases written to {run.out}{rest}")
    output.result(
        {
            "out": run.out,
            "method": method,
            "done": run.done,
            "redone": run.redone,
            "skipped": run.skipped,
            "failed": run.failed,
            "n_floored": run.n_floored,
            "warnings": run.warnings,
        }
    )
