"""Forgets jobs that were finished long ago, so that a department's disk does not fill: their files and their rows.

It may be killed at any moment, and several servers may do it at once: files without rows are removed by the next round,
rows keep their files.
"""

from __future__ import annotations

import logging
import shutil
import threading
from functools import partial

from segcal.service.errors import StoreError
from segcal.service.files import ServiceFiles, flush_folder
from segcal.service.store import Store

log = logging.getLogger("segcal.service.prune")

EVERY_S = 3600.0
DAY_S = 86_400.0


class Pruner:
    """Removes what is older than so many days.

    Args:
        store, files: of the service.
        keep_days: how long a finished job is kept.
    """

    def __init__(self, store: Store, files: ServiceFiles, keep_days: float) -> None:
        self._store, self._files, self._keep_days = store, files, keep_days

    def run(self, stop: threading.Event) -> None:
        """Look every hour until told to stop; trouble is logged, and it is tried again."""
        log.info("jobs are removed %g days after their end", self._keep_days)
        while not stop.is_set():
            try:
                if n_removed := self.prune(stop):
                    log.info("%d jobs were removed", n_removed)
            except (StoreError, OSError) as error:
                log.warning("old jobs could not be removed: %s; tried again later", error)
            stop.wait(EVERY_S)

    def prune(self, stop: threading.Event) -> int:
        """Remove what is old now, or until told to stop; how many jobs that were."""
        self._finish_earlier()
        moment = self._store.now() - self._keep_days * DAY_S
        n_removed = 0
        while not stop.is_set() and (ids := self._store.old_jobs.finished_before(moment)):
            for job_id in ids:
                if self._store.old_jobs.forget(job_id, moment, partial(self._set_aside, job_id)):
                    shutil.rmtree(self._files.pruned / job_id, ignore_errors=True)
                    n_removed += 1
                if stop.is_set():
                    break
        return n_removed

    def _finish_earlier(self) -> None:
        """What a round that was killed set aside: gone if its job is, otherwise back in its place."""
        if self._files.pruned.is_dir():
            for folder in self._files.pruned.iterdir():
                if not self._store.old_jobs.if_kept(folder.name, partial(self._put_back, folder.name)):
                    shutil.rmtree(folder, ignore_errors=True)

    def _set_aside(self, job_id: str) -> None:
        place = self._files.job(job_id)
        if place.is_dir():
            self._files.pruned.mkdir(exist_ok=True)
            place.rename(self._files.pruned / job_id)
            # On the disk before the rows are gone: a power cut must not leave files that no row tells of.
            for folder in (place.parent, self._files.pruned):
                flush_folder(folder)

    def _put_back(self, job_id: str) -> None:
        aside, place = self._files.pruned / job_id, self._files.job(job_id)
        if place.exists():  # it was tried again meanwhile, and has made what it needs
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.rename(place)
