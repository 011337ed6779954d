"""Running what is measured in a process of its own, so that its CPU seconds and its peak memory are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

HERE = Path(__file__).parent
_CLI = "import sys; from segcal_cli.main import run; sys.exit(run())"


@dataclass(frozen=True)
class Cost:
    """What a process took, its own children included.

    Attributes:
        cpu_s: user and system time.
        wall_s: from start to end.
        peak_mb: largest resident memory of any one process, 10^6 bytes.
        printed: its standard output.
    """

    cpu_s: float
    wall_s: float
    peak_mb: float
    printed: str

    def without(self, cpu_s: float, wall_s: float) -> Cost:
        """The same run without seconds that do not belong to it."""
        return Cost(self.cpu_s - cpu_s, self.wall_s - wall_s, self.peak_mb, self.printed)

    def said(self) -> dict[str, float]:
        """The JSON object in the last line of its output."""
        found: dict[str, float] = json.loads(self.printed.strip().splitlines()[-1])
        return found


class ChildError(RuntimeError):
    """A measured process ended badly or ran out of time."""


def segcal(*arguments: object) -> Cost:
    """Run a segcal command."""
    return run([sys.executable, "-c", _CLI, *map(str, arguments)])


def script(name: str, *arguments: object) -> Cost:
    """Run a script of this folder."""
    return run([sys.executable, str(HERE / name), *map(str, arguments)])


def run(command: Sequence[str], *, environment: dict[str, str] | None = None) -> Cost:
    """Run a command to its end and read what it used from the system."""
    with TemporaryFile() as output, TemporaryFile() as errors, NamedTemporaryFile("r") as usage:
        launcher = [sys.executable, "-IS", str(HERE / "_launch.py"), usage.name, *command]
        subprocess.run(launcher, stdout=output, stderr=errors, env={**os.environ, **(environment or {})}, check=True)
        output.seek(0)
        errors.seek(0)
        printed = output.read().decode()
        used = json.load(usage)
        if used["code"] != 0:
            raise ChildError(f"{' '.join(command)} ended with {used['code']}:\n{errors.read().decode()[-3000:]}")
    return Cost(used["cpu_s"], used["wall_s"], used["peak_mb"], printed)
