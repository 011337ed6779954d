"""Starts a command and writes down what it used; a process so small that nothing of it shows in the figures.

Linux charges a new process with the peak memory of the one that started it. A benchmark that has just made its data
holds a gigabyte, which is more than what it measures; this launcher holds ten megabytes.

    python -IS benchmarks/_launch.py USAGE.json COMMAND ...
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(target: str, *command: str) -> None:
    """Run the command to its end; its exit code is part of what is written."""
    begin = time.perf_counter()
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)  # wait4 has collected it: Popen must not wait again
    used = {
        "code": child.returncode,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.perf_counter() - begin,
        "peak_mb": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6,
    }
    Path(target).write_text(json.dumps(used))


if __name__ == "__main__":
    main(*sys.argv[1:])
