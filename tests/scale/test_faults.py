"""Workers killed, out of memory or of no use, cases that raise, a scheduler that goes away: with real processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("distributed")

from segcal.apply import apply_calibrator
from segcal.errors import ClusterAwayError, ClusterError, DataError, LostCaseError, MissingFileError, UsageError
from segcal.evaluation.run import evaluate
from segcal.fitting.run import fit
from segcal.io.atomic import TEMPORARY_PREFIX
from segcal.manifest import Manifest
from segcal.scale import DaskCases, cluster, dask_cases, open_cluster, remote
from tests.apply_data import temperature
from tests.fit_data import write_ensemble
from tests.scale.dask_processes import dask_process
from tests.scale.faulty import Held, Meet, Slow, raise_stubborn, raising, sleep_long, unreadable, wait_for, with_fault
from tests.scale.test_same_bytes import files_below

CPU = torch.device("cpu")
SPLIT = {"calibration": (0, 1, 2), "validation": (3,), "test": (4, 5)}


@pytest.fixture(scope="module")
def workers() -> Iterator[DaskCases]:
    with open_cluster(workers=2, wait_s=60) as cases:
        yield cases


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_ensemble(tmp_path_factory.mktemp("data"), n_cases=6, split=SPLIT)


def processes(workers: DaskCases) -> set[int]:
    return set(workers.client.run(os.getpid).values())


def test_a_worker_killed_in_the_middle_of_a_fit_changes_nothing(
    workers: DaskCases, manifest: Manifest, tmp_path: Path
) -> None:
    before = processes(workers)
    faulty = with_fault(workers, "case_01", "kill", tmp_path / "killed")
    found = fit(manifest, method="dc", trials=2, device=CPU, case_map=faulty)
    assert (tmp_path / "killed").exists()
    assert found.sha256 == fit(manifest, method="dc", trials=2, device=CPU).sha256
    workers.client.wait_for_workers(2, timeout=60)
    assert processes(workers) != before


def test_cases_are_shared_out_to_all_workers(workers: DaskCases, tmp_path: Path) -> None:
    """Workers that have the function already, and those that have done more, are not preferred."""
    workers.client.wait_for_workers(2, timeout=60)
    processes = [outcome.result() for outcome in workers(Meet(tmp_path), range(8))]
    assert all(one != other for one, other in zip(processes[::2], processes[1::2], strict=True))


def test_a_worker_killed_while_it_tries_a_trial_changes_nothing(
    workers: DaskCases, manifest: Manifest, tmp_path: Path
) -> None:
    faulty = with_fault(workers, "trial 1", "kill", tmp_path / "killed")
    found = fit(manifest, method="dc", trials=3, device=CPU, case_map=faulty)
    assert (tmp_path / "killed").exists()
    assert found.sha256 == fit(manifest, method="dc", trials=3, device=CPU).sha256


def test_a_worker_killed_with_half_a_map_leaves_whole_maps_only(
    workers: DaskCases, manifest: Manifest, tmp_path: Path
) -> None:
    apply_calibrator(temperature(2.0), manifest, tmp_path / "alone", device=CPU)
    faulty = with_fault(workers, "case_02", "kill while writing", tmp_path / "killed")
    run = apply_calibrator(temperature(2.0), manifest, tmp_path / "cluster", device=CPU, case_map=faulty)
    assert (tmp_path / "killed").exists()
    assert len(run.done) == 6
    alone, found = files_below(tmp_path / "alone"), files_below(tmp_path / "cluster")
    del alone["run.json"], found["run.json"]
    assert found == alone
    assert not list((tmp_path / "cluster").rglob(f"{TEMPORARY_PREFIX}*"))


def test_a_case_under_way_when_its_run_ends_writes_nothing_any_more(
    workers: DaskCases, manifest: Manifest, tmp_path: Path
) -> None:
    """Another run may own the folder by then."""
    workers.client.wait_for_workers(2, timeout=60)
    out, held = tmp_path / "out", []

    def case_map(work: Any, items: Any) -> Any:
        held.append(Held(work, failing="case_00", held="case_01", folder=tmp_path))
        return workers(held[0], items)

    with pytest.raises(DataError, match="case_00: nothing but noise"):
        apply_calibrator(temperature(2.0), manifest, out, device=CPU, case_map=case_map)
    time.sleep(1)  # for the word to reach the worker; whoever starts another run takes longer
    held[0].let_go.touch()
    wait_for(held[0].over)
    assert not any("case_01" in name for name in files_below(out))


def test_a_case_that_raises_is_listed_or_ends_the_run(workers: DaskCases, manifest: Manifest, tmp_path: Path) -> None:
    faulty = with_fault(workers, "case_02", "data error")
    with pytest.raises(DataError, match="case_02: nothing but noise"):
        fit(manifest, method="ts", device=CPU, case_map=faulty)
    run = apply_calibrator(temperature(2.0), manifest, tmp_path / "out", device=CPU, keep_going=True, case_map=faulty)
    assert run.failed == {"case_02": "case_02: nothing but noise"}
    assert len(run.done) == 5
    assert evaluate(manifest, device=CPU, keep_going=True, case_map=faulty).failed == run.failed


def test_a_case_that_does_not_fit_into_memory_is_named(workers: DaskCases, manifest: Manifest) -> None:
    faulty = with_fault(workers, "case_02", "memory error")
    with pytest.raises(LostCaseError, match=r"case_02: worker tls://\S+ ran out of memory; give each worker more"):
        evaluate(manifest, device=CPU, case_map=faulty)


def test_a_bug_stays_what_it_is(workers: DaskCases, manifest: Manifest) -> None:
    with pytest.raises(KeyError, match="nobody thought of this"):
        evaluate(manifest, device=CPU, keep_going=True, case_map=with_fault(workers, "case_02", "bug"))


def test_an_error_that_cannot_travel_says_what_it_was_and_where(workers: DaskCases) -> None:
    error = next(workers(raise_stubborn, ["case_02"])).error
    assert isinstance(error, RuntimeError)
    assert str(error) == "Stubborn: case_02 is no file"
    assert "in raise_stubborn" in error.__notes__[0]


def test_a_missing_file_asks_whether_the_worker_can_see_it(workers: DaskCases, tmp_path: Path) -> None:
    broken = write_ensemble(tmp_path, n_cases=2)
    broken.resolve(broken.cases[1].members[0]).unlink()
    elsewhere = DaskCases(workers.client, elsewhere=True)
    with pytest.raises(MissingFileError, match=r"case_01\.npz.*worker tls://\S+ sees it: is the folder on a file"):
        evaluate(broken, device=CPU, case_map=elsewhere)
    alone = evaluate(broken, device=CPU, keep_going=True)
    assert evaluate(broken, device=CPU, keep_going=True, case_map=workers).failed == alone.failed


def test_a_worker_with_other_versions_is_refused_and_both_are_named(
    workers: DaskCases, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**remote.versions(), "torch": "1.0"}
    monkeypatch.setattr("segcal.scale.dask_cases.versions", lambda: other)
    with pytest.raises(ClusterError, match=r"worker tls://\S+ runs torch 2\S+, this process torch 1\.0: results could"):
        evaluate(manifest, device=CPU, keep_going=True, case_map=workers)
    with pytest.raises(ClusterError, match="this process torch 1"):
        cluster._check_versions(workers.client, other)


def test_a_scheduler_of_another_environment_is_an_error_before_the_run(
    workers: DaskCases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "versions", unreadable)
    with pytest.raises(ClusterError, match=r"the scheduler cannot read what segcal sends .* from the same environment"):
        cluster._check_versions(workers.client, remote.versions())


def test_a_worker_that_does_not_answer_is_not_waited_for_at_the_start(
    workers: DaskCases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ANSWER_S", 1.0)
    workers.client.wait_for_workers(2, timeout=60)
    frozen = min(processes(workers))
    os.kill(frozen, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        cluster._check_versions(workers.client, remote.versions())
        assert time.monotonic() - begin < 20
        with pytest.raises(ClusterError, match="this process torch 1"):  # the other one has answered
            cluster._check_versions(workers.client, {**remote.versions(), "torch": "1.0"})
    finally:
        os.kill(frozen, signal.SIGCONT)


@pytest.mark.parametrize(
    ("error", "fault_of"),
    [
        (ImportError("nrrd files need pynrrd"), "case"),
        (ModuleNotFoundError("No module named 'segcal'", name="segcal"), "cluster"),
        (ClusterError("worker runs torch 1.0"), "cluster"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_case_and_the_cluster_are_told_apart_also_when_it_ran_alone(
    workers: DaskCases, error: Exception, fault_of: str, alone: bool
) -> None:
    run = dask_cases._Run(workers.client, 60.0)
    future = workers.client.submit(raising, error, pure=False)
    if fault_of == "cluster":
        with pytest.raises(ClusterError, match=r"torch 1\.0|cannot import segcal"):
            run.outcome("case_02", future, alone=alone)
    else:
        assert str(run.outcome("case_02", future, alone=alone)[1]) == "nrrd files need pynrrd"


def test_patience_begins_when_nobody_is_found_not_when_somebody_was_last_seen(
    workers: DaskCases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that was suspended for longer than its patience still gives new workers a moment."""
    run = dask_cases._Run(workers.client, 10.0)
    run._look()
    now = time.monotonic()
    monkeypatch.setattr(dask_cases._Run, "_threads", lambda _: (0, "no worker was there", True))
    for seconds in (1000, 1009):
        monkeypatch.setattr(dask_cases.time, "monotonic", lambda at=now + seconds: at)
        run._look()
    monkeypatch.setattr(dask_cases.time, "monotonic", lambda: now + 1011)
    with pytest.raises(ClusterError, match="no worker was there for 10 s"):
        run._look()


