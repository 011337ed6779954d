"""`segcal corrupt`: a shifted test set from a folder of 2-D images."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from .common import DebugOption, JsonOption, Output, QuietOption, example


@example("segcal corrupt imagesTs --severity strong --out imagesTs_strong")
def corrupt(
    images: Annotated[Path, typer.Argument(metavar="IMAGES_DIR", help="Folder of 2-D images: .png, .bmp or .tif.")],
    severity: Annotated[Literal["mild", "strong"], typer.Option(help="How far the images are shifted.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the corrupted images and corruptions.csv.")],
    seed: Annotated[int, typer.Option(min=0, help="With an image's name it decides which corruption it gets.")] = 0,
    channels: Annotated[
        bool | None,
        typer.Option(
            "--channels/--no-channels",
            help="Whether _0000, _0001, … number the channels of one image; by default decided by the names.",
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Corrupt 2-D images to measure calibrators under shift: noise, blur, brightness, JPEG or fog, one an image.

    The corruptions are those of the paper's appendix H and leave labels where they are. Predict the new images with
    nnU-Net and hand their manifest to `segcal study --shifted`. Channel files of one image are corrupted as one image.
    """
    from segcal.corrupted_folder import RECORD_FILE, corrupt_folder

    output = Output(json=json, quiet=quiet)
    with output.stages() as progress:
        done = corrupt_folder(images, out, severity=severity, seed=seed, channels=channels, progress=progress)
    per_image = {one.image: one for one in done}
    counts = Counter(one.corruption for one in per_image.values())
    how = {one.corruption: one.parameters for one in done}
    output.table(("corruption", "parameters", "images"), [(name, how[name], counts[name]) for name in sorted(counts)])
    output.line(f"{len(per_image)} images in {len(done)} files written to {out}; {RECORD_FILE} says what was done")
    output.result({"out": out, "counts": counts, "files": [asdict(one) for one in done]})
