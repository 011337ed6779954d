"""`segcal nnunet`: logits out of nnU-Net, calibrated maps into its folders.

A table of thin commands; each imports the module that does the work when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from segcal.counted import count
from segcal.errors import UsageError
from segcal.types import AppliedPooling

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
    epilog,
    sub_app,
)
from .manifest_file import ReplaceOption, check_free

if TYPE_CHECKING:
    from segcal.nnunet.model import TrainedModel

app = sub_app("Work with nnU-Net's folders and models.")


@app.command(
    "postprocess",
    epilog=epilog("segcal nnunet postprocess nnunet_out --calibrator cms_ap.safetensors --out nnunet_calibrated"),
)
def postprocess(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", show_default=False, help="Output of nnUNetv2_predict --save_probabilities."),
    ],
    calibrator: Annotated[
        Path, typer.Option("--calibrator", metavar="FILE", help="Calibrator written by `segcal fit`.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the calibrated copy.")],
    apply_postprocessing: Annotated[
        Path | None,
        typer.Option(
            "--apply-postprocessing",
            metavar="FILE",
            help="nnU-Net's postprocessing.json; cleaned label maps go to DIR/postprocessed.",
        ),
    ] = None,
    plans: Annotated[
        Path | None, typer.Option(metavar="FILE", help="nnU-Net's plans.json, when the folder has none.")
    ] = None,
    dataset_json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="nnU-Net's dataset.json, when the folder has none.")
    ] = None,
    dtype: Annotated[Literal["float32", "float16"], typer.Option(help="Type of the stored maps.")] = "float32",
    resume: ResumeOption = False,
    keep_going: KeepGoingOption = False,
    force: ForceKindOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a calibrated copy of a folder of saved probabilities; nnU-Net itself is not needed."""
    from segcal.device import resolve_device
    from segcal.fitted import load_calibrator
    from segcal.nnunet.postprocess import postprocess_folder

    output = Output(json=json, quiet=quiet)
    with output.stages() as progress:
        run = postprocess_folder(
            load_calibrator(calibrator),
            folder,
            out,
            device=resolve_device(device),
            postprocessing_json=apply_postprocessing,
            plans=plans,
            dataset_json=dataset_json,
            dtype=dtype,
            resume=resume,
            keep_going=keep_going,
            force=force,
            progress=progress,
        )
    for sentence in run.notes:
        output.warn(sentence)
    for case_id, message in run.failed.items():
        output.warn_of_case("failed", case_id, message)
    output.line(run.summary())
    output.result(run.as_dict())
    if run.failed:
        raise typer.Exit(1)


