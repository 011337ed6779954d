"""What Prometheus reads: requests by route and status, and what is kept in the store and on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from segcal.service.api.context import ApiContext

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class ServiceMetrics:
    """The numbers of one server. Labels are route templates, never ids, so their number is bounded."""

    def __init__(self) -> None:
        # A registry of its own: several apps in one process, as in tests, do not add up.
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "segcal_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "segcal_request_seconds", "Time to the end of the answer.", ["route"], buckets=_SECONDS, registry=registry
        )
        self._jobs = Gauge("segcal_jobs", "Jobs in the store.", ["state"], registry=registry)
        self._age = Gauge("segcal_queue_age_seconds", "Since the oldest waiting job was submitted.", registry=registry)
        self._cases = Gauge("segcal_cases", "Cases looked at.", registry=registry)
        self._free = Gauge("segcal_disk_free_bytes", "Free space at the data folder.", registry=registry)
        self._paused = Gauge("segcal_intake_paused", "1 when the disk is nearly full.", registry=registry)
        self._streams = Gauge("segcal_event_streams", "Event streams open.", registry=registry)
        self._uploads = Gauge("segcal_uploads", "Uploads under way.", registry=registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Note one answered request."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, context: ApiContext) -> bytes:
        """Everything, in Prometheus' text format."""
        store = context.store
        for state, number in store.jobs.counts().items():
            self._jobs.labels(state).set(number)
        oldest = store.jobs.oldest_queued()
        self._age.set(0.0 if oldest is None else max(0.0, store.now() - oldest))
        self._cases.set(store.cases.count())
        free = context.free_disk_bytes()
        self._free.set(free)
        self._paused.set(free < context.settings.limits.free_disk_bytes)
        self._streams.set(context.streams.taken)
        self._uploads.set(context.uploads.taken)
        return generate_latest(self._registry)
