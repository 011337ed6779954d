"""What a service may do and how much of it: one frozen object made from the command line."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that keep one user or one bad file from stopping the others.

    Attributes:
        queued_jobs: a submission beyond this is answered with 429.
        upload_bytes: size of one uploaded case or calibrator.
        upload_seconds: an upload that takes longer is given up.
        unpacked_bytes: size of an uploaded archive once it is unpacked.
        free_disk_bytes: with less free space below the data folder nothing new is taken in.
        job_memory_bytes: a job whose process grows beyond this is ended; None for no limit.
        attempts: a job whose worker died this often is given up.
        lease_seconds: a job whose worker was not heard of for so long is taken up again.
        event_streams: server-sent event streams open at once.
        uploads: uploads received at once.
        idle_seconds: a request of which nothing arrives for so long is given up.
        body_bytes: size of a request that is no upload.
    """

    queued_jobs: int = 10_000
    upload_bytes: int = 2 * GIB
    upload_seconds: float = 600.0
    unpacked_bytes: int = 8 * GIB
    free_disk_bytes: int = 2 * GIB
    job_memory_bytes: int | None = None
    attempts: int = 3
    lease_seconds: float = 60.0
    event_streams: int = 64
    uploads: int = 8
    idle_seconds: float = 30.0
    body_bytes: int = 4 * MIB


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """One watched folder.

    Attributes:
        folder: where nnU-Net writes its predictions.
        calibrator: sha256 of the calibrator that its outputs get.
        settle_seconds: how long the files of an output must not have changed.
        poll_seconds: how often the folder is looked at.
    """

    folder: Path
    calibrator: str
    settle_seconds: float = 10.0
    poll_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """A running service.

    Attributes:
        data: folder of everything the service writes; shared by all servers and workers of one store.
        store_url: SQLAlchemy address of the store; SQLite below `data` when absent.
        roots: folders that jobs may read from. Empty: none but the data folder's own uploads.
        host, port: where the server listens.
        host_names: further names the server is reached by, as a proxy in front of it says them.
        require_tokens: also on loopback.
        limits: see `Limits`.
        watch: folders looked after.
        scheduler: address of a Dask scheduler that cases are worked on by.
        keep_days: finished jobs are removed after so many days; None to keep them for ever.
    """

    data: Path
    store_url: str | None = None
    roots: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8421
    host_names: tuple[str, ...] = ()
    require_tokens: bool = False
    limits: Limits = field(default_factory=Limits)
    watch: tuple[WatchSettings, ...] = ()
    scheduler: str | None = None
    keep_days: float | None = None

    @property
    def database(self) -> Path:
        """File of the store, unless it has an address of its own."""
        return self.data.absolute() / "segcal.db"

    @property
    def url(self) -> str:
        """Address of the store."""
        return self.store_url or f"sqlite:///{self.database}"

    @property
    def tokens_required(self) -> bool:
        """Whether every request needs a token: as soon as others than users of this machine can reach the server."""
        return self.require_tokens or bool(self.host_names) or not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host, without port and brackets, is this machine and nothing else."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