def test_what_dask_logs_of_a_lost_scheduler_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with cluster._quiet("distributed"):
        for name in ("distributed", "distributed.client", "distributed.core"):
            logging.getLogger(name).error("Failed to reconnect to scheduler")
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_case_that_kills_every_worker_is_the_only_one_lost(
    n_workers: int, manifest: Manifest, tmp_path: Path
) -> None:
    """Cases that waited on the same workers are not blamed."""
    with open_cluster(workers=n_workers, wait_s=60) as cases:
        faulty = with_fault(cases, "case_02", "kill")
        run = apply_calibrator(
            temperature(2.0), manifest, tmp_path / "out", device=CPU, keep_going=True, case_map=faulty
        )
    assert list(run.failed) == ["case_02"]
    assert "case_02: 6 workers died while they worked on it" in run.failed["case_02"]
    assert len(run.done) == 5


def test_a_local_worker_that_dask_has_given_up_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask gives up one that is not there so long after it was lost; with one worker nobody would be left."""
    monkeypatch.setitem(cluster.LOCAL_SETTINGS, "distributed.deploy.lost-worker-timeout", "200ms")
    with open_cluster(workers=1, wait_s=30) as cases:
        local = cases.client.cluster
        first = local.workers[0]
        faulty = with_fault(cases, "1", "kill", tmp_path / "killed")
        assert [outcome.result()[0] for outcome in faulty(Slow(3), range(3))] == [0, 1, 2]
        assert len(local.workers) == 1
        assert local.workers[0] is not first


@pytest.mark.slow
def test_a_worker_that_outgrows_its_memory_is_ended_and_its_case_done_elsewhere(
    manifest: Manifest, tmp_path: Path
) -> None:
    with open_cluster(workers=2, memory_limit="1.2GB", wait_s=60) as cases:
        faulty = with_fault(cases, "case_02", "eat memory", tmp_path / "eaten")
        found = fit(manifest, method="ts", device=CPU, case_map=faulty)
    assert (tmp_path / "eaten").exists()
    assert found.sha256 == fit(manifest, method="ts", device=CPU).sha256


@contextmanager
def scheduler(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    file = tmp_path / "scheduler.json"
    options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    with dask_process("dask_scheduler", *options) as process:
        deadline = time.monotonic() + 90
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield process, json.loads(file.read_text())["address"]


def test_a_cluster_somebody_started_gives_the_same_and_its_end_is_told(manifest: Manifest, tmp_path: Path) -> None:
    with scheduler(tmp_path) as (process, address):
        with (
            pytest.raises(ClusterAwayError, match=rf"{address}: no worker arrived within 1 s\. Start some with"),
            open_cluster(scheduler=address, wait_s=1),
        ):
            pass
        worker = (address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(tmp_path))
        with dask_process("dask_worker", *worker), open_cluster(scheduler=address, wait_s=90) as cases:
            alone = fit(manifest, method="dc", trials=2, device=CPU)
            assert fit(manifest, method="dc", trials=2, device=CPU, case_map=cases).sha256 == alone.sha256
            impatient = DaskCases(cases.client, patience_s=3)
            outcomes = impatient(sleep_long, range(4))
            process.kill()
            with pytest.raises(ClusterAwayError, match=rf"the cluster at {address} is gone"):
                next(outcomes)


@pytest.mark.slow
def test_a_cluster_whose_workers_all_go_away_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with scheduler(tmp_path) as (_, address):
        worker = (address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(tmp_path))
        with dask_process("dask_worker", *worker) as process, open_cluster(scheduler=address, wait_s=90) as cases:
            outcomes = DaskCases(cases.client, patience_s=3)(Slow(1), range(100))
            next(outcomes)
            process.kill()
            with pytest.raises(ClusterError, match="no worker was there for 3 s") as told:
                list(outcomes)
            assert not isinstance(told.value, ClusterAwayError)  # they may have died of their work


def test_an_address_where_nobody_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segcal.scale.cluster.CONNECT_S", 1.0)
    with (
        pytest.raises(ClusterAwayError, match=r"tcp://127\.0\.0\.1:9: no Dask scheduler answers there"),
        open_cluster(scheduler="tcp://127.0.0.1:9"),
    ):
        pass


def test_one_who_accepts_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segcal.scale.cluster.CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        begin = time.monotonic()
        with (
            pytest.raises(ClusterAwayError, match=f"{address}: no Dask scheduler answers there"),
            open_cluster(scheduler=address),
        ):
            pass
        assert time.monotonic() - begin < 20


def test_tls_without_certificates_names_the_settings() -> None:
    with (
        pytest.raises(UsageError, match=r"tls://127\.0\.0\.1:9: needs certificates .* DASK_DISTRIBUTED__COMM__TLS"),
        open_cluster(scheduler="tls://127.0.0.1:9"),
    ):
        pass


def test_patience_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        cluster.dask.config.set({"segcal.wait-for-workers": "abc"}),
        pytest.raises(UsageError, match=r"DASK_SEGCAL__WAIT_FOR_WORKERS .* is 'abc'; expected seconds"),
        open_cluster(workers=1),
    ):
        pass


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8786",
        "8786",
        "tcp://",
        "http://host:8787",
        "tcp://host",
        "tcp://host:x",
        "tcp://host:9/x",
        "tcp://a:99999",
    ],
)
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with (
        pytest.raises(UsageError, match=r"expected an address such as tcp://host:8786"),
        open_cluster(scheduler=address),
    ):
        pass


def test_one_kind_of_cluster_is_asked_for() -> None:
    for options in ({}, {"scheduler": "tcp://127.0.0.1:9", "workers": 2}):
        with pytest.raises(UsageError, match="either --scheduler ADDRESS or --workers N"), open_cluster(**options):
            pass
