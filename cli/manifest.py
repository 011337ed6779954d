"""`segcal manifest`: make a manifest from folders of predictions, and check one."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from segcal.counted import count
from segcal.types import Kind

from .common import DebugOption, DeviceOption, JsonOption, Output, QuietOption, epilog, sub_app
from .manifest_file import ReplaceOption, check_free

app = sub_app("Make a manifest from folders of predictions; check one.")

MembersOption = Annotated[
    list[Path], typer.Option("--member", metavar="DIR", help="Folder of one member's predictions; once per member.")
]
MoreMembers = Annotated[
    list[Path] | None,
    typer.Argument(metavar="DIR", show_default=False, help="Further members, so that `--member fold_*` works."),
]
KindOption = Annotated[Kind, typer.Option("--kind", help="What the member files hold; it is never guessed.")]


@app.command(
    "scan",
    epilog=epilog(
        "segcal manifest scan --member fold_0 --member fold_1 --labels labels --kind probabilities --out manifest.yaml"
    ),
)
def scan(
    member: MembersOption,
    kind: KindOption,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The manifest to write.")],
    more: MoreMembers = None,
    labels: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of ground-truth label maps.")] = None,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of images, for pictures.")] = None,
    deployed: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the segmentations in use.")] = None,
    dataset_json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="nnU-Net's dataset.json; otherwise looked for nearby.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Channel names, when there is no dataset.json.")
    ] = None,
    axes: Annotated[str, typer.Option(help="Order of the axes in .npz members: czyx, cxyz or cyx.")] = "czyx",
    name: Annotated[str | None, typer.Option(help="Name of the dataset; otherwise that of the folder.")] = None,
    force: ReplaceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a manifest: files are matched by name, classes come from nnU-Net's dataset.json when there is one."""
    from segcal.manifest_scan import scan as scan_folders

    check_free(out, replace=force)
    output = Output(json=json, quiet=quiet)
    found = scan_folders(
        [*member, *(more or [])],
        kind=kind,
        out=out,
        labels=labels,
        images=images,
        deployed=deployed,
        dataset_json=dataset_json,
        classes=None if classes is None else [name.strip() for name in classes.split(",")],
        name=name,
        axes=axes,
    )
    manifest = found.manifest.save(out)
    for sentence in found.unmatched:
        output.warn(sentence)
    noun = "regions" if manifest.has_regions else "classes"
    output.line(
        f"{out}: {count(len(manifest.cases), 'case')} ({len(manifest.labelled_cases)} labelled), "
        f"{count(manifest.n_members, 'member')}"
    )
    output.line(f"{noun}: {', '.join(manifest.class_names)} ({found.source})")
    output.line(f"next: segcal manifest check {quote(str(out))}")
    output.result(
        {
            "manifest": out,
            "sha256": manifest.sha256,
            "n_cases": len(manifest.cases),
            "n_labelled": len(manifest.labelled_cases),
            "n_members": manifest.n_members,
            noun: manifest.class_names,
            "source": found.source,
            "unmatched": found.unmatched,
        }
    )


@app.command("check", epilog=epilog("segcal manifest check manifest.yaml"))
def check(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", show_default=False, help="The manifest to check.")],
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Open every file and print one line per finding; ends with 1 when any of them is fatal."""
    from segcal.manifest import Manifest
    from segcal.manifest_check import check_manifest

    output = Output(json=json, quiet=quiet)
    loaded = Manifest.load(manifest)
    with output.stages() as progress:
        report = check_manifest(loaded, device=device, progress=progress)
    for finding in report.findings:
        # The findings are what was asked for: --quiet leaves out the notes and the summary only.
        if not json and not (quiet and finding.severity == "note"):
            print(finding.line())
    output.line(report.summary())
    output.result(
        {
            "manifest": manifest,
            "sha256": loaded.sha256,
            "n_cases": report.n_cases,
            "n_files": report.n_files,
            "counts": report.counts(),
            "findings": [finding.as_dict() for finding in report.findings],
        }
    )
    if report.has_fatal:
        raise typer.Exit(1)
