"""The service under load, on this machine only: submissions, status polls and slices at once; a long queue; memory.

    python benchmarks/service.py              about three minutes, SQLite
    python benchmarks/service.py --quick      small numbers, to see that it runs
    python benchmarks/service.py --store postgresql://user@127.0.0.1:5432/segcal    an empty database

Bounded in count and time. No job is worked on (`--workers 0`), so what is measured is the server and its store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import nibabel
import numpy as np
from _load import Answers, Ask, load, post_json
from _results import Entry, entry, record

from segcal.service.model import NewCase
from segcal.service.requests import QaRequest
from segcal.service.store import Store, open_store

SHAPE = (155, 240, 240)
_CLI = "import sys; from segcal_cli.main import run; sys.exit(run())"


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    queued: int
    mixed_requests: int
    mixed_seconds: float
    polls: int
    shape: tuple[int, int, int]


FULL = Plan(queued=10_000, mixed_requests=2_000, mixed_seconds=40.0, polls=18_000, shape=SHAPE)
QUICK = Plan(queued=200, mixed_requests=30, mixed_seconds=5.0, polls=200, shape=(16, 24, 24))
SHORT_QUEUE = 60
POLLS_OF_AN_HOUR = "an hour of polls: ten open pages that ask every two seconds"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--store", help="address of a PostgreSQL store; SQLite when absent")
    given = options.parse_args()
    plan = QUICK if given.quick else FULL
    with tempfile.TemporaryDirectory(prefix="segcal-service-") as folder:
        data = Path(folder) / "data"
        manifest = Path(folder) / "root" / "manifest.yaml"
        _write_manifest(manifest)
        url = given.store or f"sqlite:///{data / 'segcal.db'}"
        data.mkdir()
        store = open_store(url)
        calibrator = _add_calibrator(store, data)
        key = _add_case(store, data, calibrator, plan.shape)
        entries: list[Entry] = []
        with _serving(data, manifest.parent, given.store) as server:
            request = {"kind": "qa", "calibrator": calibrator, "manifest": str(manifest)}
            job_id = server.submit(request)
            _fill_queue(store, calibrator, manifest, SHORT_QUEUE)  # so that both listings are a full page
            short = _polls(server, job_id, plan, f"{SHORT_QUEUE} queued")
            _fill_queue(store, calibrator, manifest, plan.queued)
            long = _polls(server, job_id, plan, f"{plan.queued:,} queued")
            for what in ("poll", "list"):
                ratio = long.quantile(what, 50) / short.quantile(what, 50)
                print(f"  {what}: a long queue makes the median {ratio:.2f} times as long")
                entries.append(entry(f"{what}/long_over_short_queue", ratio, "ratio", 1.5))
            entries += _mixed(server, request, job_id, key, plan)
            entries += _memory(server, job_id, plan)
        store.close()
    # The figures of one database do not take the place of the other's.
    name = "service_postgresql/" if given.store else "service/"
    record([replace(each, name=f"{name}{each.name}") for each in entries], quick=given.quick)


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int

    def submit(self, request: dict[str, str]) -> str:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/jobs",
            json.dumps(request).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return str(json.loads(answer.read())["id"])

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def _serving(data: Path, root: Path, store: str | None) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _CLI, "serve", "--data", str(data), "--root", str(root), "--port", str(port)]
    command += ["--workers", "0", "--queue-limit", "1000000", *(["--store", store] if store else [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_alive(process, port)
        yield Server(process, port)
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_alive(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(300):
        if process.poll() is not None:
            raise SystemExit(f"segcal serve ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("segcal serve does not answer")


def _polls(server: Server, job_id: str, plan: Plan, title: str) -> Answers:
    """Status and listing alone, one client each, so that times are those of the server and not of a queue."""

    def client(number: int) -> Ask:
        if number % 2:
            return Ask("list", "GET", "/v1/jobs?limit=50")
        return Ask("poll", "GET", f"/v1/jobs/{job_id}")

    load(server.port, [client], requests=20, seconds=10)  # warm
    answers = load(server.port, [client], requests=plan.mixed_requests, seconds=plan.mixed_seconds)
    _print(title, answers)
    return answers


def _mixed(server: Server, request: dict[str, str], job_id: str, key: int, plan: Plan) -> list[Entry]:
    """Two clients submit, four poll, two look through slices."""
    depth = plan.shape[0]
    places = itertools.count()

    def submit(_: int) -> Ask:
        return post_json("submit", "/v1/jobs", request)

    def poll(number: int) -> Ask:
        return Ask("poll", "GET", f"/v1/jobs/{job_id}" if number % 5 else "/v1/jobs?limit=50")

    def slices(_: int) -> Ask:
        return Ask("slice", "GET", f"/v1/cases/{key}/slices/p1/z/{next(places) % depth}.png")

    clients: list[Callable[[int], Ask]] = [submit] * 2 + [poll] * 4 + [slices] * 2
    before = server.cpu_s()
    answers = load(server.port, clients, requests=plan.mixed_requests, seconds=plan.mixed_seconds)
    busy = (server.cpu_s() - before) / answers.wall_s
    _print("submissions, polls and slices at once, 8 clients", answers)
    print(f"  the server used {busy:.2f} of a core")
    entries: list[Entry] = [entry("mixed/server_cores", busy, "cores")]
    for what in ("submit", "poll", "slice"):
        entries.append(entry(f"mixed/{what}/rate", answers.rate(what), "1/s"))
        entries.append(entry(f"mixed/{what}/p50", answers.quantile(what, 50), "ms"))
        entries.append(entry(f"mixed/{what}/p99", answers.quantile(what, 99), "ms"))
    return entries


def _memory(server: Server, job_id: str, plan: Plan) -> list[Entry]:
    """Resident memory after every quarter of an hour's polls, sent as fast as they are answered."""

    def poll(_: int) -> Ask:
        return Ask("poll", "GET", f"/v1/jobs/{job_id}")

    print(POLLS_OF_AN_HOUR)
    sizes = [server.resident_mb()]
    for _ in range(4):
        load(server.port, [poll] * 2, requests=plan.polls // 8, seconds=60)
        sizes.append(server.resident_mb())
    print(f"  resident memory: {', '.join(f'{size:.0f}' for size in sizes)} MB")
    return [
        entry("memory/resident", sizes[-1], "MB"),
        entry("memory/growth_over_an_hour_of_polls", sizes[-1] - sizes[1], "MB", 10.0),
    ]


def _print(title: str, answers: Answers) -> None:
    print(title)
    for what in answers.milliseconds:
        codes = ", ".join(f"{code}: {count:,}" for code, count in sorted(answers.codes[what].items()))
        median, slowest = answers.quantile(what, 50), answers.quantile(what, 99)
        print(f"  {what:7} {answers.rate(what):8.0f}/s   p50 {median:7.1f} ms   p99 {slowest:7.1f} ms   ({codes})")


def _write_manifest(path: Path) -> None:
    """A manifest that can be submitted; nobody ever opens its member."""
    path.parent.mkdir(parents=True)
    np.savez(path.parent / "a.npz", logits=np.zeros((2, 1, 1, 1), np.float32))
    path.write_text(
        "version: 1\nname: load\nkind: logits\naxes: czyx\nclasses: [background, object]\n"
        "cases:\n  - {id: a, members: [a.npz]}\n"
    )


def _add_calibrator(store: Store, data: Path) -> str:
    from segcal.calibrator_info import CalibratorInfo
    from segcal.calibrators.temperature import TemperatureScaling
    from segcal.fitted import FittedCalibrator
    from segcal.service.calibrator_files import import_calibrator
    from segcal.service.files import ServiceFiles

    info = CalibratorInfo(
        method="ts",
        classes=("background", "object"),
        pooling="logits",
        kind="logits",
        translation_invariant=True,
        preserves="order",
    )
    path = data / "ts.safetensors"
    FittedCalibrator(TemperatureScaling(temperature=2.0), info).save(path)
    return import_calibrator(path, "load", ServiceFiles(data), store).sha256


def _fill_queue(store: Store, calibrator: str, manifest: Path, n: int) -> None:
    request = QaRequest(calibrator=calibrator, manifest=str(manifest))
    for _ in range(n):
        store.jobs.submit(request, batch="load", submitted_by="", queue_limit=10**9)


def _add_case(store: Store, data: Path, calibrator: str, shape: tuple[int, int, int]) -> int:
    """A case whose layers can be looked at, as a finished job leaves it."""
    request = QaRequest(calibrator=calibrator, folder="/nowhere")
    job = store.jobs.submit(request, batch="load", submitted_by="", queue_limit=10**9)
    claim = store.jobs.claim("benchmark", 600.0)
    assert claim is not None
    view = data / "jobs" / job.id / "view" / "0"
    view.mkdir(parents=True)
    z, y, x = np.ogrid[: shape[0], : shape[1], : shape[2]]
    middle = [size / 2 for size in shape]
    distance = sum(((axis - centre) / centre) ** 2 for axis, centre in zip((z, y, x), middle, strict=True))
    share = (255 / (1 + np.exp(12 * (distance - 0.4)))).astype(np.uint8)
    layer = nibabel.Nifti1Image(share.T, np.eye(4))
    layer.header.set_slope_inter(1 / 255, 0.0)
    nibabel.save(layer, view / "p1.nii.gz")
    layers = [{"name": "p1", "title": "object", "file": "p1.nii.gz", "kind": "share", "low": 0.0, "high": 1.0}]
    described = {
        "shape": list(shape),
        "spacing": [1.0, 1.0, 1.0],
        "classes": ["background", "object"],
        "labels": ["background", "object"],
        "layers": layers,
        "middle": [size // 2 for size in shape],
    }
    (view / "view.json").write_text(json.dumps(described))
    case = NewCase(case_id="a", status="ok", calibrator=calibrator, expected_dsc=0.9, view="view/0")
    assert store.jobs.finish(claim, message="1 case", result={}, cases=[case], calibrators=[])
    return store.cases.of_job(job.id)[0].key


if __name__ == "__main__":
    main()
