"""`segcal report`: one page from a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import DebugOption, JsonOption, Output, QuietOption, example


@example("segcal report results --out report.html")
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What evaluate, study or apply wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page; report.html in the folder by default.")
    ] = None,
    pictures: Annotated[
        int, typer.Option("--pictures", min=0, help="So many of the worst cases carry a picture.")
    ] = 100,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Make one self-contained HTML page of results: verdict, tables, reliability, cases with slices.

    The page needs no network and no other file. It works for the results of evaluate and study, and in a short form
    for a folder of apply.
    """
    from segcal.report.page import write_report

    output = Output(json=json, quiet=quiet)
    with output.stages() as progress:
        path = write_report(folder, out, max_pictures=pictures, progress=progress)
    n_bytes = path.stat().st_size
    size = f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
    output.line(f"{path} ({size})")
    output.result({"page": path, "bytes": n_bytes})
