"""The repository itself: nothing of one machine in it, modules of a readable size, targets that do what they say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path for folder in ("segcal", "cli") for path in (ROOT / folder).rglob("*.py"))
LONGEST_MODULE = 400

# Put together here so that this file does not contain what it looks for.
FORBIDDEN = {
    "a path of one machine": re.compile("|".join(rf"(?<![\w.])/{name}/" for name in ("work", "root", "home"))),
    "the host of a package registry": re.compile(
        "|".join((r"pypi\.", "python" + "hosted", r"download\.py" + "torch", "arti" + "factory"))
    ),
}


def ignored(path: Path) -> bool:
    patterns = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    patterns = [".git", *(pattern for pattern in patterns if pattern and not pattern.startswith("#"))]
    relative = path.relative_to(ROOT)
    return any(fnmatch(name, pattern) for name in (relative.as_posix(), path.name) for pattern in patterns)


def files(folder: Path = ROOT) -> Iterator[Path]:
    """Every file of the repository that git would keep."""
    for path in sorted(folder.iterdir()):
        if ignored(path):
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def test_nothing_of_one_machine_is_in_the_repository() -> None:
    findings = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for what, pattern in FORBIDDEN.items():
            findings += [f"{path.relative_to(ROOT)}: {what}: {found}" for found in set(pattern.findall(text))]
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("text", ["see /" + "work/main", '"/' + "root/x", "https://py" + "pi.org/simple"])
def test_the_search_would_notice(text: str) -> None:
    assert any(pattern.search(text) for pattern in FORBIDDEN.values())


def test_no_module_is_too_long_to_read() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES
    }
    assert len(lengths) > 10
    assert not {name: length for name, length in lengths.items() if length > LONGEST_MODULE}


def test_no_module_is_called_after_nothing() -> None:
    assert not [path for path in MODULES if path.stem in {"utils", "util", "helpers", "misc"}]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_core_never_imports_the_edge() -> None:
    """Report, nnU-Net, service and scale-out stand on the core; the library never imports the command line."""
    edge = (
        "segcal.report",
        "segcal.qa",
        "segcal.demo",
        "segcal.nnunet",
        "segcal.classification",
        "segcal.service",
        "segcal.scale",
    )
    findings = []
    for path in (ROOT / "segcal").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in imports(path):
            into_edge = name.startswith(edge) and not module.startswith(edge)
            if into_edge or name.partition(".")[0] in {"segcal_cli", "cli", "typer"}:
                findings.append(f"{module} imports {name}")
    assert not findings


def make(*arguments: str) -> str:
    # An outer `make test` hands its flags on through the environment.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_make_alone_lists_every_target() -> None:
    shown = {line.split()[1] for line in make().splitlines()}
    assert {"setup", "demo", "test", "test-all", "lint", "bench", "chromium", "clean", "help"} <= shown
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared is not None
    assert shown == set(declared[1].split())


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("test", ["ruff check", "ruff format --check", "mypy", '-m "not slow"', "OMP_NUM_THREADS=1"]),
        ("test-all", ["ruff check", "ruff format --check", "mypy", "pytest"]),
        ("demo", ["segcal demo --out demo_out"]),
    ],
)
def test_a_target_runs_what_it_says(target: str, parts: list[str]) -> None:
    shown = make("--dry-run", target)
    for part in parts:
        assert part in shown
    if target == "test-all":
        assert "not slow" not in shown


def test_the_gate_is_make_test_and_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-1] == "make test"
    subprocess.run(["bash", "-n", str(script)], check=True)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(parts) == 2 for parts in split), "name==version only: no editable lines, no addresses"
    return {normal(name): version for name, version in split}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_pin_torch_with_its_torchvision_and_no_local_builds() -> None:
    pinned = pins()
    assert (pinned["torch"], pinned["torchvision"]) == ("2.13.0", "0.28.0")
    assert not [name for name, version in pinned.items() if "+" in version]
    assert "segcal" not in pinned


def test_constraints_cover_everything_make_setup_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["dask"],
    ]
    names = {normal(re.split(r"[<>=!~\[ ]", requirement)[0]) for requirement in wanted}
    assert names <= set(pins())