@app.command(
    "collect",
    epilog=epilog(
        "segcal nnunet collect nnUNetTrainer__nnUNetPlans__3d_fullres --labels labelsTr --out out_of_fold.yaml"
    ),
)
def collect(
    model_folder: Annotated[
        Path,
        typer.Argument(metavar="MODEL_FOLDER", show_default=False, help="TRAINER__PLANS__CONFIG with fold_* inside."),
    ],
    labels: Annotated[Path, typer.Option(metavar="DIR", help="labelsTr or gt_segmentations.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The manifest to write.")],
    splits: Annotated[
        Path | None, typer.Option(metavar="FILE", help="splits_final.json, to check what each fold was trained on.")
    ] = None,
    force: ReplaceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a manifest of the cross-validation's predictions, each by the fold that did not train on the case."""
    from segcal.nnunet.collect import collect_out_of_fold

    check_free(out, replace=force)
    output = Output(json=json, quiet=quiet)
    found = collect_out_of_fold(model_folder, labels=labels, out=out, splits=splits)
    manifest = found.manifest.save(out)
    for sentence in found.warnings:
        output.warn(sentence)
    output.line(
        f"{out}: {len(manifest.cases)} out-of-fold cases ({len(manifest.labelled_cases)} labelled) of folds "
        f"{', '.join(str(fold) for fold in found.cases_by_fold)}"
    )
    output.line(f"next: segcal manifest check {out}")
    output.result(
        {
            "manifest": out,
            "sha256": manifest.sha256,
            "n_cases": len(manifest.cases),
            "n_labelled": len(manifest.labelled_cases),
            "cases_by_fold": found.cases_by_fold,
            "warnings": found.warnings,
        }
    )


ModelsOption = Annotated[
    list[Path],
    typer.Option("-m", metavar="DIR", help="Trained model folder (TRAINER__PLANS__CONFIGURATION); repeat for seeds."),
]
ImagesOption = Annotated[Path, typer.Option("-i", metavar="DIR", help="Images, named <case>_0000.nii.gz and so on.")]
FoldOption = Annotated[
    list[str] | None,
    typer.Option("-f", metavar="FOLD …", show_default=False, help="Folds, as -f 0 1 2; all numbered ones by default."),
]
# `-f 0 1 2`: the option takes the first number, the others arrive as arguments.
MoreFolds = Annotated[list[str] | None, typer.Argument(metavar="FOLD", hidden=True)]
CheckpointOption = Annotated[str, typer.Option("-chk", metavar="NAME", help="Checkpoint file in the folds' folders.")]
DisableTtaOption = Annotated[bool, typer.Option("--disable_tta", help="Predict without mirroring.")]
StepSizeOption = Annotated[float, typer.Option("-step_size", help="Step of the sliding window, a share of the patch.")]
NnunetDeviceOption = Annotated[str, typer.Option("-device", "--device", help="auto, cpu, cuda or mps.")]


def _models(
    folders: list[Path],
    fold: list[str] | None,
    more: list[str] | None,
    checkpoint: str,
    disable_tta: bool,
    step_size: float,
    device: str,
) -> list[TrainedModel]:
    from segcal.device import resolve_device
    from segcal.nnunet.model import load_model, parse_fold

    if more and not fold:
        raise UsageError(f"unexpected argument {more[0]!r}; folds are named with -f, as in -f 0 1 2")
    folds = [parse_fold(text) for text in (*fold, *(more or []))] if fold else None
    where, mirroring = resolve_device(device), not disable_tta
    return [
        load_model(folder, folds=folds, checkpoint=checkpoint, device=where, mirroring=mirroring, step_size=step_size)
        for folder in folders
    ]


@app.command(
    "export",
    epilog=epilog("segcal nnunet export -m MODEL_FOLDER -f 0 1 2 3 4 -i imagesTs -o logits --labels labelsTs"),
)
def export(
    model: ModelsOption,
    images: ImagesOption,
    out: Annotated[Path, typer.Option("-o", metavar="DIR", help="Folder for the members and manifest.yaml.")],
    fold: FoldOption = None,
    more_folds: MoreFolds = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Labels <case>.nii.gz, for the manifest; needed to fit.")
    ] = None,
    splits: Annotated[
        Path | None, typer.Option(metavar="FILE", help="splits_final.json; also looked for beside the model.")
    ] = None,
    out_of_fold: Annotated[
        bool, typer.Option("--out-of-fold", help="Fold k predicts only its own validation cases: one member a case.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also export cases a member was trained on.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out members that are already exported.")] = False,
    checkpoint: CheckpointOption = "checkpoint_final.pth",
    disable_tta: DisableTtaOption = False,
    step_size: StepSizeOption = 0.5,
    device: NnunetDeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the logits of every fold for every image, in image geometry, and a manifest to fit on."""
    from segcal.nnunet.export import export_logits

    output = Output(json=json, quiet=quiet)
    models = _models(model, fold, more_folds, checkpoint, disable_tta, step_size, device)
    with output.stages() as progress:
        done = export_logits(
            models,
            images,
            out,
            labels=labels,
            splits=splits,
            out_of_fold=out_of_fold,
            force=force,
            resume=resume,
            progress=progress,
        )
    for sentence in done.warnings:
        output.warn(sentence)
    manifest = done.manifest
    output.line(
        f"{manifest.path}: {len(manifest.cases)} cases ({len(manifest.labelled_cases)} labelled) with "
        f"{manifest.n_members} members each"
    )
    output.line(f"next: segcal fit {manifest.path} --method cms_ap --out cms_ap.safetensors")
    output.result(
        {
            "manifest": manifest.path,
            "sha256": manifest.sha256,
            "n_cases": len(manifest.cases),
            "n_labelled": len(manifest.labelled_cases),
            "n_members": manifest.n_members,
            "warnings": done.warnings,
        }
    )


@app.command(
    "predict",
    epilog=epilog("segcal nnunet predict -m MODEL_FOLDER -i imagesTs -o predicted --calibrator cms_ap.safetensors"),
)
def predict(
    model: ModelsOption,
    images: ImagesOption,
    out: Annotated[Path, typer.Option("-o", metavar="DIR", help="Folder for segmentations and probabilities.")],
    calibrator: Annotated[
        Path, typer.Option("--calibrator", metavar="FILE", help="Calibrator written by `segcal fit`.")
    ],
    fold: FoldOption = None,
    more_folds: MoreFolds = None,
    pooling: Annotated[
        AppliedPooling | None,
        typer.Option(
            help="The calibrator knows it. members-probabilities (for a calibrator of single models, as from collect): "
            "calibrate each member, then average; the segmentation stays nnU-Net's."
        ),
    ] = None,
    format: Annotated[
        Literal["nnunet", "nifti", "both"],
        typer.Option(help="nnU-Net's .npz, NIfTI in the geometry of the image (DIR/probabilities), or both."),
    ] = "nnunet",
    dtype: Annotated[
        Literal["float32", "float16", "uint16"],
        typer.Option(help="float16 with nnunet only; uint16 (scl_slope 1/65535) with nifti only."),
    ] = "float32",
    n_preprocessing: Annotated[
        int | None,
        typer.Option(
            "-npp",
            min=0,
            show_default=False,
            help="Processes that preprocess; 0 for none. Default: up to 3, fewer for few images or cores.",
        ),
    ] = None,
    n_export: Annotated[
        int | None,
        typer.Option(
            "-nps", min=0, show_default=False, help="Processes that pool, calibrate and write; default as for -npp."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--continue_prediction", "--resume", help="Skip cases finished with this calibrator, model and options."
        ),
    ] = False,
    keep_going: KeepGoingOption = False,
    force: Annotated[bool, typer.Option("--force", help="Apply a calibrator in spite of a difference.")] = False,
    checkpoint: CheckpointOption = "checkpoint_final.pth",
    disable_tta: DisableTtaOption = False,
    step_size: StepSizeOption = 0.5,
    device: NnunetDeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict images with nnU-Net and write calibrated probabilities beside the segmentation.

    Methods that preserve the decision and pool logits keep the segmentation of nnUNetv2_predict at every voxel. With
    several model folders, whose logits no command of nnU-Net averages, it is the decision of the mean over all folds.
    """
    from segcal.fitted import load_calibrator
    from segcal.nnunet.predict import check_applicable, predict_folder

    output = Output(json=json, quiet=quiet)
    fitted = load_calibrator(calibrator)
    models = _models(model, fold, more_folds, checkpoint, disable_tta, step_size, device)
    early = check_applicable(models, fitted, pooling=pooling, force=force)
    for sentence in early:
        output.warn(sentence)  # now, not after hours of prediction
    with output.stages() as progress:
        run = predict_folder(
            models,
            fitted,
            images,
            out,
            pooling=pooling,
            format=format,
            dtype=dtype,
            n_preprocessing=n_preprocessing,
            n_export=n_export,
            resume=resume,
            keep_going=keep_going,
            force=force,
            progress=progress,
        )
    for sentence in run.warnings[len(early) :]:
        output.warn(sentence)
    for case_id, message in run.failed.items():
        output.warn_of_case("failed", case_id, message)
    if run.differing:
        output.line(DIFFERING.format(sum(run.differing.values())))
    counts = {"of them already finished": len(run.skipped), "failed": len(run.failed)}
    rest = "".join(f", {n} {what}" for what, n in counts.items() if n)
    output.line(f"{fitted.info.method}: {count(len(run.cases), 'case')} written to {run.out}{rest}")
    output.result(
        {
            "out": run.out,
            "method": fitted.info.method,
            "cases": run.cases,
            "skipped": run.skipped,
            "failed": run.failed,
            "differing_voxels": run.differing,
            "warnings": run.warnings,
        }
    )
    if run.failed:
        raise typer.Exit(1)


@app.command(
    "hook",
    epilog=epilog(
        "segcal nnunet hook cms_ap.safetensors -- nnUNetv2_predict -d 4 -c 3d_fullres -i imagesTs -o predicted"
    ),
)
def hook(
    calibrator: Annotated[
        Path,
        typer.Argument(metavar="CALIBRATOR", show_default=False, help="Written by `segcal fit --pooling logits`."),
    ],
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND …", show_default=False, help="nnUNetv2_predict… with its arguments."),
    ],
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Run nnU-Net's own predict command and let it write calibrated probabilities beside its segmentation."""
    from contextlib import nullcontext

    from segcal.nnunet.hook import run_entry_point
    from segcal.nnunet.model import silenced

    output = Output(json=json, quiet=quiet)
    with silenced() if json or quiet else nullcontext():
        run_entry_point(calibrator, command, warn=output.warn)
    output.line(f"{calibrator}: calibrated probabilities are beside nnU-Net's segmentations")
    output.result({"calibrator": calibrator, "command": command})
