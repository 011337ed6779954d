"""All of `segcal serve`: the store, the workers, the watched folders and the web server, started and ended in order."""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from segcal.service.api.app import create_app
from segcal.service.api.context import ApiContext
from segcal.service.api.server import address_of, listen, run_app
from segcal.service.calibrator_files import import_calibrator
from segcal.service.files import ServiceFiles
from segcal.service.prune import Pruner
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store, open_store
from segcal.service.supervise import LocalWorkers
from segcal.service.watch import Watcher

log = logging.getLogger("segcal.service")

_THREADS_END_S = 10.0


def run_service(
    settings: ServiceSettings, n_workers: int, calibrator: Path | None, started: Callable[[str], None]
) -> None:
    """Run until SIGTERM or SIGINT.

    Args:
        n_workers: worker processes of this server.
        calibrator: file of the calibrator that watched outputs get.
        started: called with the address as soon as requests are answered.
    """
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    if settings.data.stat().st_mode & stat.S_IXOTH:
        log.warning("every user of this machine may look into %s, where images of patients are kept", settings.data)
    # Before anything is started: a port in use is the most frequent mistake.
    with listen(settings.host, settings.port) as listening:
        store = open_store(settings.url)
        try:
            if calibrator is not None:
                import_calibrator(calibrator, calibrator.stem, ServiceFiles(settings.data), store)
            if settings.tokens_required and not store.tokens.list():
                log.warning("there is no token yet, so nobody may do anything; `segcal token create` makes one")
            app = create_app(settings, store)
            address = address_of(listening, settings.host)
            with (
                _local_workers(settings, n_workers),
                _watchers(settings, store, app.state.context),
                _pruning(settings, store),
            ):
                run_app(app, listening, lambda: started(address))
        finally:
            store.close()


@contextmanager
def _local_workers(settings: ServiceSettings, n_workers: int) -> Iterator[None]:
    # What is watched may be read by the jobs made of it; submitted jobs were held to the roots before they got here.
    watched = tuple(each.folder for each in settings.watch)
    workers = LocalWorkers(replace(settings, roots=(*settings.roots, *watched)), n_workers)
    workers.start()
    try:
        yield
    finally:
        workers.stop()


@contextmanager
def _watchers(settings: ServiceSettings, store: Store, context: ApiContext) -> Iterator[None]:
    limit = settings.limits.queued_jobs
    watchers = [Watcher(each, store, queue_limit=limit, check_intake=context.check_intake) for each in settings.watch]
    with _in_threads([watcher.run for watcher in watchers]):
        yield


@contextmanager
def _pruning(settings: ServiceSettings, store: Store) -> Iterator[None]:
    if settings.keep_days is None:
        yield
        return
    pruner = Pruner(store, ServiceFiles(settings.data), settings.keep_days)
    with _in_threads([pruner.run]):
        yield


@contextmanager
def _in_threads(loops: Sequence[Callable[[threading.Event], None]]) -> Iterator[None]:
    """Run loops beside the block, at whose end they are told to stop."""
    stop = threading.Event()
    threads = [threading.Thread(target=loop, args=(stop,), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(_THREADS_END_S)
