"""Running what is measured in a process of its own, so that its CPU seconds and its peak memory are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

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
    with TemporaryFile() as output, TemporaryFile() as errors:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **(environment or {})})
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)  # wait4 has collected it: Popen must not wait again
        output.seek(0)
        errors.seek(0)
        printed = output.read().decode()
        if child.returncode != 0:
            raise ChildError(f"{' '.join(command)} ended with {child.returncode}:\n{errors.read().decode()[-3000:]}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return Cost(usage.ru_utime + usage.ru_stime, wall, peak, printed)
