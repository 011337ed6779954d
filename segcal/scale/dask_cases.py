"""The `CaseMap` on a Dask cluster: a bounded number of cases under way, results in the order of the cases.

Nothing is shipped but the function (once a run, a task of its own, so that any worker can have it again), the names of
the cases and their small results: workers read the files themselves. A worker that dies is Dask's business, its cases
are done again elsewhere; a case that several workers died of is ours, and so is a cluster that went away.
"""

from __future__ import annotations

import pickle
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from dask._task_spec import Task, TaskRef
from distributed import CancelledError, Client, Future, KilledWorker
from distributed.comm.core import CommClosedError

from segcal.case_map import Item, Outcome, Result
from segcal.errors import ClusterAwayError, ClusterError, LostCaseError
from segcal.scale.remote import MEMORY_ADVICE, SAME_ENVIRONMENT, Job, Raised, open_job, run_item, versions

CASES_PER_THREAD = 2
"""Under way at once, so that a worker never waits for us; more would only fill the scheduler."""
RESULTS_PER_THREAD = 8
"""Under way or finished but not yet asked for: a slow case must not let the results of the others pile up."""
LOOK_S = 1.0
CALL_S = 20.0
"""How long the scheduler may take to answer."""
_END = object()


@dataclass(frozen=True, slots=True)
class DaskCases:
    """Runs cases on the workers of a cluster.

    Attributes:
        client: connected.
        patience_s: how long to wait while there is no worker, or no scheduler, before giving up.
        elsewhere: the workers may be on other machines, which may not see the same files.
    """

    client: Client
    patience_s: float = 300.0
    elsewhere: bool = True
    _sent: list[tuple[object, Future[Any]]] = field(default_factory=list, init=False, repr=False)

    def __call__(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]:
        """See `segcal.case_map.CaseMap`."""
        run = _Run(self.client, self.patience_s)
        source = iter(items)
        try:
            run.begin(self._job(work))
            following: object = _END
            exhausted = False
            while True:
                while not exhausted and run.has_room:
                    following = next(source, _END)
                    exhausted = following is _END
                    if not exhausted:
                        run.submit(following)
                if not run.cases:
                    return
                item, future = run.cases[0]
                if future.done():
                    run.cases.popleft()
                    value, error = run.outcome(item, future)
                    del future
                    yield Outcome(cast(Item, item), cast(Result, value), error)
                else:
                    run.wait()
        finally:
            run.end()

    @property
    def used(self) -> bool:
        """Whether any work was sent to the workers."""
        return bool(self._sent)

    def _job(self, work: object) -> Future[Any]:
        """The work as a task; kept until the next one, because the batches of a search share theirs."""
        if not self._sent or self._sent[0][0] is not work or self._sent[0][1].status not in ("pending", "finished"):
            job = Job(cast(Callable[[Any], Any], work), versions(), self.elsewhere)
            pickled = pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL)
            key = f"segcal-job-{secrets.token_hex(6)}"
            self._sent[:] = [(work, self.client.submit(open_job, pickled, key=key, pure=False))]
        return self._sent[0][1]


