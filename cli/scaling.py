"""The options of every command that can work on many cases at once: `--workers N` and `--scheduler ADDRESS`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal.errors import UsageError
from segcal.extras import how_to_install
from segcal.io.atomic import remove_unfinished

from .common import Output

if TYPE_CHECKING:
    from segcal.case_map import CaseMap
    from segcal.scale import DaskCases

WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="Work in N processes of this machine; needs segcal[dask]."),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option("--scheduler", metavar="ADDRESS", help="Work on a Dask cluster, tcp://host:8786; needs segcal[dask]."),
]


@contextmanager
def chosen_workers(
    output: Output, scheduler: str | None, workers: int | None, *, written: Path | None = None
) -> Iterator[CaseMap]:
    """Yield the `case_map` argument of a library function: this process unless an option says otherwise.

    Args:
        written: folder of an `apply` run that the workers write into; what local ones left half-written when the run
            was stopped is removed after they have ended.
    """
    if scheduler is None and workers is None:
        from segcal.case_map import in_process

        yield in_process
        return
    if scheduler is not None and workers is not None:
        raise UsageError("--workers starts processes here, --scheduler uses those of a cluster; give one of them")
    try:
        from segcal.scale import open_cluster
    except ImportError as error:
        raise UsageError(f"--workers and --scheduler need Dask ({error}): {how_to_install('dask')}") from error
    cases: DaskCases | None = None
    try:
        with open_cluster(scheduler=scheduler, workers=workers, tell=output.note) as cases:
            yield cases
    except BaseException:
        if written is not None and workers is not None and cases is not None and cases.used:
            from segcal.applying.record import SUBFOLDERS

            remove_unfinished(written, SUBFOLDERS)
        raise
