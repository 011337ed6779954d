"""`segcal demo`: the whole flow on a small synthetic ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segcal.device import resolve_device

from .common import DebugOption, DeviceOption, JsonOption, Output, QuietOption, example


@example("segcal demo --out demo_out")
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the phantom, its maps and the page.")] = Path(
        "demo_out"
    ),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed gives another phantom.")] = 0,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the whole flow on a small synthetic ensemble and show what calibration does.

    Makes a five-member ensemble whose truth is known (about 130 MB of files), fits eight calibrators, applies one,
    measures all of them on cases they have not seen, and ends with a page to open. Takes a minute or two.
    """
    from segcal.demo.run import run_demo
    from segcal.demo.table import COLUMNS, table_cells, table_header

    output = Output(json=json, quiet=quiet)
    with output.stages() as progress:
        result = run_demo(out, seed=seed, device=resolve_device(device, sums=True), progress=progress)
    groups = list(result.scores.groups)
    output.line()
    output.table(table_header(groups), [table_cells(row) for row in result.rows])
    output.line()
    for sentence in result.findings:
        output.line(f"- {sentence}")
    output.line()
    output.line(f"The page: {result.page}")
    pipelines = [
        {
            "name": row.name,
            "groups": {
                group: {column.key: result.scores.mean(row.name, group, column.key) for column in COLUMNS}
                for group in groups
            },
        }
        for row in result.rows
    ]
    output.result({"page": result.page.absolute(), "table": result.table.absolute(), "pipelines": pipelines})
