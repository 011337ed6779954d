"""Fits and ECE in memory against the peers: 2,000,000 x 5 float32, one thread, the same arrays, the same run.

The peers live in an environment of their own (.venv-peers), which the first run creates; torch is the version of
constraints.txt. CPU seconds are those of the fit alone, without imports and without preparing the arrays. The NLL is
computed here, in double precision, from what each tool makes of the logits. A fit that takes longer than the time-out
did not finish, and the time-out stands for its seconds, a lower bound.

    python benchmarks/peers.py [--quick] [--rows 2000000] [--timeout 170] [--method ts vs ms dc ece]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _children import HERE, ChildError, run
from _results import Entry, entry, record
from scipy.special import log_softmax

PACKAGES = (
    "torch",
    "scikit-learn",
    "netcal",
    "torchmetrics",
    "probmetrics",
    "numba",  # probmetrics imports it without asking for it
    "torch-uncertainty",
    "lightning",  # this and what follows torch-uncertainty imports, but asks for only in extras or not at all
    "timm",
    "einops",
    "rich",
)
PEERS = {
    "ts": ("sklearn", "netcal", "probmetrics", "torch-uncertainty"),
    "vs": ("probmetrics", "torch-uncertainty", "netcal"),
    "ms": ("probmetrics", "torch-uncertainty"),
    "dc": ("torch-uncertainty",),
    "ece": ("torchmetrics",),
}
QUICK_METHODS = ("ts", "ece")
ENVIRONMENT = HERE.parent / ".venv-peers"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
NLL_TOLERANCE = 1e-6
N_CLASSES = 5


@dataclass(frozen=True)
class Outcome:
    """One tool on one method: seconds (a lower bound unless it finished) and the NLL or ECE it reached."""

    tool: str
    cpu_s: float
    value: float | None
    problem: str = ""


def main() -> None:
    """Print the table and write the entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 rows of ts and ece, with peers that are there")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--timeout", type=int, default=170, help="CPU seconds for a peer's fit")
    parser.add_argument("--method", nargs="+", choices=PEERS)
    options = parser.parse_args()
    n_rows = options.rows or (20_000 if options.quick else 2_000_000)
    if options.quick and not (ENVIRONMENT / ".ready").is_file():
        print(f"{ENVIRONMENT.name} is not there: the peers are left out; run without --quick once to create it")
        python = None
    else:
        python = peer_python()
    with TemporaryDirectory(prefix="segcal-peers-") as folder:
        draw(Path(folder), n_rows)
        print(f"{n_rows:,} x {N_CLASSES} float32, one thread")
        print("| method | tool | CPU s | NLL (ece: ECE) | note |\n|---|---|---|---|---|")
        for method in options.method or (QUICK_METHODS if options.quick else PEERS):
            found = measure(Path(folder), method, python, options.timeout)
            record(verdicts(method, found), quick=options.quick)


def peer_python() -> Path:
    """The interpreter of the peers' environment; made and filled when missing."""
    python = ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    ready = ENVIRONMENT / ".ready"
    wanted = "\n".join(PACKAGES)
    if not ready.is_file() or ready.read_text() != wanted:
        print(f"installing {', '.join(PACKAGES)} into {ENVIRONMENT.name}", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
        constraints = HERE.parent / "constraints.txt"
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(constraints),
        ]
        subprocess.run([*install, *PACKAGES], check=True)
        ready.write_text(wanted)
    return python


def draw(folder: Path, n_rows: int, seed: int = 0) -> None:
    """Mostly background, over-confident, and mixed between the classes, so that every method has something to gain."""
    rng = np.random.default_rng(seed)
    owner = rng.choice(N_CLASSES, n_rows, p=[0.8, 0.08, 0.06, 0.04, 0.02])
    z = rng.standard_normal((n_rows, N_CLASSES), dtype=np.float32) * 2.5
    z[np.arange(n_rows), owner] += 6.0
    z += rng.standard_normal((n_rows, 1), dtype=np.float32)
    weights = 0.37 * np.eye(N_CLASSES) + 0.05 * rng.standard_normal((N_CLASSES, N_CLASSES))
    true = z @ weights.T + np.array([0.6, -0.1, 0.0, 0.1, -0.4])
    labels = (true + rng.gumbel(size=true.shape)).argmax(1)
    np.save(folder / "logits.npy", z)
    np.save(folder / "labels.npy", labels.astype(np.int64))


def measure(folder: Path, method: str, python: Path | None, timeout: int) -> list[Outcome]:
    """Ours first, then every peer that has the method."""
    commands = {"segcal": [sys.executable, str(HERE / "_ours.py"), method, str(folder)]}
    for peer in PEERS[method] if python is not None else ():
        commands[peer] = [str(python), str(HERE / "_peer.py"), peer, method, str(folder), "--timeout", str(timeout)]
    outcomes = []
    for tool, command in commands.items():
        outcome = _outcome(folder, method, tool, command, timeout)
        outcomes.append(outcome)
        shown = "" if outcome.value is None else f"{outcome.value:.7f}"
        bound = ">" if outcome.problem == "did not finish" else ""
        print(f"| {method} | {tool} | {bound}{outcome.cpu_s:.2f} | {shown} | {outcome.problem} |", flush=True)
    return outcomes


def _outcome(folder: Path, method: str, tool: str, command: list[str], timeout: int) -> Outcome:
    try:
        said: dict[str, Any] = json.loads(run(command, environment=ONE_THREAD).printed.strip().splitlines()[-1])
    except ChildError as error:
        if "ended with -24" in str(error):  # SIGXCPU
            return Outcome(tool, float(timeout), None, "did not finish")
        return Outcome(tool, math.nan, None, str(error).strip().splitlines()[-1][:120])
    values = np.load(folder / f"{tool}_{method}.npy")
    if said["kind"] == "value":
        return Outcome(tool, said["cpu_s"], float(values[0]))
    labels = np.load(folder / "labels.npy")
    with np.errstate(divide="ignore"):
        log_probs = log_softmax(values, axis=1) if said["kind"] == "logits" else np.log(values)
    nll = -np.take_along_axis(log_probs.astype(np.float64), labels[:, None], axis=1).mean()
    return Outcome(tool, said["cpu_s"], float(nll))


def verdicts(method: str, outcomes: list[Outcome]) -> list[Entry]:
    """Our seconds, how many times faster than the best peer, and how much worse our NLL is than the best of theirs."""
    ours, *peers = outcomes
    name = f"peers/{method}"
    entries = [entry(f"{name}/{one.tool} cpu", None if math.isnan(one.cpu_s) else one.cpu_s, "s") for one in outcomes]
    rivals = [one for one in peers if one.tool == "sklearn" or method != "ts"]
    finished = [one for one in rivals if not math.isnan(one.cpu_s)]
    if not finished:
        return entries
    target = {"ts": 1.0, "ece": 1.0}.get(method, 5.0)
    speed = min(one.cpu_s for one in finished) / ours.cpu_s
    best = "sklearn" if method == "ts" else "best peer"
    entries.append(entry(f"{name}/{best} over ours", speed, "x", target, at_least=True))
    reached = [one.value for one in peers if one.value is not None]
    if method != "ece" and reached and ours.value is not None:
        excess = ours.value - min(reached)
        entries.append(entry(f"{name}/nll above the best peer", excess, "nats", NLL_TOLERANCE))
    return entries


if __name__ == "__main__":
    main()
