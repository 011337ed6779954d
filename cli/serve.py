"""`segcal serve`: predictions come in, calibrated maps and QA come out, people look at a page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal.errors import UsageError
from segcal.extras import how_to_install

from .common import DebugOption, JsonOption, Output, QuietOption, example

if TYPE_CHECKING:
    from segcal.service.settings import Limits, ServiceSettings

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

DataOption = Annotated[
    Path, typer.Option("--data", metavar="DIR", help="Folder of all that the service keeps; made if it is not there.")
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="postgresql://… for a shared store; otherwise SQLite in --data."),
]
RootOption = Annotated[
    list[Path] | None,
    typer.Option("--root", metavar="DIR", help="Folder that jobs may read from; repeat for more."),
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="A job that grows beyond it is ended, e.g. 16G.")
]


@example("segcal serve --data service --root /data/predictions")
def serve(
    data: DataOption,
    host: Annotated[str, typer.Option(help="Address to listen on; tokens are required unless it is loopback.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8421,
    store: StoreOption = None,
    root: RootOption = None,
    watch: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Calibrate every nnU-Net output that appears here; needs --calibrator."),
    ] = None,
    calibrator: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What watched outputs are calibrated with.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes to start; 0 if they run elsewhere.")] = 1,
    host_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name that a proxy is reached by; requires tokens.")
    ] = None,
    require_tokens: Annotated[bool, typer.Option("--require-tokens", help="Also on loopback.")] = False,
    queue_limit: Annotated[int, typer.Option(min=1, help="Jobs that may wait.")] = 10_000,
    upload_limit: Annotated[str, typer.Option(metavar="SIZE", help="Largest upload.")] = "2G",
    min_free_disk: Annotated[str, typer.Option(metavar="SIZE", help="With less, nothing is taken in.")] = "2G",
    memory_limit: MemoryOption = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Let a Dask cluster work on the cases.")
    ] = None,
    keep_days: Annotated[
        int | None, typer.Option(min=1, metavar="DAYS", help="Remove jobs and their files so long after their end.")
    ] = None,
    settle: Annotated[float, typer.Option(min=0.0, help="Seconds a watched output must not have changed.")] = 10.0,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the service: REST under /v1, pages, workers, watched folders. Ctrl-C or SIGTERM ends all of it cleanly.

    Jobs outlive it: what was running is taken up again by the next start. The log goes to stderr, a JSON object a line.
    """
    from segcal.service.settings import ServiceSettings, WatchSettings

    limits = _limits(queue_limit, upload_limit, min_free_disk, memory_limit)
    if (watch is None) != (calibrator is None):
        raise UsageError("--watch and --calibrator belong together: give both or neither")
    settings = ServiceSettings(
        data=data.absolute(),
        store_url=store,
        roots=tuple(existing(folder, "--root") for folder in root or ()),
        host=host,
        port=port,
        host_names=tuple(host_name or ()),
        require_tokens=require_tokens,
        limits=limits,
        scheduler=scheduler,
        keep_days=keep_days,
        watch=tuple(
            WatchSettings(existing(folder, "--watch"), sha256_of(calibrator), settle_seconds=settle)
            for folder in watch or ()
            if calibrator is not None
        ),
    )
    _run(settings, workers, calibrator, Output(json=json, quiet=quiet))


def size_of(text: str, option: str) -> int:
    """Bytes from `512M`, `2G` or `1000000`."""
    match = re.fullmatch(r"([0-9]{1,15})([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise UsageError(f"{option} {text!r}: expected a size such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2]]


def existing(folder: Path, option: str) -> Path:
    """A folder that has to be there."""
    if not folder.is_dir():
        raise UsageError(f"{option} {folder}: no such folder")
    return folder.absolute()


def sha256_of(path: Path) -> str:
    """Hash of a calibrator file, by which the service knows it."""
    import hashlib

    if not path.is_file():
        raise UsageError(f"--calibrator {path}: no such file")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _limits(queue: int, upload: str, free_disk: str, memory: str | None) -> Limits:
    from segcal.service.settings import Limits

    return Limits(
        queued_jobs=queue,
        upload_bytes=size_of(upload, "--upload-limit"),
        free_disk_bytes=size_of(free_disk, "--min-free-disk"),
        job_memory_bytes=None if memory is None else size_of(memory, "--memory-limit"),
    )


def _run(settings: ServiceSettings, workers: int, calibrator: Path | None, output: Output) -> None:
    try:
        from segcal.service.api.log import log_to
        from segcal.service.api.service import run_service
    except ImportError as error:
        raise UsageError(f"the service needs more packages ({error}): {how_to_install('service')}") from error

    def started(address: str) -> None:
        if not output.json:
            print(f"segcal serves {address}")  # also with --quiet: where port 0 led to is told nowhere else
        output.result({"address": address, "tokens_required": settings.tokens_required, "data": settings.data})
        sys.stdout.flush()
        if not settings.tokens_required:
            output.note("anybody on this machine may use it; --require-tokens changes that")

    log_to()
    run_service(settings, workers, calibrator, started)
