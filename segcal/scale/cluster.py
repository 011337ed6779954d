"""Where the work goes: processes of this machine, or a Dask cluster that somebody started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import dask
from distributed import Client, LocalCluster, Security, Status, wait
from distributed.comm.core import connect

from segcal.errors import ClusterAwayError, ClusterError, UsageError
from segcal.extras import how_to_install
from segcal.scale.dask_cases import DaskCases
from segcal.scale.remote import SAME_ENVIRONMENT, difference, versions
from segcal.scale.stops import deaf_processes, later_stop

DEFAULT_WAIT_S = 300.0
"""For the first worker, and for another one when all are gone; Dask's setting WAIT_SETTING changes it."""
WAIT_SETTING = "segcal.wait-for-workers"
CONNECT_S = 20.0
ANSWER_S = 5.0
"""How long workers have to say their versions before the run begins without the answer."""
REPLACE_S = 1.0
"""How often local workers that Dask has given up are looked for."""

LOCAL_SETTINGS: dict[str, Any] = {
    # A case that took down three workers in a row is tried once more alone and then given up.
    "distributed.scheduler.allowed-failures": 2,
    # A worker gets its next case when it has finished one; the others wait where any worker can take them.
    "distributed.scheduler.worker-saturation": 1.0,
    # Dask ends the nanny of a worker that is away at this time after it was lost, even while the nanny is starting it
    # once more because it died twice. On one machine a nanny is never lost, so it may go on.
    "distributed.deploy.lost-worker-timeout": "24h",
    # Unlike a plain connection, one with TLS needs an answer of the other process, and a busy machine may delay that:
    # with Dask's 30 s a call to a worker failed at a load of 22 on two cores.
    "distributed.comm.timeouts.connect": "120s",
    # A paused worker would wait for memory that nobody frees; one that outgrows its share is ended and its case tried
    # elsewhere. Spilling has no point: workers keep nothing but small results.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.95,
    # Dask's own list also tells malloc to hand all memory back at once (MALLOC_TRIM_THRESHOLD_). Our cases are made of
    # large tensors that come and go, and getting them anew from the system each time cost three times the CPU.
    "distributed.nanny.pre-spawn-environ": {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "OPENBLAS_NUM_THREADS": 1},
}


SETTINGS: dict[str, Any] = {
    # A condensed sample travels once a method; Dask would advise against sending so much.
    "distributed.admin.large-graph-warning-threshold": "1GB",
}


@contextmanager
def open_cluster(
    *,
    scheduler: str | None = None,
    workers: int | None = None,
    memory_limit: str | int | None = None,
    wait_s: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[DaskCases]:
    """Connect to a scheduler, or start worker processes on this machine, for as long as the block lasts.

    Args:
        scheduler: address, `tcp://host:8786` or `tls://…`; TLS files are Dask's settings (docs/scaling.md).
        workers: number of local processes of one thread each, on the loopback address only and with a key of the run
            that nobody else has.
        memory_limit: of each local process; by default its share of the machine's memory.
        wait_s: how long to wait for a worker before giving up.
        tell: told where the dashboard is, in one line.

    Raises:
        ClusterAwayError: nobody answers, or no worker arrives.
        ClusterError: the workers run other versions, or the address is none.
    """
    if (scheduler is None) == (workers is None):
        raise UsageError("give either --scheduler ADDRESS or --workers N")
    patience = _patience_s() if wait_s is None else wait_s
    with ExitStack() as stack:
        stack.enter_context(_quiet("distributed"))
        stack.enter_context(dask.config.set(SETTINGS | ({} if workers is None else LOCAL_SETTINGS)))
        if workers is not None:
            address: Any = stack.enter_context(_local(workers, memory_limit))
        else:
            assert scheduler is not None
            address = _checked(scheduler)
        client = stack.enter_context(_connected(address, scheduler))
        try:
            _wait_for_a_worker(client, patience)
            _check_versions(client, versions())
        except OSError as error:
            raise ClusterAwayError(f"{scheduler}: the Dask scheduler went away ({error}).") from error
        if tell is not None:
            for line in _about(client):
                tell(line)
        # Interrupted while it closes, Dask waits ten seconds before it tries once more.
        try:
            yield DaskCases(client, patience, elsewhere=workers is None)
        except BaseException:
            with later_stop() as heard:
                stack.close()
                heard.clear()  # it is ending already, and whoever ends it says how
            raise
        with later_stop():
            stack.close()


def _patience_s() -> float:
    given = dask.config.get(WAIT_SETTING, DEFAULT_WAIT_S)
    try:
        return float(given)
    except (TypeError, ValueError):
        raise UsageError(
            f"DASK_SEGCAL__WAIT_FOR_WORKERS (Dask's setting {WAIT_SETTING}) is {given!r}; expected seconds"
        ) from None


@contextmanager
def _local(workers: int, memory_limit: str | int | None) -> Iterator[LocalCluster]:
    # Left out, it is shared out by workers; Dask's own word for that, "auto", would share it out by cores.
    limit = {} if memory_limit is None else {"memory_limit": memory_limit}
    key = _key_of_the_run()
    with _private_folder() as folder:
        with deaf_processes():
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                security=key,
                env={"TMPDIR": folder},
                dashboard_address="127.0.0.1:0" if find_spec("bokeh") is not None else None,
                silence_logs=logging.CRITICAL,
                **limit,
            )
        with cluster, _replaced(cluster):
            yield cluster


