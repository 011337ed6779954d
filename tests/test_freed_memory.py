"""Memory that was freed goes back to the system when asked to."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Blocks too small to be mapped one by one, and a last one that keeps the allocator from shrinking on its own.
SCRIPT = """
import platform
from segcal.freed_memory import give_back

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

blocks = [bytearray(60_000) for _ in range(2000)]
last = bytearray(60_000)
full = resident_mb()
blocks.clear()
freed = resident_mb()
give_back()
print(platform.libc_ver()[0], full - freed, freed - resident_mb())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only the allocator of Linux keeps so much")
def test_freed_blocks_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    library, *sizes = done.stdout.split()
    if library != "glibc":
        pytest.skip(f"{library or 'this C library'} has no malloc_trim")
    by_itself, when_asked = (float(size) for size in sizes)
    assert by_itself < 20
    assert when_asked > 90
