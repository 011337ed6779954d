"""`segcal worker`: does the jobs of a service whose server runs elsewhere."""

from __future__ import annotations

import logging
import threading
from typing import Annotated

import typer

from segcal.errors import UsageError
from segcal.extras import how_to_install

from .common import DebugOption, JsonOption, Output, QuietOption, example
from .serve import DataOption, MemoryOption, RootOption, StoreOption, existing, size_of


@example("segcal worker --data /srv/segcal --store postgresql://segcal@db/segcal --root /data/predictions")
def worker(
    data: DataOption,
    store: StoreOption = None,
    root: RootOption = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Let a Dask cluster work on the cases.")
    ] = None,
    memory_limit: MemoryOption = None,
    min_free_disk: Annotated[str, typer.Option(metavar="SIZE", help="With less, no job is begun.")] = "2G",
    attempts: Annotated[int, typer.Option(min=1, help="Give a job up when its worker died this often.")] = 3,
    lease: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="A worker not heard of for so long has lost its job.")
    ] = 60.0,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Take jobs from the store and do them, until Ctrl-C or SIGTERM; the job at hand then goes back to the queue.

    `segcal serve` starts its own workers. Start this one on further machines, with the same --data (a shared folder)
    and --store as the server. The log goes to stderr, a JSON object a line.
    """
    from segcal.service.settings import Limits, ServiceSettings

    try:
        from segcal.service.api.log import log_to
        from segcal.service.supervise import run_worker
    except ImportError as error:
        raise UsageError(f"the service needs more packages ({error}): {how_to_install('service')}") from error
    limits = Limits(
        free_disk_bytes=size_of(min_free_disk, "--min-free-disk"),
        job_memory_bytes=None if memory_limit is None else size_of(memory_limit, "--memory-limit"),
        attempts=attempts,
        lease_seconds=lease,
    )
    settings = ServiceSettings(
        data=existing(data, "--data"),
        store_url=store,
        roots=tuple(existing(folder, "--root") for folder in root or ()),
        limits=limits,
        scheduler=scheduler,
    )
    log_to(level=logging.WARNING if quiet else logging.INFO)
    ends = run_worker(settings, threading.Event())
    out = Output(json=json, quiet=quiet)
    out.line(", ".join(f"{n} {end}" for end, n in ends.items()) or "no job came")
    out.result({"jobs": dict(ends)})
