"""What every route needs: the settings, the store, where files lie, and what is counted."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from segcal.service.api.metrics import ServiceMetrics
from segcal.service.api.slots import Slots
from segcal.service.errors import IntakePausedError
from segcal.service.files import ServiceFiles
from segcal.service.roots import Roots
from segcal.service.settings import MIB, ServiceSettings

if TYPE_CHECKING:
    from segcal.service.store import Store


@dataclass(frozen=True)
class ApiContext:
    """Shared by all requests of one server.

    Attributes:
        roots: what jobs may name.
        uploads, streams: how many of each are under way.
        stopping: set when the server is to end, so that endless answers end too.
    """

    settings: ServiceSettings
    store: Store
    files: ServiceFiles
    roots: Roots
    metrics: ServiceMetrics
    uploads: Slots
    streams: Slots
    stopping: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, settings: ServiceSettings, store: Store) -> ApiContext:
        return cls(
            settings=settings,
            store=store,
            files=ServiceFiles(settings.data),
            roots=Roots.of(settings.roots),
            metrics=ServiceMetrics(),
            uploads=Slots(settings.limits.uploads, "uploads"),
            streams=Slots(settings.limits.event_streams, "event streams"),
        )

    def free_disk_bytes(self) -> int:
        """Space left below the data folder."""
        return shutil.disk_usage(self.settings.data).free

    def check_intake(self, n_bytes: int = 0) -> None:
        """Whether something new of `n_bytes` may come in.

        Raises:
            IntakePausedError: the disk is nearly full.
        """
        free, kept = self.free_disk_bytes(), self.settings.limits.free_disk_bytes
        if free - n_bytes < kept:
            raise IntakePausedError(
                f"intake paused: {free // MIB:,} MiB are free where the service keeps its files, and "
                f"{kept // MIB:,} MiB are kept free (--min-free-disk); finished jobs stay readable. Free some space"
            )


def context_of(request: Request) -> ApiContext:
    """The context of the app that a request came to."""
    context = request.app.state.context
    assert isinstance(context, ApiContext)
    return context


Context = Annotated[ApiContext, Depends(context_of)]