@dataclass(slots=True)
class _Run:
    """One function over one list of cases."""

    client: Client
    patience_s: float
    cases: deque[tuple[object, Future[Any]]] = field(default_factory=deque)
    _name: str = field(default_factory=lambda: secrets.token_hex(6))
    _job: Future[Any] | None = None
    _finished: queue.SimpleQueue[Future[Any]] = field(default_factory=queue.SimpleQueue)
    _n_threads: int = 1
    _n_submitted: int = 0
    _missed: float | None = None
    _looked: float = 0.0

    def begin(self, job: Future[Any]) -> None:
        self._look()
        self._job = job

    @property
    def has_room(self) -> bool:
        under_way = sum(not future.done() for _, future in self.cases)
        return under_way < CASES_PER_THREAD * self._n_threads and len(self.cases) < RESULTS_PER_THREAD * self._n_threads

    def submit(self, item: object) -> None:
        self.cases.append((item, self._start(item)))

    def wait(self) -> None:
        """Until some case is finished, or for a moment; raises when there is nobody left to wait for."""
        with suppress(queue.Empty):
            self._finished.get(timeout=LOOK_S)
        if time.monotonic() - self._looked > LOOK_S:
            self._look()

    def outcome(self, item: object, future: Future[Any], *, alone: bool = False) -> tuple[Any, Exception | None]:
        """Value and error of a case that is done; `alone` if nothing else was under way."""
        try:
            value = self._value(future)
            if isinstance(value, Raised):
                raise value.error
            return value, None
        except KilledWorker as error:
            return (None, _lost(item, error)) if alone else self._alone(item)
        except CancelledError as error:
            raise self._gone(str(error)) from error
        except ClusterError:
            raise
        except Exception as error:
            if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "segcal":
                raise ClusterError(f"a worker cannot import {error.name}: {error}. {SAME_ENVIRONMENT}") from error
            lost = isinstance(error, CommClosedError) and future.status != "error"
            if lost or self.client.status != "running":  # the result was lost on its way; the case is not to blame
                raise self._gone(str(error)) from error
            return None, error

    def end(self) -> None:
        """Drop what is under way; results of it would go nowhere."""
        left = [future for _, future in self.cases]
        self.cases.clear()
        with suppress(Exception):  # the cluster may be gone, and this is no place to complain about it
            if left:
                self.client.cancel(left, force=True)

    def _start(self, item: object) -> Future[Any]:
        self._n_submitted += 1
        key = f"segcal-case-{self._name}-{self._n_submitted}"
        assert self._job is not None
        # Without this mark Dask prefers workers that already have the function, and the others look on.
        task = Task(key, run_item, TaskRef(self._job.key), item, _data_producer=True)
        future: Future[Any] = self.client.get({key: task}, key, sync=False)
        future.add_done_callback(self._finished.put)
        return future

    def _value(self, future: Future[Any]) -> Any:
        while True:
            try:
                return future.result(timeout=CALL_S)
            except TimeoutError:
                if future.status == "error":
                    raise  # it is the work that ran into a time limit
                self._look()

    def _alone(self, item: object) -> tuple[Any, Exception | None]:
        """A dying worker takes cases down that only waited on it, so the one to blame is known when it runs alone."""
        while any(not future.done() for _, future in self.cases):
            self.wait()
        future = self._start(item)
        while not future.done():
            self.wait()
        return self.outcome(item, future, alone=True)

    def _look(self) -> None:
        """Count the workers; after a while without any, or without a scheduler, give up."""
        self._looked = now = time.monotonic()
        n_threads, trouble, answers = self._threads()
        if n_threads:
            self._missed, self._n_threads = None, n_threads
            return
        if self.client.status in ("closing", "closed"):
            raise self._gone("the connection is closed")
        self._missed = now if self._missed is None else self._missed
        if now - self._missed > self.patience_s:
            raise self._gone(f"{trouble} for {self.patience_s:.0f} s", answers=answers)

    def _threads(self) -> tuple[int, str, bool]:
        """Threads of the workers that take work, what is wrong without any, and whether the scheduler answers."""
        try:
            assert self.client.scheduler is not None
            info = self.client.sync(self.client.scheduler.identity, n_workers=-1, callback_timeout=CALL_S)
        except (OSError, RuntimeError) as error:  # no answer in time, the connection or its loop closed
            return 0, f"the scheduler did not answer ({type(error).__name__}: {error})", False
        workers: Mapping[str, Any] = info["workers"]
        working = sum(each["nthreads"] for each in workers.values() if each.get("status", "running") == "running")
        trouble = "no worker was there" if not workers else f"none of {len(workers)} workers took work"
        return working, trouble, True

    def _gone(self, why: str, *, answers: bool = False) -> ClusterError:
        """Workers may have gone because of their work; a scheduler that does not answer has done none."""
        address = self.client.scheduler.address if self.client.scheduler is not None else "unknown"
        reason = " ".join(why.split()).rstrip(".")  # Dask's words may have several lines
        return (ClusterError if answers else ClusterAwayError)(
            f"the cluster at {address} is gone: {reason}. What was finished is kept as far as the command keeps it "
            "(apply and study go on with --resume); start a scheduler and workers and run the command again."
        )


def _lost(item: object, error: KilledWorker) -> LostCaseError:
    return LostCaseError(
        f"{item}: {2 * (error.allowed_failures + 1)} workers died while they worked on it, the last one alone. Most "
        f"likely it does not fit into their memory; {MEMORY_ADVICE}."
    )