def _key_of_the_run() -> Security:
    """With a certificate that is its own authority: whoever does not hold it is neither let in nor believed."""
    try:
        key: Security = Security.temporary()
    except ImportError as error:
        raise UsageError(f"--workers encrypts with cryptography ({error}): {how_to_install('dask')}") from error
    return key


@contextmanager
def _private_folder() -> Iterator[str]:
    """For the temporary files of the cluster, until it has ended.

    Dask imports modules from its folder first, and the one it would choose may belong to another user of the machine.
    """
    temporary = TemporaryDirectory(prefix="segcal-", ignore_cleanup_errors=True)
    with temporary as folder, dask.config.set({"temporary-directory": folder}):
        yield folder


@contextmanager
def _replaced(cluster: LocalCluster) -> Iterator[None]:
    """Workers that Dask has given up are replaced by new ones, so that a case that ends all of them ends no run."""

    async def start_missing() -> None:
        with suppress(Exception):  # one that dies at its start, too, is replaced in its turn
            await cluster

    async def look() -> None:
        while True:
            await asyncio.sleep(REPLACE_S)
            for name, nanny in list(cluster.workers.items()):
                if nanny.status in (Status.closed, Status.failed):
                    del cluster.workers[name]
            if cluster.worker_spec.keys() - cluster.workers.keys():
                # Ended in the middle, a worker would be neither there nor closed.
                await asyncio.shield(start_missing())

    loop: Any = cluster.loop
    looking = asyncio.run_coroutine_threadsafe(look(), loop.asyncio_loop)
    try:
        yield
    finally:
        looking.cancel()


@contextmanager
def _connected(address: Any, scheduler: str | None) -> Iterator[Client]:
    try:
        if scheduler is not None:
            _knock(scheduler)
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # a TimeoutError is an OSError
        kind = ClusterError if isinstance(error, ValueError) else ClusterAwayError
        reason = str(error) or f"no word within {CONNECT_S:.0f} s"
        raise kind(
            f"{scheduler}: no Dask scheduler answers there ({reason}). Start one with `dask scheduler`, and give the "
            "address it prints."
        ) from error
    with client:
        yield client


def _knock(address: str) -> None:
    """Whether somebody there speaks Dask; a `Client` would wait without end for one who accepts and says nothing."""

    async def greet() -> None:
        arguments = Security().get_connection_args("client")
        comm = await asyncio.wait_for(connect(address, timeout=CONNECT_S, **arguments), CONNECT_S)
        await comm.close()

    try:
        with ThreadPoolExecutor(1) as executor:  # whoever calls may have an event loop of their own, as notebooks do
            executor.submit(asyncio.run, greet()).result()
    except TypeError as error:
        raise UsageError(
            f"--scheduler {address}: needs certificates ({error}); set DASK_DISTRIBUTED__COMM__TLS__CA_FILE and the "
            "client's CERT and KEY as docs/scaling.md shows"
        ) from error


def _checked(address: str) -> str:
    try:
        parts = urlsplit(address)
        whole = f"{parts.scheme}://{parts.netloc}" == address and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # the port is no number, or a large one
        whole = False
    if not whole or parts.scheme not in ("tcp", "tls", "ws", "wss"):
        raise UsageError(f"--scheduler {address}: expected an address such as tcp://host:8786 or tls://host:8786")
    return address


def _wait_for_a_worker(client: Client, wait_s: float) -> None:
    address = client.scheduler.address if client.scheduler is not None else "the scheduler"
    try:
        client.wait_for_workers(1, timeout=wait_s)
    except TimeoutError:
        raise ClusterAwayError(
            f"{address}: no worker arrived within {wait_s:.0f} s. Start some with `dask worker "
            f"{address} --nthreads 1`, or wait longer: DASK_SEGCAL__WAIT_FOR_WORKERS=<seconds>."
        ) from None


def _check_versions(client: Client, expected: Mapping[str, str]) -> None:
    """Of the workers that answer soon; of the others, and of later ones, when they get their first case."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    asked = {address: client.submit(versions, workers=[address], pure=False) for address in workers}
    with client.as_current(), suppress(TimeoutError):
        wait(list(asked.values()), timeout=ANSWER_S)
    for address, answer in asked.items():
        if answer.status == "error" and isinstance(answer.exception(), ImportError):
            raise ClusterError(
                f"worker {address} cannot run segcal ({answer.exception()}). "
                "Install segcal[dask] in the workers' environment."
            )
        if answer.status == "error" and isinstance(answer.exception(), RuntimeError):
            reason = " ".join(str(answer.exception()).split()[:12])
            raise ClusterError(f"the scheduler cannot read what segcal sends ({reason} …). {SAME_ENVIRONMENT}")
        if answer.status == "finished" and (apart := difference(expected, answer.result(), address)) is not None:
            raise ClusterError(apart)


def _about(client: Client) -> Iterator[str]:
    info = client.scheduler_info(n_workers=-1)
    several = [address for address, each in info["workers"].items() if each["nthreads"] > 1]
    if several:
        yield (
            f"{len(several)} workers run several threads; each then holds as many cases in memory. "
            "`dask worker --nthreads 1 --nworkers N` is meant"
        )
    if "dashboard" in info.get("services", {}):
        yield f"dashboard: {client.dashboard_link}"


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Dask logs lost workers and closed connections; what matters of it becomes an error of ours."""
    # Dask gives some of its loggers a level of their own.
    names = [known for known in logging.root.manager.loggerDict if f"{known}.".startswith(f"{name}.")]
    before = {each: logging.getLogger(each).level for each in names}
    for each in names:
        logging.getLogger(each).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in before.items():
            logging.getLogger(each).setLevel(level)
