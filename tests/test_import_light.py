"""`import segcal` is cheap and has no side effects; the public names bring the core, never the edge."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import segcal

ROOT = Path(__file__).resolve().parents[1]

# What only some commands need. The core may use torch, numpy, scipy, pydantic, yaml and the file libraries.
EDGE = [
    "optuna",
    "matplotlib",
    "sklearn",
    "pandas",
    "jinja2",
    "nnunetv2",
    "dask",
    "distributed",
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "psycopg",
    "prometheus_client",
    "typer",
    "numba",
    "rich",
]
CORE = ["torch", "numpy", "scipy", "pydantic", "yaml", "nibabel", "SimpleITK", "safetensors", "isal", "edt", "PIL"]

WATCHED_IMPORT = """
import json, os, sys
from collections.abc import MutableMapping

asked, events = [], []

class Watched(MutableMapping):
    def __init__(self, real): self.real = real
    def __getitem__(self, key): asked.append(str(key)); return self.real[key]
    def __setitem__(self, key, value): asked.append(str(key)); self.real[key] = value
    def __delitem__(self, key): asked.append(str(key)); del self.real[key]
    def __iter__(self): asked.append("*"); return iter(self.real)
    def __len__(self): return len(self.real)

os.environ, os.environb = Watched(os.environ), Watched(os.environb)

def hook(event, arguments):
    if event == "open":
        name = str(arguments[0])
        # The import machinery opens sources, byte code and libraries; everything else is a file somebody wanted.
        if not name.partition(".cpython-")[0].endswith((".py", ".pyc", ".so")) and ".cpython-" not in name:
            events.append(f"open {name}")
    elif event.startswith(("socket.", "subprocess.", "os.system", "urllib.")):
        events.append(event)

before = set(sys.modules)
sys.addaudithook(hook)
STATEMENT
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"asked": asked, "events": events, "loaded": sorted(loaded)}))
"""


def watched(statement: str) -> dict[str, list[str]]:
    script = WATCHED_IMPORT.replace("STATEMENT", statement)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seen: dict[str, list[str]] = json.loads(done.stdout)
    return seen


def test_import_opens_no_file_reads_no_variable_and_loads_nothing_heavy() -> None:
    seen = watched("import segcal")
    assert "segcal" in seen["loaded"]
    assert seen["asked"] == []
    assert seen["events"] == []
    assert not set(seen["loaded"]) & {*EDGE, *CORE}


@pytest.mark.parametrize(
    ("statement", "kind", "expected"),
    [
        ("import os; os.environ.get('HOME')", "asked", "HOME"),
        ("import os; os.getenv('SEGCAL_X')", "asked", "SEGCAL_X"),
        ("open('/dev/null').close()", "events", "open /dev/null"),
        ("import socket; socket.socket().close()", "events", "socket.__new__"),
    ],
)
def test_the_watch_would_notice(statement: str, kind: str, expected: str) -> None:
    assert expected in watched(statement)[kind]


EDGE_PARTS = (
    "segcal.report",
    "segcal.qa",
    "segcal.demo",
    "segcal.nnunet",
    "segcal.classification",
    "segcal.service",
    "segcal.scale",
)
TUNING = ("segcal.tuning.journal", "segcal.tuning.search")
COMPILED = "segcal.compiled."
"""Loops that are imported when they run."""


def core_modules() -> list[str]:
    paths = sorted((ROOT / "segcal").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.startswith((*EDGE_PARTS, COMPILED))]


def test_no_core_module_loads_a_library_of_the_edge() -> None:
    """Only what tunes may load optuna, when it tunes, and only a loop that runs numba; nobody else ever pays for it."""
    core = core_modules()
    reading = [name for name in core if name not in TUNING]
    assert {"segcal.pooling", "segcal.calibrators.base", "segcal.fitted"} <= set(reading)
    script = "import sys\nfrom importlib import import_module\n"
    for modules in (reading, core):
        script += f"for name in {modules!r}: import_module(name)\n"
        script += f"print(*(name for name in {EDGE!r} if name in sys.modules))\n"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    first, everything = done.stdout.splitlines()
    assert first == ""
    assert set(everything.split()) <= {"optuna"}


def cpu_seconds(statement: str) -> float:
    """CPU time of a fresh interpreter that runs `statement`; the load of the machine does not change it much."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_costs_a_fraction_of_importing_torch() -> None:
    rounds = [[cpu_seconds("import segcal"), cpu_seconds("import torch")] for _ in range(3)]
    ours, torchs = (statistics.median(values) for values in zip(*rounds, strict=True))
    assert ours <= 0.25 * torchs


def test_public_names_are_there_when_asked_for() -> None:
    script = (
        "import segcal\n"
        "from segcal import fit, fit_many\n"
        "assert fit is segcal.fit and callable(fit) and callable(fit_many)\n"
        "assert all(getattr(segcal, name) is not None for name in segcal.__all__)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_names_that_do_not_exist_are_attribute_errors_and_dir_lists_those_that_do() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        segcal.fitt  # type: ignore[attr-defined]  # noqa: B018
    assert set(segcal.__all__) <= set(dir(segcal))


def test_numba_is_loaded_by_the_loops_alone() -> None:
    """Half a second and 50 MB that only those pay who run a loop."""
    others = [name for name in core_modules() if not name.startswith("segcal.compiled.")]
    script = f"import sys\nfrom importlib import import_module\nfor name in {others!r}: import_module(name)\n"
    script += "print('numba' in sys.modules)\nimport segcal.compiled.voxel_counts\nprint('numba' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "True"]
